"""Division of this machine among replicas: cores, RAM, GPUs.

    --replicas 3 on 2 nodes of 6 cores     replica 0: cores 0-3, replica 1: cores 4-7, replica 2: cores 8-11
    on GPUs                                replica r: GPU r; with --tp 2, GPUs 2 r and 2 r + 1

Cores are divided in the order of NUMA nodes, so a replica spans the fewest nodes possible. A machine with fewer cores
than replicas is not divided. Engines with their own cores start at the same time, and choose their memory one after the
other. Each replica gets a GPU by CUDA_VISIBLE_DEVICES, which libraries read before weft's code runs: two engines on one
GPU would disturb each other's measurement of free memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Sequence

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.numa import nodes
from weft.rpc.messages import ANYWHERE, HostShare

_VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = "libcuda.so.1"
"""CUDA's driver; on WSL too."""


def divide_machine(config: EngineConfig, replicas: int, whole: HostShare = ANYWHERE) -> list[HostShare]:
    """Return a part for each replica; the parts divide the memory of ``whole``. Raise ConfigError if there are fewer
    GPUs than replicas need."""
    if replicas == 1:
        return [whole]
    gpus = [] if config.device == "cpu" else visible_gpus()
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"--device {config.device} is one GPU, and --replicas is {replicas}: use --device cuda", param="--device"
        )
    if gpus and len(gpus) < replicas * config.tp:
        each = "a GPU" if config.tp == 1 else f"{config.tp} GPUs (--tp)"
        raise ConfigError(
            f"--replicas is {replicas}, and this machine has GPUs {', '.join(gpus)}: each "
            f"replica takes {each} of its own; use --device cpu to serve on the CPU",
            param="--replicas",
        )
    cores = divide_cores(usable_core_numbers(), replicas)
    turn = memory_turn()
    of_replica = [",".join(gpus[number * config.tp : (number + 1) * config.tp]) for number in range(replicas)]
    memory_bytes = None if whole.memory_bytes is None else whole.memory_bytes // replicas
    return [
        dataclasses.replace(
            whole,
            cores=cores[number],
            ram_share=replicas,
            environment={_VISIBLE: of_replica[number]} if gpus else {},
            memory_turn=turn,
            memory_bytes=memory_bytes,
        )
        for number in range(replicas)
    ]


def memory_turn() -> int:
    """Return the descriptor of a new unnamed file, which exists as long as this process."""
    descriptor, name = tempfile.mkstemp(prefix="weft-turn-")
    os.unlink(name)
    return descriptor


def start_at_once(config: EngineConfig, shares: Sequence[HostShare]) -> bool:
    """Return whether the engines of ``shares`` may start at the same time. Without its own cores, an engine would
    measure its steps during the start of another. With --weights-cache, later engines map the file that the first
    engine packs, so they start after it."""
    return config.weights_cache is None and all(share.cores for share in shares)


def divide_cores(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Divide ``cores`` into ``parts`` of neighbours; the first parts get one core more if they do not divide evenly.
    All parts are empty if there are fewer cores than parts."""
    if len(cores) < parts:
        return [()] * parts
    size, left = divmod(len(cores), parts)
    ends = [size * (part + 1) + min(part + 1, left) for part in range(parts)]
    return [tuple(cores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def usable_core_numbers() -> list[int]:
    """Return the cores on which this process may run, ordered by NUMA node; empty if the system does not report
    them."""
    if sys.platform != "linux":
        return []
    node_of = {core: node.number for node in nodes() for core in node.cores}
    return sorted(os.sched_getaffinity(0), key=lambda core: (node_of.get(core, 0), core))


def visible_gpus() -> list[str]:
    """Return the names of the GPUs for CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get(_VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(driver_gpus())]


@functools.cache
def driver_gpus() -> int:
    """Return the number of GPUs by CUDA's driver, 0 without one."""
    # Not from /dev: its minor numbers are the machine's, but in a container with cards 2 and 3 the driver numbers the
    # cards 0 and 1. WSL has no such files.
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
