"""Blocks and lines of the pages that no test runs as they stand, each with its reason.

A key is a page and the beginning of a line; a python block goes by its first line. Each key must still begin
some line of that page. A line that is neither run nor here is an error of ``tests/docs/reader.py``.
"""

from __future__ import annotations

SHELL = "sets up this machine or starts the test suite itself"
HUB = "downloads from the hub or an index"
GPU = "needs a GPU"
LONG = "minutes"
TRACE = "needs a trace that must be downloaded first; the figures beside it are committed results"
LOAD = "a quarter of a minute of load; tests/cli/test_bench.py runs the same command, smaller"
GRID = "a quarter of an hour of load; tests/cli/test_bench_grid.py runs it, smaller"
FILES = "needs a file of the reader's; tests/cli/test_bench.py runs it with one"
TERMINAL = "waits for a person at a terminal; tests/cli/test_chat.py plays one"
BUCKET = "needs a bucket; tests/server/test_store_bucket.py has one"
REPLICAS = "needs a second engine; tests/fleet/test_replicas.py runs it"
MACHINES = "needs engines of their own on other machines; tests/fleet and tests/ranks start them"
RAY = "needs Ray; tests/ray has it"
ADAPTERS = "needs adapters; tests/server/test_adapters.py makes some"
GGUF = "needs a file of the reader's; tests/api/test_gguf.py makes one"
KEY = "needs a file with a key; tests/server/test_sessions.py has one"
FRAGMENT = "a part of a function that the page explains"
FUZZ = "minutes; tests/server/test_openapi.py sends a few hundred of these requests"
BACKUP = "needs the directories of a server that runs; docs/store.md runs the check of a store"
SAMPLE = "a minute; tests/docs/test_simulated_figures.py compares the whole table with a committed result"

PROCESS = "needs a process of the reader's and a tool that is not weft's"

AGENTS = "needs the agent; tests/clients/run.sh agents runs each"

