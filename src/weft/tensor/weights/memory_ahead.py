"""Fresh memory for weights, touched by a thread while the interpreter imports torch.

    main thread   find the model | imports: 1 to 2 s | load: packs into the slab --------> give_back_rest
    thread                       | touches the slab  |
    slab          [ touched ------------ | not touched: the packing threads write it first ]

The first write to a page makes the system clear it, and a virtual machine's host find it: 0.2 to 1.9 s a GiB
on one thread. Imports run on one core while the others wait. So the slab of a large checkpoint is allocated
before them, and a thread touches it until weights are read. ``large_pages`` takes tensors from it in order.

The size is an estimate (``assemble.weights_ahead``). Where it is too small, further slabs follow. Where it is
too large, what was touched and not taken goes back to the system once weights are read.

The module imports no torch.

Rejected: ``MADV_POPULATE_WRITE``. It holds the lock of the process's map, and each import that maps memory
waits for it. Touching by more threads: the imports would wait. Packing before torch is imported: the code of
a model says what its matrices are.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

AHEAD_BYTES_MIN = 1 << 28
"""A smaller checkpoint is read faster than a thread is started and stopped."""
_STEP_BYTES = 32 << 20
_PAGE_BYTES = 1 << 21


class MemoryAhead:
    """``memory``: ``size_bytes``, up to a whole page of 2 MiB. Raises OSError if the system refuses it."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = fresh(size_bytes)
        self.touched_bytes = 0
        """From the beginning of ``memory`` on."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="weft-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _touch(self) -> None:
        begin = ctypes.c_char.from_buffer(self.memory)
        address = ctypes.addressof(begin)
        while self.touched_bytes < len(self.memory) and not self._stopped.is_set():
            size = min(_STEP_BYTES, len(self.memory) - self.touched_bytes)
            ctypes.memset(address + self.touched_bytes, 0, size)  # without the interpreter lock
            self.touched_bytes += size


_ahead: MemoryAhead | None = None


@contextmanager
def touched_ahead(size_bytes: int) -> Iterator[None]:
    """Touches memory for weights that take about ``size_bytes``, where that is worth it. What is not taken
    over inside goes back to the system."""
    global _ahead
    if size_bytes >= AHEAD_BYTES_MIN and sys.platform == "linux" and _ahead is None:
        with suppress(OSError):  # reading the weights says what is missing
            _ahead = MemoryAhead(size_bytes)
    try:
        yield
    finally:
        take_over()


def take_over() -> MemoryAhead | None:
    """The memory that was begun, for its only user. No thread touches it any more."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None:
        ahead.stop()
    return ahead


def fresh(size_bytes: int) -> mmap.mmap:
    """Anonymous memory in large pages, where the system has them."""
    size = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
