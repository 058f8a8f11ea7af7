# weft. Two commands do everything on a fresh machine:
#
#   make serve    the server on the embedded model     make serve ARGS="--port 9000 path/to/checkpoint"
#   make test     formatters, ruff, mypy, then every test          make test  ARGS="tests/arch -k links"
#
# Both make .venv first where it is missing or older than pyproject.toml or the C++ kernels.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Further pip options for torch alone, such as the index with PyTorch's CPU-only builds for Linux.
PIP_TORCH ?=
TEST_JOBS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles a module when it is first imported: most of what is installed never is.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile

# libgomp's threads spin at barriers unless told otherwise, which costs most when processes share cores.
export OMP_WAIT_POLICY := passive

# Modules are compiled once and kept, whatever the shell says. Otherwise each of hundreds of processes compiles torch
# and weft again: 3.5 CPU seconds for each start of a server.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: coverage figures fuzz fuzz-config hostile lock release sbom upgrade
.PHONY: help install serve format quick affected tidy suite test test-emulated-gpu test-gpu test-ranks-gpu compile-gpu check lowest newest audit sanitize mutants bench clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 7
	@echo "make install | serve | quick | affected | test | coverage | check (ruff, clang-format, mypy) | format | sanitize (the C++ kernels) | mutants | bench | clean"
	@echo "make test-emulated-gpu (minutes, and no GPU)"
	@echo "make test-gpu (needs a GPU) | test-ranks-gpu (needs two) | compile-gpu (needs none)"

install: $(STAMP)

# What builds weft is in .venv too. Pip would otherwise make an environment for it each time, with nanobind's headers in
# a new folder, and every file would be compiled again. The C++ kernels compile while pip waits for its other downloads,
# and unpacks them with one core.
BUILD_LOG := $(VENV)/build.log