NOT_RUN: dict[tuple[str, str], str] = {
    ("docs/agents.md", "aider"): AGENTS,
    ("docs/agents.md", "claude"): AGENTS,
    ("docs/agents.md", "cline"): AGENTS,
    ("docs/agents.md", "cn"): AGENTS,
    ("docs/agents.md", "codex"): AGENTS,
    ("docs/agents.md", "export"): AGENTS,
    ("docs/agents.md", "opencode"): AGENTS,
    ("docs/agents.md", "openhands"): AGENTS,
    ("docs/agents.md", "pi"): AGENTS,
    ("docs/agents.md", "qwen"): AGENTS,
    ("docs/debugging.md", "py-spy"): PROCESS,
    ("docs/debugging.md", "ulimit"): PROCESS,
    ("docs/debugging.md", "weft serve"): PROCESS,
    ("docs/debugging.md", "gdb"): PROCESS,
    ("docs/kv-events.md", "weft serve"): "a model of the hub, and ports; tests/server/test_kv_events.py starts one",
    ("docs/releasing.md", "apt-get"): SHELL,
    ("docs/releasing.md", "deploy/aarch64_root.sh"): SHELL,
    ("docs/releasing.md", "make release"): SHELL,
    ("docs/releasing.md", "pip install"): HUB,
    ("docs/releasing.md", "pipx install"): HUB,
    ("docs/releasing.md", "uvx"): HUB,
    ("README.md", "make "): SHELL,
    ("README.md", "openssl rand"): SHELL,
    ("README.md", "weft serve LiquidAI/LFM2-350M --host"): "needs the file of keys of the line above it",
    ("README.md", "weft serve Qwen/Qwen3.5-4B"): GPU,
    ("README.md", "pip install"): HUB,
    ("README.md", "weft chat"): TERMINAL,
    ("README.md", "weft run"): TERMINAL,
    ("README.md", "weft simulate sample"): "20 s; the sample runs in tests/docs/test_simulated_figures.py",
    ("README.md", "weft eval recall"): "half a minute; docs/cli.md has it with fewer questions",
    ("docs/adding-a-model.md", "def read_smollm3"): FRAGMENT,
    ("docs/adding-a-model.md", "_ARCEE = Decoder"): FRAGMENT,
    ("docs/adding-a-model.md", "@dataclass(frozen=True, slots=True)"): FRAGMENT,
    ("docs/adding-a-model.md", "python -m pytest"): SHELL,
    ("docs/adding-a-model.md", "python -m tests.oracle.table"): LONG,
    ("docs/adding-a-model.md", "python -m tests.oracle.compositions"): LONG,
    ("docs/pictures.md", "weft serve Qwen/Qwen3.5-4B"): HUB,
    ("docs/pictures.md", "import base64"): "needs a picture; tests/server/test_pictures.py draws some",
    ("docs/pictures.md", "frames ="): "needs frames; tests/server/test_pictures.py draws some",
    ("docs/several-models.md", "weft serve chat="): "needs models, as tests/server/test_several_models.py",
    ("docs/several-models.md", "weft serve path/to/model --lora"): ADAPTERS,
    ("docs/several-models.md", "curl"): ADAPTERS,
    ("docs/cli.md", "python -m benchmarks.batch"): LONG,
    ("docs/benchmarks.md", "make figures"): LONG,
    ("docs/bench.md", "weft bench serve"): LOAD,
    ("docs/bench.md", "weft bench latency"): LOAD,
    ("docs/bench.md", "weft bench throughput"): LOAD,
    ("docs/bench.md", "weft bench kernels"): LOAD,
    ("docs/benchmarks.md", "python -m benchmarks."): LONG,
    ("docs/bench.md", "weft bench grid"): GRID,
    ("docs/testing.md", "tests/clients/run.sh"): HUB,
    ("docs/fleet.md", "pip install"): HUB,
    ("docs/fleet.md", "weft drain"): REPLICAS,
    ("docs/fleet.md", "weft serve --listen-engines"): MACHINES,
    ("docs/fleet.md", "weft join"): MACHINES,
    ("docs/fleet.md", "WEFT_RAY_CPUS=4 weft serve owner/model --ray"): RAY,
    ("docs/fleet.md", "python -m benchmarks.soak_fleet"): LONG,
    ("docs/refit.md", "weft serve /models/step-0"): "needs two checkpoints, as tests/server/test_update_weights.py",
    ("docs/refit.md", "curl"): "needs two checkpoints, as tests/server/test_update_weights.py",
    ("docs/operating.md", "curl --cacert"): "needs a certificate; tests/server/test_listening.py makes some",
    ("docs/operating.md", "curl --unix-socket"): "needs a socket; tests/server/test_listening.py has one",
    ("docs/operating.md", "weft chat"): TERMINAL,
    ("docs/operating.md", "helm install"): "needs a cluster",
    ("docs/operating.md", "sqlite3 "): BACKUP,
    ("docs/operating.md", "cp -a "): BACKUP,
    ("docs/operating.md", "weft store verify /backup"): BACKUP,
    ("docs/operating.md", "weft plan LiquidAI"): HUB,
    ("docs/gpu.md", "pip install"): HUB,
    ("docs/gpu.md", "weft serve path/to/checkpoint --device cuda:1"): GPU,
    ("docs/gpu.md", "make "): SHELL,
    ("docs/gpu.md", "python -m tests.support.compile_gate"): LONG,
    ("docs/testing.md", "make "): SHELL,
    ("docs/testing.md", "python -m tests.emulated_gpu"): LONG,
    ("docs/gpu.md", "PYTHONPATH=src python -m benchmarks.gpu_first_run"): GPU,
    ("docs/gpu.md", "TRITON_INTERPRET=1 WEFT_GPU_KERNELS=triton"): LONG,
    ("docs/quantization.md", "weft serve model-"): GGUF,
    ("docs/quantization.md", "weft serve owner/name:Q4_K_M"): HUB,
    ("docs/quantization.md", "weft serve directory/"): GGUF,
    ("docs/quantization.md", "weft plan model-"): GGUF,
    ("docs/several-models.md", "weft pull"): f"{HUB}; tests/unit/models/test_pulling.py has one on loopback",
    ("docs/several-models.md", "weft serve LiquidAI"): HUB,
    ("docs/several-models.md", "weft rm"): HUB,
    ("docs/quantization.md", 'with weft.Engine("model-'): GGUF,
    ("docs/tensor-plane.md", "weft bench kernels"): LOAD,
    ("docs/tensor-plane.md", "tests/aarch64.sh"): LONG,
    ("docs/tensor-plane.md", "python -m benchmarks.step_python"): LONG,
    ("docs/tensor-plane.md", "make sanitize"): SHELL,
    ("docs/memory.md", "match = memory.match(prompt, salt=salt)"): FRAGMENT,
    ("docs/models.md", "weft serve Qwen/Qwen3.5-4B --weights-cache"): HUB,
    ("docs/testing.md", "schemathesis run"): FUZZ,
    ("docs/plan.md", "weft plan owner/name"): HUB,
    ("docs/fleet.md", "weft serve MODEL --tp 2 --listen-engines"): MACHINES,
    ("docs/fleet.md", "WEFT_RAY_CPUS=4 weft serve MODEL --tp 2 --ray"): RAY,
    ("docs/quantization.md", "python -m benchmarks."): LONG,
    ("docs/quantization.md", "weft quantize"): "tests/unit/models/test_quantized_copy.py runs it",
    ("docs/scheduling.md", "python -c"): "runs in tests/sim, with other seeds",
    ("docs/operating.md", "pip install"): HUB,
    ("docs/plan.md", "weft simulate sample"): SAMPLE,
    ("docs/plan.md", "weft simulate conversation_trace.jsonl"): TRACE,
    ("docs/plan.md", "python benchmarks/store_losses.py"): TRACE,
    ("docs/speculation.md", "python -m benchmarks."): LONG,
    ("docs/store.md", "weft store info s3://"): BUCKET,
    ("docs/store.md", "weft store verify s3://"): BUCKET,
    ("docs/store.md", "weft store prune s3://"): BUCKET,
    ("docs/store.md", "weft store rm s3://"): BUCKET,
    ("docs/sessions.md", "echo 'Where is the sea?' | weft chat"): TERMINAL,
    ("docs/sessions.md", "openssl rand"): SHELL,
    ("docs/sessions.md", "WEFT_SESSION_KEY=/etc/weft/session.key weft serve"): KEY,
    ("docs/store.md", "openssl rand"): SHELL,
    ("docs/store.md", "WEFT_SESSION_KEY=/etc/weft/session.key weft serve"): KEY,
    ("docs/store.md", "WEFT_STORE_KEY=/etc/weft/store.key weft serve"): BUCKET,
    ("docs/store.md", "pip install"): HUB,
    ("docs/store.md", "WEFT_STORE_CACHE=/nvme/weft weft serve --store s3://"): BUCKET,
}


def reason(page: str, text: str) -> str | None:
    """Why ``text``, a line or the first line of a program, is not run; None if it is."""
    return next((why for (where, begin), why in NOT_RUN.items() if page == where and text.startswith(begin)), None)
