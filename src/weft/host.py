"""Cores and RAM that this process may use, within the limits of its container; return of memory to the system; and the
user's directory.

``weft.assemble`` (threads, the default of ``--memory``) and ``weft doctor`` both use this module, so their numbers
agree. Limits of cgroup v2 and v1 are read from their files; without limits, the system's own numbers hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from weft.numa import interleave, nodes

Result = TypeVar("Result")
CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_YOUNG_OBJECTS = 20_000
_ram_share = 1
_memory_turn: int | None = None
_memory_bytes: int | None = None
BACKGROUND_NICE = 10
_log = logging.getLogger("weft")


def use_part_of_host(
    cores: Sequence[int], ram_share: int, memory_turn: int | None = None, memory_bytes: int | None = None
) -> None:
    """Make this process one of ``ram_share`` processes that divide the free RAM, and bind it to ``cores`` (empty: all),
    with its memory on their NUMA nodes in turn.
    ``memory_turn``: descriptor of a file that these processes share; the process that measures free RAM locks the file
    until ``end_memory_turn``. ``memory_bytes``: for weights and arena together. Call this before threads are
    started."""
    global _ram_share, _memory_turn, _memory_bytes
    _ram_share, _memory_turn, _memory_bytes = ram_share, memory_turn, memory_bytes
    if cores and sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    over = nodes()
    if len(over) > 1 and (reason := interleave(over)):
        _log.warning(
            "this engine runs on %d NUMA nodes, and its memory is not interleaved over them (%s): start weft under "
            "numactl --interleave=all, or use --replicas %d",
            len(over),
            reason,
            len(over),
        )


def state_directory() -> Path:
    """Return the user's directory, as the XDG specification names it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "weft"


def usable_cores() -> int:
    """Return the number of cores for this process: its affinity, or the container's quota if that is lower."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_name_and_flags(path: Path = CPUINFO) -> tuple[str, frozenset[str]]:
    """Return the CPU's name, and its features by Linux's names; empty if the system does not report them."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip().lower(), value.strip())
    flags = facts.get("flags") or facts.get("features") or ""
    return (facts.get("model name") or platform.processor() or platform.machine(), frozenset(flags.split()))


def last_cache_bytes(root: Path = _CACHES) -> int:
    """Return the size of the first core's last cache, 0 where the system does not say."""
    sizes = []
    for path in root.glob("index*/size"):
        number, unit = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip()).groups()  # type: ignore[union-attr]
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20}[unit])
    return max(sizes, default=0)


def keeps_codes(flags: frozenset[str] | None = None) -> bool:
    """Return whether a CPU with ``flags``, by default this one, computes products from codes of fp8, nf4 and fp4, if
    the C++ kernels were built (csrc/coded_tiles.hpp)."""
    flags = cpu_name_and_flags()[1] if flags is None else flags
    return "avx512f" in flags and ("avx512_bf16" not in flags or "avx512vbmi" in flags)


def free_ram_bytes() -> int:
    """Return the RAM that this process can take now: its part (``use_part_of_host``) of the system's free memory, or of
    the rest of a container's limit. Wait while another process with a part takes its memory."""
    if _memory_turn is not None:
        fcntl.lockf(_memory_turn, fcntl.LOCK_EX)  # the end of this process unlocks it too
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free // _ram_share


GPU_CONTEXT_BYTES = 512 << 20
"""Memory of a GPU that CUDA and its libraries take in each process (estimated)."""
GPU_STEP_BYTES = 1 << 30
"""Memory of a GPU for a step and its graphs, before a start measures them (estimated)."""


def memory_share_bytes() -> int | None:
    """Return the bytes that this process may use for weights and arena together; None: all that is free."""
    return _memory_bytes


def in_background(work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, done by a thread of lower priority than other processes. A process could not raise
    its priority again. On Linux each thread has a priority, which new threads inherit."""

    def run() -> Result:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICE)
        return work()

    if sys.platform != "linux":
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="load") as thread:
        return thread.submit(run).result()


def end_memory_turn() -> None:
    """Release the lock on measuring, once this process has its memory, so that the next process can measure the
    rest."""
    if _memory_turn is not None:
        fcntl.lockf(_memory_turn, fcntl.LOCK_UN)


def container_memory_limit_bytes() -> int | None:
    """Return the container's limit, None without one."""
    return next(
        (limit for limit in map(_number, ("memory.max", "memory/memory.limit_in_bytes")) if limit is not None), None
    )


TRIM_EVERY_S = 20.0
_trimmed_s = -TRIM_EVERY_S


def end_start() -> None:
    """Freeze the objects of the start, and raise the threshold of young collections to thousands of objects.

    Later collections skip frozen objects. A request leaves few cycles, and collections after every few hundred objects
    took a tenth of the time of an HTTP process.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.enable()


def trim_heap(every_s: float = 0.0) -> None:
    """Return freed memory to the system. Only glibc keeps it back, and has a call to release it. Prompts of different
    lengths leave holes in the heap of an engine. The call takes about 10 ms, so nothing is done within ``every_s``
    seconds of the last call."""
    global _trimmed_s
    if time.monotonic() - _trimmed_s < every_s:
        return
    _trimmed_s = time.monotonic()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def exit_reason(code: int) -> str:
    """Return how a process ended, as the rest of a sentence. ``code``: negative for a signal."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def _cpu_quota() -> float | None:
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        pass
    for folder in ("", "cpu/"):
        quota_us, period_us = _number(f"{folder}cpu.cfs_quota_us"), _number(f"{folder}cpu.cfs_period_us")
        if quota_us and period_us and quota_us > 0:
            return quota_us / period_us
    return None


def _number(file: str) -> int | None:
    try:
        return int((_CGROUP / file).read_text().strip())
    except (OSError, ValueError):  # no such control group, or no limit in it ("max")
        return None
