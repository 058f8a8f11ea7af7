"""What this machine has, read and never changed: the facts behind ``weft doctor`` and every benchmark.

    machine_facts()  ->  plain dict, JSON-ready, the same keys on every machine

A fact that cannot be read is None, never an error: a doctor that fails on an odd machine is no help.
Torch is asked in a child process, so that asking neither slows down nor breaks the one that asks: a
torch that cannot be imported is itself a finding. Limits of a container come from ``weft.host``, because
the kernel's own counts ignore them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

from weft.host import container_memory_limit_bytes, usable_cores

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8",
             "asimd", "bf16", "i8mm", "sve")
"""CPU features that decide which kernels are fast (x86 names, then Arm's)."""

THREAD_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME",
                    "MKL_NUM_THREADS")
HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")

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
    """Every fact; ``ask_hub`` False leaves the network alone. Bytes are plain integers."""
    return {
        "system": {"os": platform.platform(), "python": platform.python_version(),
                   "executable": sys.executable},
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "threads": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "torch": torch_facts(),
        "hub": hub_facts(ask=ask_hub),
    }


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    model, flags = _read_cpuinfo(cpuinfo)
    return {
        "model": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "features": {flag: flag in flags for flag in CPU_FLAGS} if flags else None,
    }


def memory_facts() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    limit = container_memory_limit_bytes()
    bounded = limit if limit is not None and limit < memory.total else None
    return {"total_bytes": memory.total, "available_bytes": memory.available,
            "container_limit_bytes": bounded, "swap_bytes": psutil.swap_memory().total}


def torch_facts() -> dict[str, Any]:
    """What torch says of itself, from a child process; ``error`` instead when it cannot be imported."""
    if util.find_spec("torch") is None:
        return {"error": "torch is not installed"}
    try:
        answer = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True,
                                timeout=_TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took more than {_TORCH_TIMEOUT_S} s"}
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"torch cannot be imported: {last_line}"}
    facts: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return facts


def hub_facts(*, ask: bool) -> dict[str, Any]:
    """Where hub models are cached, how much room there is, and whether the hub answers (None: not asked)."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    offline = bool(constants.HF_HUB_OFFLINE)
    return {
        "cache": str(cache), "cached_models": len(list(cache.glob("models--*"))) if cache.is_dir() else 0,
        "writable": os.access(existing, os.W_OK),
        "disk_free_bytes": disk.free, "disk_total_bytes": disk.total,
        "endpoint": constants.ENDPOINT, "offline": offline,
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


def _read_cpuinfo(path: Path) -> tuple[str | None, frozenset[str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None, frozenset()
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    flags = facts.get("flags") or facts.get("features") or ""
    return facts.get("model name"), frozenset(flags.split())
