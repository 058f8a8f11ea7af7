#!/usr/bin/env bash
# The lowest versions that pyproject.toml states, in an environment of their own, with a part of the suite.
#
#   tests/lowest.sh [DIR]     the environment: build/lowest by default
#
#   1  every dependency and test tool at its lower bound           all modules, the CLI, server, batches, C++ kernels
#   2  transformers at its lower bound, with what it asks for      two families against it
#   3  Triton at the lower bound of the extra "gpu"                the largest shape of each kernel compiles
#
# transformers asks for newer tokenizers and huggingface_hub than weft, so it comes second; torch and all others stay.
# Needs pip, which brings uv (it resolves to lower bounds), and some 9 GB of disk: on Linux the registry's torch is the
# build for CUDA. PIP_TORCH="--index-url ..." takes another one. Ten minutes, half of them downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
env=${1:-build/lowest}
mkdir -p "$env"
env=$(cd "$env" && pwd)
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/src"

"$PYTHON" -m venv "$env/tools"
"$env/tools/bin/pip" install --quiet uv
uv() { "$env/tools/bin/uv" "$@"; }
uv venv --quiet --clear --python "$PYTHON" "$env/venv"
python="$env/venv/bin/python"
lowest() { uv pip install --quiet --python "$python" --resolution lowest-direct "$@"; }
checked() { "$python" -m pytest -p no:cacheprovider "$@"; }
bound() { "$PYTHON" - "$1" <<'EOF'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
stated = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
print(next(found[1] for one in stated if (found := re.match(sys.argv[1] + r">=([\d.]+)", one))))
EOF
}

echo "lowest: installing torch $(bound torch) and the rest of pyproject.toml"
# shellcheck disable=SC2086
[ -z "${PIP_TORCH:-}" ] || uv pip install --quiet --python "$python" $PIP_TORCH "torch==$(bound torch)"
"$PYTHON" - >"$env/tools.txt" <<'EOF'
import tomllib
tools = ("anthropic", "hypothesis", "jsonschema", "openai", "pytest", "pytest-asyncio", "pyyaml", "safetensors")
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(one for one in extras["test"] if one.split(">=")[0] in tools), sep="\n")
EOF
lowest -r pyproject.toml --extra store --extra otlp -r "$env/tools.txt"
uv pip install --quiet --python "$python" --no-deps --config-settings wheel.cmake=false --config-settings wheel.py-api=py3 .
uv pip list --quiet --python "$python"

echo "lowest: every module, and the command line"
"$python" - <<'EOF'
import importlib, pkgutil, weft
for module in pkgutil.walk_packages(weft.__path__, "weft."):
    if not module.name.endswith(("__main__", "._native")) and ".triton" not in module.name \
            and "kernels" not in module.name:   # Triton's kernels: below
        importlib.import_module(module.name)
EOF
"$python" -m weft serve --help >/dev/null
"$python" -m weft generate "The code" --max-tokens 4

echo "lowest: server, batches, memory, kernels"
checked tests/server/test_completions.py tests/server/test_chat.py tests/server/test_tools.py \
  tests/server/test_messages.py tests/server/test_responses.py tests/server/test_errors.py \
  tests/server/test_small_endpoints.py tests/unit/runner/test_batch.py tests/unit/runner/test_staging.py \
  tests/unit/memory tests/ops/test_native.py tests/ops/test_native_linear.py tests/ops/test_attention.py \
  tests/ops/test_recurrent_ops.py

echo "lowest: two families against transformers $(bound transformers)"
uv pip install --quiet --python "$python" "transformers==$(bound transformers)"
checked tests/oracle/test_engine_against_transformers.py -k "qwen3_5 or lfm2"

echo "lowest: Triton $(bound triton) compiles the kernels"
uv pip install --quiet --python "$python" --no-deps "triton==$(bound triton)"
"$python" -m tests.support.compile_gate
