"""Transfer buffers of several ranks: each is a piece of shared memory, with a part for each rank.

    buffer   pages_PB  uint8 [pages, ranks x page_bytes]    row i: page i of rank 0, of rank 1, ...
             state_B   uint8 [ranks x slot_bytes]           the state of rank 0, of rank 1, ...

    rank 0   add  --RankBuffer and its descriptor-->  rank r maps it
             plan with loads and stores ----------->  rank r copies its own part, as rank 0 does
             free --RankBufferFreed-------------->    rank r forgets it

    on GPUs  one mapping, which every rank maps and pins at the start; buffers are pieces of it

The store sees one buffer with all parts. A record whose part of one rank is missing or damaged is a damaged record,
and no rank loads any of it. A store needs a reply (``RankedExecutor``). A load needs none. The memory of a buffer with
its own mapping is never used for another buffer. A piece is used again, after the next step that began after it was
freed: before the collectives of that step, the stream of rank r waits for its loads (``DeviceTransfers.follow``). The
memory has no name (memfd): it goes when the last process that maps it ends, however that happens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.memory.prefix_store import TransferBuffer, TransferBuffers, Uint8s
from weft.ranks.messages import RankBuffer, RankBufferFreed, RankMemory
from weft.tensor.gpu.host_memory import HostBuffer, HostRoom
from weft.units import BufferId

Share = Callable[[RankBuffer | RankMemory, int | None], None]
"""Function that sends a message, and a descriptor if there is one, to all other ranks."""


class SharedBuffers(TransferBuffers):
    """Transfer buffers of rank 0, with the parts of all ``ranks``. ``page_bytes`` and ``slot_bytes`` are of one rank.
    ``share`` and ``tell`` reach the other ranks. Neither raises here: a rank that is lost ends the next step.
    ``room``: pinned memory, on GPUs; a buffer that finds no gap in it has memory of its own.
    """

    def __init__(
        self,
        page_bytes: int,
        slot_bytes: int,
        *,
        limit_bytes: int,
        ranks: int,
        share: Share,
        tell: Callable[[RankBufferFreed], None],
        room: HostRoom | None = None,
    ) -> None:
        super().__init__(
            ranks * page_bytes,
            ranks * slot_bytes,
            limit_bytes=limit_bytes,
            allocate=self._allocate_shared,
            release=(lambda flat: None) if room is None else room.give,
        )
        self._room = room
        self._own_page_bytes, self._own_slot_bytes = page_bytes, slot_bytes
        self._share, self._tell = share, tell
        self._descriptor: int | None = None

    def add(self, pages: int) -> BufferId:
        buffer = super().add(pages)
        begin = None if self._room is None else self._room.begin_of(self._flat[buffer])
        with contextlib.suppress(WeftError):
            self._share(RankBuffer(buffer, pages, begin), self._descriptor)
        if self._descriptor is not None:
            os.close(self._descriptor)
        return buffer

    def free(self, buffer: BufferId) -> None:
        with contextlib.suppress(WeftError):  # first: the other ranks finish with it before the fence
            self._tell(RankBufferFreed(buffer))
        super().free(buffer)

    def _allocate_shared(self, size_bytes: int) -> Uint8s:
        self._descriptor = None
        piece = None if self._room is None else self._room.find(size_bytes)
        if piece is not None:
            return piece
        self._descriptor = new_memory(size_bytes)
        return _mapped(self._descriptor, size_bytes)

    @property
    def own(self) -> OwnParts:
        """Rank 0's part of each buffer."""
        return OwnParts(self, 0, self._own_page_bytes, self._own_slot_bytes)


class OwnParts:
    """The part of rank ``rank`` in each buffer of ``buffers``."""

    def __init__(self, buffers: TransferBuffers, rank: int, page_bytes: int, slot_bytes: int) -> None:
        self._buffers = buffers
        self._rank, self._page_bytes, self._slot_bytes = rank, page_bytes, slot_bytes

    def __getitem__(self, buffer: BufferId) -> TransferBuffer:
        return part_of(self._buffers[buffer], self._rank, self._page_bytes, self._slot_bytes)


class ReceivedBuffers:
    """Transfer buffers of rank ``rank`` of ``ranks``: its parts of the buffers that rank 0 shares."""

    def __init__(self, rank: int, ranks: int, page_bytes: int, slot_bytes: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes
        self._parts: dict[BufferId, TransferBuffer] = {}
        self.memory: HostBuffer | None = None
        """Mapping of the buffers that are pieces of it."""

    def __getitem__(self, buffer: BufferId) -> TransferBuffer:
        return self._parts[buffer]

    def __len__(self) -> int:
        return len(self._parts)

    def receive(self, message: RankBuffer, connection: Connection[Any, Any]) -> None:
        """Map the buffer of ``message``. The descriptor of a buffer with memory of its own follows ``message``."""
        kv_bytes = message.pages * self._ranks * self._page_bytes
        size_bytes = kv_bytes + self._ranks * self._slot_bytes
        if message.begin is None:
            flat = np.frombuffer(received(connection, size_bytes), np.uint8)[:size_bytes]
        else:
            assert self.memory is not None, "a piece of memory that was not shared"
            flat = self.memory.tensor.numpy()[message.begin : message.begin + size_bytes]
        whole = TransferBuffer(flat[:kv_bytes].reshape(message.pages, self._ranks * self._page_bytes), flat[kv_bytes:])
        self._parts[message.buffer] = part_of(whole, self._rank, self._page_bytes, self._slot_bytes)

    def forget(self, message: RankBufferFreed) -> None:
        del self._parts[message.buffer]

    def close(self) -> None:
        """Drop all buffers. No copy may be under way."""
        self._parts.clear()
        if self.memory is not None:
            self.memory.close()


def part_of(whole: TransferBuffer, rank: int, page_bytes: int, slot_bytes: int) -> TransferBuffer:
    """Return views of one rank's columns and state."""
    return TransferBuffer(
        whole.pages_PB[:, rank * page_bytes : (rank + 1) * page_bytes],
        whole.state_B[rank * slot_bytes : (rank + 1) * slot_bytes],
    )


def new_memory(size_bytes: int) -> int:
    """Return a descriptor of memory that processes can share."""
    descriptor = os.memfd_create("weft-transfer")
    os.ftruncate(descriptor, max(1, size_bytes))
    return descriptor


def received(connection: Connection[Any, Any], size_bytes: int) -> mmap.mmap:
    """Return the memory of the descriptor that comes next."""
    descriptor = recv_handle(connection)
    try:
        return mmap.mmap(descriptor, max(1, size_bytes))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size_bytes: int) -> Uint8s:
    return np.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), np.uint8)[:size_bytes]
