"""``weft doctor``: facts of the machine, and the effect of each on speed or on a first start.

A judgement is a pure function of the facts, so every sentence can be tested with facts of other machines. torch is
imported in a child process: a broken torch must not break the command. Exit code 1 if something must be repaired before
weft can run, else 0.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from typing import Any, Literal

import click

from weft.cli.flags import FlagCommand
from weft.cli.main import screen_console
from weft.host import CPUINFO, container_memory_limit_bytes, cpu_name_and_flags, keeps_codes, usable_cores
from weft.numa import NODES, nodes
from weft.units import format_bytes

Verdict = Literal["good", "note", "bad"]
_MARKS: dict[Verdict, str] = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}

RAM_NEEDED_BYTES = 1 << 30
DISK_NEEDED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    about: str
    fact: str
    verdict: Verdict
    advice: str = ""


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """Judge ``machine_facts()``, with a row for each thing that a user can check or change."""
    return [
        _python(facts),
        *_cpu(facts["cpu"]),
        _memory(facts["memory"]),
        _omp(facts["threads"]),
        *_torch(facts["torch"], facts["cpu"]["features"] or {}),
        _models(facts["models"]),
        *_hub(facts["hub"]),
    ]


def _python(facts: Mapping[str, Any]) -> Finding:
    from weft.version import weft_version

    system = facts["system"]
    return Finding("weft", f"{weft_version()} on Python {system['python']}, {system['os']}", "good")


def _cpu(cpu: Mapping[str, Any]) -> list[Finding]:
    cores, usable = cpu["cores"], cpu["usable_cores"]
    rows = [Finding("CPU", cpu["model"], "good")]
    if cores is not None and usable < cores:
        rows.append(
            Finding(
                "cores",
                f"{usable} usable of {cores}",
                "note",
                "the rest are outside this process's affinity or container quota",
            )
        )
    else:
        rows.append(Finding("cores", f"{usable}", "good"))
    if len(cpu["numa_nodes"]) > 1:
        rows.append(_numa(cpu["numa_nodes"]))
    features = cpu["features"]
    if features is None:
        return [*rows, Finding("CPU features", "unknown on this system", "note")]
    present = [name for name, available in features.items() if available]
    fast = any(features[name] for name in ("avx512_bf16", "amx_bf16", "bf16"))
    wide = any(features[name] for name in ("avx2", "avx512f", "asimd"))
    if fast:
        rows.append(Finding("CPU features", ", ".join(present), "good", "bfloat16 arithmetic in hardware"))
    elif wide:
        rows.append(
            Finding(
                "CPU features", ", ".join(present), "note", "no bfloat16 instructions: --dtype float32 may be as fast"
            )
        )
    else:
        rows.append(
            Finding(
                "CPU features",
                ", ".join(present) or "none of the known ones",
                "note",
                "no wide vector instructions: expect low speed",
            )
        )
    return rows


def _numa(cores_of: Mapping[str, list[int]]) -> Finding:
    each = ", ".join(f"{len(cores)} cores on node {number}" for number, cores in cores_of.items())
    count = len(cores_of)
    return Finding(
        "NUMA",
        each,
        "note",
        f"--replicas {count} keeps each step on one node, with the weights {count} times in memory; one engine has "
        f"them on all nodes in turn, and reads {count - 1} of {count} bytes from another node",
    )


def _memory(memory: Mapping[str, Any]) -> Finding:
    free, total = memory["available_bytes"], memory["total_bytes"]
    limit = memory["container_limit_bytes"]
    fact = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is not None:
        fact += f", container limit {format_bytes(limit)}"
    if free < RAM_NEEDED_BYTES:
        return Finding("RAM", fact, "note", "enough for the embedded model only; name a size with --memory")
    return Finding("RAM", fact, "good")


def _omp(variables: Mapping[str, str | None]) -> Finding:
    policy = variables["OMP_WAIT_POLICY"]
    chosen = ", ".join(f"{name}={value}" for name, value in variables.items() if value is not None)
    if policy is None:
        return Finding("OMP policy", chosen or "unset", "good", "weft sets OMP_WAIT_POLICY=passive for itself")
    if policy.lower() != "passive":
        return Finding(
            "OMP policy",
            chosen,
            "note",
            "threads that spin take the cores from the HTTP process: unset OMP_WAIT_POLICY",
        )
    return Finding("OMP policy", chosen, "good")


def _torch(torch: Mapping[str, Any], features: Mapping[str, bool]) -> list[Finding]:
    if "error" in torch:
        return [Finding("torch", torch["error"], "bad", "run `make install`, or `pip install torch`")]
    fact = f"{torch['version']} ({torch['capability']}, {torch['threads']} threads) in {torch['path']}"
    rows = [Finding("torch", fact, "good")]
    if not torch["mkldnn"]:
        rows.append(Finding("oneDNN", "not in this build of torch", "note", "bfloat16 products will be slow"))
    if torch["kernels"]:
        rows.append(Finding("kernels", f"C++ (weft._native), {torch['matrix_unit']}", "good"))
    elif torch["kernels_stale"]:
        rows.append(
            Finding(
                "kernels", "only torch: the C++ kernels were built from other sources", "note", torch["kernels_missing"]
            )
        )
    else:
        rows.append(
            Finding(
                "kernels",
                "only torch: the C++ kernels were not built",
                "note",
                "install a C++ compiler, then `pip install --force-reinstall --no-deps --no-binary weft weft`, or in a "
                "checkout `pip install --force-reinstall --no-deps -e .`",
            )
        )
    gpus = torch["gpus"]
    if gpus:
        rows += _gpus(gpus, torch["triton"], flashinfer=torch["flashinfer"])
    else:
        rows.append(_no_gpu(torch))
    return [*rows, _quantised(torch, features)]


def _no_gpu(torch: Mapping[str, Any]) -> Finding:
    if torch["cuda_version"] is None:
        return Finding("GPU", "none that torch can use", "good", "none is needed")
    release = torch["version"].partition("+")[0]
    return Finding(
        "GPU",
        f"none that torch can use, and torch is its build for CUDA {torch['cuda_version']}",
        "note",
        f"without a GPU the CPU build does the same in gigabytes less: `pip install --force-reinstall torch=={release} "
        "--index-url URL`, the URL being that of PyTorch's CPU index (pytorch.org)",
    )


def _quantised(torch: Mapping[str, Any], features: Mapping[str, bool]) -> Finding:
    """Return the finding about weights in fewer bits: which are computed as they are stored, and which are widened."""
    if torch["gpus"] and torch["triton"] is not None:
        return Finding(
            "quantised weights",
            "int8, int4, fp8 and MXFP4 as they are",
            "good",
            "NVFP4, nf4 and ggml's K forms take 16 bits here; see docs/quantization.md",
        )
    if torch["gpus"] or not torch["kernels"]:
        return Finding(
            "quantised weights",
            "int8, int4, MXFP4 and NVFP4 as they are, by torch",
            "note",
            "fp8 and nf4 take 16 bits here; products in fewer bits are slow without kernels",
        )
    if keeps_codes(frozenset(name for name, available in features.items() if available)):
        return Finding(
            "quantised weights",
            "int8, int4, fp8, MXFP8, MXFP4, NVFP4, nf4, fp4, ggml's K forms as they are",
            "good",
            "ggml's IQ1 to IQ3 and torchao's int4 with float zeros take 16 bits",
        )
    return Finding(
        "quantised weights",
        "int8, int4, MXFP4, NVFP4 and ggml's K forms as they are",
        "good",
        "fp8 and nf4 take 16 bits here: --quantize int8 keeps them small",
    )


def _gpus(gpus: list[Mapping[str, Any]], triton: str | None, *, flashinfer: bool) -> list[Finding]:
    named = ", ".join(
        f"{gpu['name']} ({format_bytes(gpu['free_bytes'])} free of {format_bytes(gpu['total_bytes'])})" for gpu in gpus
    )
    old = [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < (8, 0)]
    rows = [
        Finding("GPU", named, "note", f"{', '.join(old)}: older than the kernels are made for (8.0)")
        if old
        else Finding("GPU", named, "good", "--device auto takes it; see docs/gpu.md")
    ]
    if triton is None:
        rows.append(Finding("GPU kernels", "only torch: Triton is not installed", "note", "pip install 'weft[gpu]'"))
    else:
        rows.append(Finding("GPU kernels", f"Triton {triton}", "good"))
    if flashinfer and any(tuple(gpu["capability"]) == (9, 0) for gpu in gpus):
        rows.append(
            Finding(
                "attention",
                "FlashInfer is installed",
                "good",
                "debug.attention_backend flashinfer takes it for prompts; see docs/gpu.md",
            )
        )
    return rows


def _models(models: Mapping[str, Any]) -> Finding:
    """Return the finding about the directory of pulled models."""
    fact = (
        f"{models['directory']} ({models['whole']} models, {format_bytes(models['bytes'])}; "
        f"{format_bytes(models['disk_free_bytes'])} free)"
    )
    if models["damaged"]:
        return Finding("models", fact, "note", f"damaged: {'; '.join(models['damaged'])}; `weft pull NAME` mends it")
    if models["partial"]:
        return Finding(
            "models",
            fact,
            "note",
            f"half pulled: {', '.join(models['partial'])}; `weft pull NAME` goes on, `weft rm NAME` removes it",
        )
    if not models["writable"]:
        return Finding("models", fact, "note", "not writable: set WEFT_MODEL_DIR to a folder that is")
    return Finding("models", fact, "good")


def _hub(hub: Mapping[str, Any]) -> list[Finding]:
    cache = f"{hub['cache']} ({hub['cached_models']} models, {format_bytes(hub['disk_free_bytes'])} free)"
    if not hub["writable"]:
        row = Finding("hub cache", cache, "note", "not writable: set HF_HOME to a folder that is")
    elif hub["disk_free_bytes"] < DISK_NEEDED_BYTES:
        row = Finding("hub cache", cache, "note", "little room: set HF_HOME to another disk")
    else:
        row = Finding("hub cache", cache, "good")
    if hub["offline"]:
        access = Finding("hub", "offline by HF_HUB_OFFLINE", "note", "cached models and directories still work")
    elif hub["reachable"] is None:
        access = Finding("hub", f"{hub['endpoint']}, not asked", "good")
    elif hub["reachable"]:
        access = Finding("hub", f"{hub['endpoint']} answers", "good")
    else:
        access = Finding(
            "hub",
            f"{hub['endpoint']} does not answer",
            "note",
            "the embedded model, directories and cached models work without it",
        )
    return [row, access]


@click.command("doctor", cls=FlagCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.option("--offline", is_flag=True, help="Do not ask whether the model hub answers.")
def command(as_json: bool, offline: bool) -> int:
    """Show this machine's hardware and builds, and ways to make it faster."""

    facts = machine_facts(ask_hub=not offline)
    rows = findings(facts)
    if as_json:
        facts["findings"] = [asdict(row) for row in rows]
        click.echo(json.dumps(facts, indent=2))
    else:
        _show(rows)
    return 1 if any(row.verdict == "bad" for row in rows) else 0


