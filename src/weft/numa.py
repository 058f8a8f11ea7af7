"""NUMA nodes: which cores read which memory fast, and where an engine's pages go.

    a node           cores, and RAM with a controller of its own
    --replicas 2     on two nodes: each engine has the cores of one node and touches its own weights first, so a step
                     reads no byte of the other node
    one engine       over two nodes: pages in turn on both (``interleave``), so a step reads half of its weights from
                     the other node, by both controllers

Linux puts a page on the node of the thread that writes it first. Weights are read by few threads, so those of one
engine would fill one node, and all cores would wait for one controller. Threads are not pinned: the pool hands out
items as they are taken (csrc/pool.hpp), so no thread has pages of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_INTERLEAVE = 3
"""MPOL_INTERLEAVE of linux/mempolicy.h."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call; the C library has no function for it."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """``cores``: those of the node that this process may run on."""

    number: int
    cores: tuple[int, ...]


def nodes(cores: Collection[int] | None = None, root: Path = NODES) -> list[NumaNode]:
    """Return the nodes with any of ``cores`` (default: the cores that this process may run on), in their order. Empty
    where the system does not say."""
    if cores is None:
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else ()
    present = []
    for folder in root.glob("node[0-9]*"):
        own = tuple(core for core in core_numbers((folder / "cpulist").read_text()) if core in cores)
        if own:
            present.append(NumaNode(int(folder.name.removeprefix("node")), own))
    return sorted(present, key=lambda node: node.number)


def core_numbers(text: str) -> list[int]:
    """Parse "0-2,8" as [0, 1, 2, 8]."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def interleave(over: Sequence[NumaNode]) -> str:
    """Put the later pages of this process on the nodes ``over`` in turn; to be called before threads are started.
    Return the reason where the system does not allow it: Docker's default seccomp profile, for one."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return "only Linux on x86-64 and 64-bit Arm interleaves memory"
    mask = sum(1 << node.number for node in over)
    words = mask.bit_length() // 64 + 1
    bits = (ctypes.c_ulong * words)(*(mask >> 64 * word & (1 << 64) - 1 for word in range(words)))
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(number, _INTERLEAVE, bits, ctypes.c_ulong(64 * words + 1)):
        return os.strerror(ctypes.get_errno())
    return ""
