"""Memory for weights in pages of 2 MiB, where the system has them to give.

    slab   64 MiB or more of fresh memory, asked for large pages before anything is written
           | weight | weight | weight |  not touched, so not there yet  |

A decode step reads every weight once: with pages of 4 KiB that is an address translation for each 64 lines of
the cache, and the hardware's prefetch ends at each page. Measured on two cores of an EPYC (Zen 4): one
thread reads 20 to 23 GB/s by small pages and 28 to 31 by large ones, two threads that take 128 KiB in turn
21 and 31.

Linux gives them out where ``transparent_hugepage`` is ``always`` or ``madvise`` (the usual setting) and
memory is not in pieces; anywhere else this is plain memory. A slab lives as long as a tensor in it. What the
heap hands out cannot be used for it: it is rarely aligned to 2 MiB, and often touched before.

Rejected: ``hugetlbfs`` (an administrator reserves it); the heap's own switch (an environment variable of
glibc's, for the whole process and from its start).
"""

from __future__ import annotations

import math
import mmap
import sys
import threading

import torch

LARGE_PAGES_BYTES_MIN = 1 << 20
"""Less than this stays in the heap."""
_PAGE_BYTES = 1 << 21
_SLAB_BYTES = 1 << 26
_ALIGNMENT = 4096


class _Slabs:
    """The slab that is being filled. Its tensors keep it, and those before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self._memory is None or self._used + size > len(self._memory):
                self._memory, self._used = _fresh(max(size, _SLAB_BYTES)), 0
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
            self._used += size
        return tensor


_slabs = _Slabs()


def _fresh(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, -(-size // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """As ``torch.empty`` on the CPU, for what is kept and read whole again and again."""
    count = math.prod(shape)
    if count * dtype.itemsize < LARGE_PAGES_BYTES_MIN or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    return _slabs.take(count, dtype).view(shape)


def copied(x: torch.Tensor) -> torch.Tensor:
    """``x`` of any strides, laid out densely here; on another device as ``contiguous`` would."""
    if x.device.type != "cpu":
        return x.contiguous()
    return empty(x.shape, x.dtype).copy_(x)