def _show(rows: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        advice = f"\n[dim]{escape(row.advice)}[/]" if row.advice else ""
        table.add_row(_MARKS[row.verdict], row.about, escape(row.fact) + advice)
    screen_console().print(table)


CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512vbmi",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""CPU features that decide which kernels are fast (x86 names, then Arm's)."""

THREAD_VARIABLES = (
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
)
HUB_VARIABLES = ("WEFT_MODEL_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")

_TORCH_TIMEOUT_S = 120
_HUB_TIMEOUT_S = 3.0

_ASK_TORCH = """
import importlib.util, json, os
from importlib.metadata import PackageNotFoundError, version
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from weft.tensor import native
cuda = torch.cuda.is_available()
triton = None
if importlib.util.find_spec("triton"):
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "of an unknown version"
print(json.dumps({
    "version": torch.__version__, "path": os.path.dirname(torch.__file__), "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(), "mkldnn": torch.backends.mkldnn.is_available(),
    "cuda_version": torch.version.cuda,
    "kernels": native.MISSING is None, "matrix_unit": native.amx_report() if native.MISSING is None else None,
    "kernels_missing": native.MISSING, "kernels_stale": native.STALE,
    "triton": triton, "flashinfer": bool(importlib.util.find_spec("flashinfer")),
    "gpus": [{"name": torch.cuda.get_device_name(i), "capability": torch.cuda.get_device_capability(i),
              "free_bytes": torch.cuda.mem_get_info(i)[0], "total_bytes": torch.cuda.mem_get_info(i)[1]}
             for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


def machine_facts(*, ask_hub: bool = True) -> dict[str, Any]:
    """Return every fact. ``ask_hub``: False to avoid the network. Bytes are plain integers."""
    return {
        "system": {"os": platform.platform(), "python": platform.python_version(), "executable": sys.executable},
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "threads": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "torch": torch_facts(),
        "models": model_facts(),
        "hub": hub_facts(ask=ask_hub),
    }


def cpu_facts(cpuinfo: Path = CPUINFO, numa: Path = NODES) -> dict[str, Any]:
    model, flags = cpu_name_and_flags(cpuinfo)
    return {
        "model": model,
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "numa_nodes": {str(node.number): list(node.cores) for node in nodes(root=numa)},
        "features": {flag: flag in flags for flag in CPU_FLAGS} if flags else None,
    }


def memory_facts() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    limit = container_memory_limit_bytes()
    bounded = limit if limit is not None and limit < memory.total else None
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "container_limit_bytes": bounded,
        "swap_bytes": psutil.swap_memory().total,
    }


def torch_facts() -> dict[str, Any]:
    """Return facts of torch, read in a child process; only ``error`` if torch cannot be imported."""
    if util.find_spec("torch") is None:
        return {"error": "torch is not installed"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {_TORCH_TIMEOUT_S} s"}
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"torch cannot be imported: {last_line}"}
    facts: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return facts


def model_facts() -> dict[str, Any]:
    """Return the contents of the directory of models, checked by size; no checksum is computed."""
    from weft.models.local import listed, model_directory

    directory, models = model_directory(), listed()
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    return {
        "directory": str(directory),
        "whole": sum(model.state == "whole" for model in models),
        "bytes": sum(model.held_bytes for model in models),
        "partial": [model.name for model in models if model.state == "partial"],
        "damaged": [f"{model.name} ({model.problem})" for model in models if model.state == "damaged"],
        "writable": os.access(existing, os.W_OK),
        "disk_free_bytes": shutil.disk_usage(existing).free,
    }


def hub_facts(*, ask: bool) -> dict[str, Any]:
    """Return where hub models are cached, how much room there is, and whether the hub answers (None: not asked)."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    offline = bool(constants.HF_HUB_OFFLINE)
    return {
        "cache": str(cache),
        "cached_models": len(list(cache.glob("models--*"))) if cache.is_dir() else 0,
        "writable": os.access(existing, os.W_OK),
        "disk_free_bytes": disk.free,
        "disk_total_bytes": disk.total,
        "endpoint": constants.ENDPOINT,
        "offline": offline,
        "reachable": _answers(constants.ENDPOINT) if ask and not offline else None,
        "variables": {name: os.environ[name] for name in HUB_VARIABLES if name in os.environ},
    }


def _answers(url: str) -> bool:
    import httpx

    try:
        httpx.head(url, timeout=_HUB_TIMEOUT_S, follow_redirects=False)
    except httpx.HTTPError:
        return False
    return True