$(STAMP): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "weft needs Python 3.11 or newer; $(PYTHON) is older. Name another: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing weft, $(TORCH) and what weft and its tests need"
	@$(BIN)/python -c 'import tomllib; \
	  whole = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*whole["build-system"]["requires"], sep="\n", file=open("$(VENV)/build-requirements.txt", "w")); \
	  print(*whole["project"]["dependencies"], *whole["project"]["optional-dependencies"]["test"], sep="\n")' \
	  >$(VENV)/requirements.txt
	@$(PIP) -r $(VENV)/build-requirements.txt
	@$(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_editable as needs; \
	  print(*needs({}), sep="\n")' >$(VENV)/build-requirements.txt  # cmake and ninja, where the system has none
	@$(PIP) -r $(VENV)/build-requirements.txt
	@rm -f $(BUILD_LOG); $(PIP) --log $(BUILD_LOG) --no-build-isolation --check-build-dependencies --no-deps -e . & weft=$$!; \
	  { $(PIP) $(PIP_TORCH) '$(TORCH)' && $(PIP) '$(TORCH)' -r $(VENV)/requirements.txt && wait $$weft; } || \
	  { kill $$weft 2>/dev/null; exit 1; }
	@$(BIN)/python -c 'import weft._native' 2>/dev/null || \
	  { echo "the C++ kernels were not built (no compiler?): going on with torch alone. From $(BUILD_LOG):"; \
	    grep -m 5 -A 2 -E 'CMake Error|error:|No CMAKE_CXX_COMPILER' $(BUILD_LOG) || true; }
	@touch $@

serve: install
	@$(BIN)/weft serve $(ARGS)

# Files of csrc that any compiler reads: those of kernels are the other ones.
TIDY := $(addprefix csrc/,pool.cpp layers.cpp fused_block.cpp fused_decoder.cpp kernels.cpp matrix_unit.cpp \
  pack_twelve_bit.cpp software_tiles.cpp)

check: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/clang-format --dry-run --Werror csrc/*pp
	@! command -v clang-tidy >/dev/null || clang-tidy --quiet $(TIDY) -- -std=c++20
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i csrc/*pp

# After every change: the pure half, under 90 seconds on two cores.
quick: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal tests/arch tests/unit/memory tests/unit/schedule \
	  tests/unit/engine tests/unit/text tests/unit/planning tests/unit/test_config_check.py $(ARGS)

test: check suite

# One thread per worker: the suite runs many small models, and two workers fill two cores. Each worker begins with
# a stretch of whole modules, so that two workers rarely start the same server; an idle worker takes half of what
# the other has left.
suite: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(ARGS)

# clang-tidy over the kernels of the best instruction set here too: minutes.
tidy: install
	@clang-tidy --quiet $(TIDY) $(wildcard csrc/table*.cpp) -- -std=c++20 -march=native -DWEFT_TABLE=own -Wno-everything

# Tests that the changes since BASE can affect, by the graph of imports (tests/affected.py). CI on main runs all.
BASE ?= main

affected: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(ARGS) $$($(BIN)/python -m tests.affected $(BASE))

# Statements of each folder that some tests run, with all processes that they start: twice the tests' time.
# make coverage ARGS="tests/unit/memory tests/sim"
coverage: install
	@$(BIN)/python -c 'import coverage' 2>/dev/null || $(PIP) 'coverage>=7.10'
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.coverage_by_folder -n $(TEST_JOBS) --dist worksteal $(ARGS)

# The engine and the server on an emulated GPU: all families, ways to serve and mutants. ``make test`` has a part.
test-emulated-gpu: install
	@OMP_NUM_THREADS=1 EMULATED_GPU=all $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal \
	  tests/emulated_gpu $(ARGS)

# On a machine with a GPU, with whatever Python has torch for CUDA there: no .venv. GPU_PYTHON names it. Two files of
# tests/unit/runner need none: they note launches where Triton's interpreter would compute them, and count them.
GPU_PYTHON ?= python3
GPU_TESTS := --ignore=tests/unit/runner/test_step_counts.py --ignore=tests/unit/runner/test_warmed.py \
  tests/gpu tests/unit/runner tests/oracle/test_engine_against_transformers.py \
  tests/oracle/test_engine_prefix_cache.py tests/oracle/test_engine_graphs.py \
  tests/oracle/test_engine_compaction.py tests/oracle/test_engine_compressed_state.py tests/oracle/test_windows.py \
  tests/oracle/test_engine_cache_dtypes.py tests/oracle/test_engine_negative_controls.py

test-gpu:
	@$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; import triton'
	@WEFT_TEST_DEVICE=cuda TRITON_INTERPRET=0 PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:cacheprovider \
	  $(GPU_TESTS) $(ARGS)

# On a machine with at least two GPUs, better four: ranks over NCCL, with collectives inside of CUDA graphs.
test-ranks-gpu:
	@$(GPU_PYTHON) -c 'import torch; n = torch.cuda.device_count(); assert n > 1, f"torch sees {n} GPUs; ranks need two"'
	@WEFT_TEST_DEVICE=cuda TRITON_INTERPRET=0 PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:cacheprovider \
	  tests/ranks $(ARGS)

# Every shape of every Triton kernel, compiled for each GPU of the gate: minutes, and no GPU. With the installed Triton,
# then with the lowest that weft promises.
compile-gpu: install
	@TRITON_INTERPRET=0 $(BIN)/python -m tests.support.compile_gate --all
	@TRITON_INTERPRET=0 PYTHONPATH=$$($(BIN)/python -m tests.support.lowest_triton) \
	  $(BIN)/python -m tests.support.compile_gate --all

# The lowest versions that pyproject.toml states, and the newest of now, each in an environment of its own: ten minutes,
# and gigabytes.
lowest newest:
	@PYTHON=$(PYTHON) PIP_TORCH="$(PIP_TORCH)" tests/bounds.sh $@

# Known holes of the versions that an image installs, asked of the index (deploy/requirements.lock).
audit: install
	@$(BIN)/python -c 'import uv' 2>/dev/null || $(PIP) uv
	@$(BIN)/uv tool run --quiet pip-audit --disable-pip --require-hashes --strict -r deploy/requirements.lock

# The kernels' tests with addresses and arithmetic checked: a minute or two, half of it compiling. TABLE=portable for
# another instruction set than the best one of this machine.
TABLE ?=

sanitize: install
	@PYTHON=$(BIN)/python tests/sanitize.sh $(TABLE)

# Mutated grammars, templates and bodies: FUZZ_SECONDS for each kind. WEFT_FUZZ_SEED begins at the seed of a failure.
# Then by coverage, where atheris has a wheel.
FUZZ_SECONDS ?= 120

fuzz: install
	@WEFT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -x tests/hostile/test_fuzz.py $(ARGS)
	@$(PIP) --only-binary :all: atheris 2>/dev/null || true
	@$(BIN)/python -m tests.hostile.coverage_fuzz --seconds $(FUZZ_SECONDS)

# Every change of every key of each family's config.json, against transformers: hours; FAMILIES="lfm2 qwen3" for some.
fuzz-config: install
	@$(BIN)/python -m tests.oracle.config_fuzz $(FAMILIES)

# All that is hostile: real servers, mutated input with seeds, and the simulator with several API keys. Minutes.
hostile: install
	@OMP_NUM_THREADS=1 TURNS_MUTATED=2000 HOSTILE_MIB=16 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal \
	  tests/hostile tests/sim/test_keys.py tests/unit/text/test_panics.py tests/unit/text/test_control_tokens.py \
	  tests/unit/store/test_signing.py tests/server/test_control_tokens.py tests/server/test_gone_clients.py \
	  tests/unit/text/test_environment.py tests/unit/text/test_worker_lane.py \
	  tests/unit/text/test_tokenize_memory.py tests/server/test_descriptors.py tests/arch/test_dependencies.py $(ARGS)
	@WEFT_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -x tests/hostile/test_fuzz.py $(ARGS)

# Versions and hashes of all that an image installs: those that the tests ran with (deploy/requirements.lock).
LOCKED := store otlp ray gpu video

lock: install
	@$(BIN)/python -c 'import uv' 2>/dev/null || $(PIP) uv
	@$(BIN)/python -m pip freeze --exclude-editable | grep == | grep -v '^triton==' | sed 's/+.*//' >$(VENV)/versions.txt
	@$(BIN)/uv pip compile --quiet pyproject.toml $(addprefix --extra ,$(LOCKED)) --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate --no-emit-index-url -c $(VENV)/versions.txt \
	  -o deploy/requirements.lock

# The parts of a release as CycloneDX: dist/weft.cdx.json, from the lock file.
sbom: install
	@$(BIN)/python -c 'import uv' 2>/dev/null || $(PIP) uv
	@mkdir -p dist
	@$(BIN)/uv tool run --quiet --from cyclonedx-bom cyclonedx-py requirements --pyproject pyproject.toml --of JSON \
	  -o dist/weft.cdx.json deploy/requirements.lock
	@echo "dist/weft.cdx.json"

# An earlier version (FROM, a tag or commit) and this one, side by side in both directions: minutes (docs/releasing.md).
upgrade: install
	@$(BIN)/python -m tests.upgrade --from $(or $(FROM),$(error FROM=commit names the earlier version)) $(ARGS)

# dist/: wheels, sdist, checksums, SBOM, notes; checked in an empty environment without a compiler (docs/releasing.md).
# RELEASE="--python python3.11 --python python3.13 --aarch64 build/aarch64/root" for all wheels.
RELEASE ?=

release: install
	@$(BIN)/python -m deploy.release --torch '$(TORCH)' --pip-torch '$(PIP_TORCH)' $(RELEASE)

bench: install
	@$(BIN)/python -m benchmarks.serve $(ARGS)

# The figures of the README, measured on this machine: most of an hour on two cores that do nothing else.
figures: install
	@$(BIN)/python -m benchmarks.figures $(ARGS)

# Do the tests notice a change of the code? A seeded sample of mutants (docs/testing.md); hours on two cores, and not in CI.
mutants: install
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || $(PIP) 'cosmic-ray>=8.7'
	@OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutants $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
