"""Transfer buffers: memory of the host between the arena and a store.

    load    store's thread writes a buffer --> a step copies it into pages and a slot --> freed
    store   a step copies pages and a slot into a buffer --> store's thread reads it  --> freed

    buffer  pages_PB  uint8 [pages, page_bytes]     KV, one row for each 16 tokens
            state_B   uint8 [slot_bytes]            the recurrent state, empty in a model without one

Threads see buffers only, never the arena. A plan names a buffer by its id. The id of the next buffer is known
in advance, so planning can name it and a commit adds it.

Law: L11 (``limit_bytes``; a buffer that has no room is not added, and its caller waits or gives up).

Rejected: views of the arena for threads (a page may be evicted and reused while a disk is slow); one ring of
fixed pieces (a fetch of a whole prefix would need them all at once).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.units import BufferId

Uint8s = npt.NDArray[np.uint8]
Allocate = Callable[[int], Uint8s]
"""Bytes -> uint8 [bytes], with any contents."""

BUFFER_SHARE = 4
BUFFER_BYTES_MIN = 256 << 20
BUFFER_BYTES_MAX = 8 << 30


def buffer_limit(arena_bytes: int) -> int:
    """Most bytes of transfer buffers: a quarter of the arena's, within bounds."""
    return min(max(arena_bytes // BUFFER_SHARE, BUFFER_BYTES_MIN), BUFFER_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class TransferBuffer:
    """See the module."""

    pages_PB: Uint8s
    state_B: Uint8s

    @property
    def nbytes(self) -> int:
        return self.pages_PB.nbytes + self.state_B.nbytes


class BufferPlaces(Protocol):
    """Where a device finds the bytes of a buffer that a plan names."""

    def __getitem__(self, buffer: BufferId) -> TransferBuffer: ...


def _allocate(size_bytes: int) -> Uint8s:
    return np.empty(size_bytes, np.uint8)


class TransferBuffers:
    """``page_bytes`` and ``slot_bytes`` are those of the arena's plan. ``allocate``: pinned memory on a
    GPU; ``release`` takes it back."""

    def __init__(self, page_bytes: int, slot_bytes: int, *, limit_bytes: int,
                 allocate: Allocate = _allocate, release: Callable[[Uint8s], None] = lambda _: None) -> None:
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.next_id = BufferId(0)
        self._allocate, self._release = allocate, release
        self._flat: dict[BufferId, Uint8s] = {}
        self._buffers: dict[BufferId, TransferBuffer] = {}

    def __getitem__(self, buffer: BufferId) -> TransferBuffer:
        return self._buffers[buffer]

    def __contains__(self, buffer: BufferId) -> bool:
        return buffer in self._buffers

    def __len__(self) -> int:
        return len(self._buffers)

    def bytes_for(self, pages: int) -> int:
        return pages * self.page_bytes + self.slot_bytes

    def has_room(self, pages: int) -> bool:
        """Whether a buffer of ``pages`` pages and a state fits beside the others."""
        return self.used_bytes + self.bytes_for(pages) <= self.limit_bytes

    def add(self, pages: int) -> BufferId:
        """A new buffer, whose id was ``next_id``. It must have room."""
        size_bytes = self.bytes_for(pages)
        assert self.has_room(pages), f"a transfer buffer of {size_bytes} bytes is over the limit"
        flat, kv_bytes = self._allocate(size_bytes), pages * self.page_bytes
        buffer = self.next_id
        self._flat[buffer] = flat
        self._buffers[buffer] = TransferBuffer(flat[:kv_bytes].reshape(pages, self.page_bytes),
                                               flat[kv_bytes:])
        self.next_id = BufferId(buffer + 1)
        self.used_bytes += size_bytes
        return buffer

    def free(self, buffer: BufferId) -> None:
        """No step and no thread uses ``buffer`` any more."""
        self.used_bytes -= self._buffers.pop(buffer).nbytes
        self._release(self._flat.pop(buffer))
