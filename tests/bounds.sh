#!/usr/bin/env bash
# The lowest versions that pyproject.toml states, or the newest that there are, in an environment of their own, with a
# part of the suite.
#
#   tests/bounds.sh lowest|newest [DIR]     the environment: build/lowest or build/newest by default
#
#   1  every dependency and test tool at its bound                 all modules, the CLI, server, batches, torch's kernels
#   2  transformers at its bound, with what it asks for            two families against it, dialects on models of theirs
#   3  Triton at the bound of the extra "gpu"                      the largest shape of each kernel compiles
#
# At lower bounds transformers asks for newer tokenizers and huggingface_hub than weft, so it comes second; torch and
# all others stay.
# Needs pip, which brings uv (it resolves to lower bounds), and some 9 GB of disk: on Linux the registry's torch is the
# build for CUDA. PIP_TORCH="--index-url ..." takes another one. Ten minutes, half of them downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
which=${1:-}
case "$which" in
  lowest) resolution=lowest-direct pin="==" ;;
  newest) resolution=highest pin=">=" ;;
  *) echo "tests/bounds.sh lowest|newest [DIR]" >&2; exit 2 ;;
esac
env=${2:-build/$which}
mkdir -p "$env"
env=$(cd "$env" && pwd)
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/src"

"$PYTHON" -m venv "$env/tools"
"$env/tools/bin/pip" install --quiet uv
uv() { "$env/tools/bin/uv" "$@"; }
uv venv --quiet --clear --python "$PYTHON" "$env/venv"
python="$env/venv/bin/python"
bounded() { uv pip install --quiet --python "$python" --resolution "$resolution" "$@"; }
checked() { "$python" -m pytest -p no:cacheprovider "$@"; }
stated() { "$PYTHON" - "$1" <<'EOF'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
stated = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
print(next(found[1] for one in stated if (found := re.match(sys.argv[1] + r">=([\d.]+)", one))))
EOF
}
bound() { echo "$1$pin$(stated "$1")"; }

echo "$which: installing $(bound torch) and the rest of pyproject.toml"
# shellcheck disable=SC2086
[ -z "${PIP_TORCH:-}" ] || uv pip install --quiet --python "$python" $PIP_TORCH "$(bound torch)"
"$PYTHON" - >"$env/tools.txt" <<'EOF'
import tomllib
tools = ("anthropic", "hypothesis", "jsonschema", "openai", "pytest", "pytest-asyncio", "pyyaml", "safetensors")
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(one for one in extras["test"] if one.split(">=")[0] in tools), sep="\n")
EOF
bounded -r pyproject.toml --extra store --extra otlp -r "$env/tools.txt"
uv pip install --quiet --python "$python" --no-deps --config-settings wheel.cmake=false --config-settings wheel.py-api=py3 .
uv pip list --quiet --python "$python"

echo "$which: every module, and the command line"
"$python" - <<'EOF'
import importlib, pkgutil, weft
for module in pkgutil.walk_packages(weft.__path__, "weft."):
    if not module.name.endswith(("__main__", "._native")) and ".triton" not in module.name \
            and "kernels" not in module.name:   # Triton's kernels: below
        importlib.import_module(module.name)
EOF
"$python" -m weft serve --help >/dev/null
"$python" -m weft generate "The code" --max-tokens 4

echo "$which: server, batches, memory, operators of torch"
checked tests/server/test_completions.py tests/server/test_chat.py tests/server/test_tools.py \
  tests/server/test_errors.py tests/server/test_small_endpoints.py tests/unit/runner/test_batch.py \
  tests/unit/runner/test_staging.py tests/unit/memory tests/ops/test_attention.py tests/ops/test_recurrent_ops.py

echo "$which: two families against $(bound transformers)"
uv pip install --quiet --python "$python" "$(bound transformers)"
checked tests/oracle/test_engine_against_transformers.py -k "qwen3_5 or lfm2"
checked tests/server/test_messages.py tests/server/test_responses.py

echo "$which: $(bound triton) compiles the kernels"
uv pip install --quiet --python "$python" --no-deps "$(bound triton)"
"$python" -m tests.support.compile_gate
