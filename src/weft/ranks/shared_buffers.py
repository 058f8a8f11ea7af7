"""Transfer buffers of several ranks: one piece of shared memory for each, and a part of it for each rank.

    buffer   pages_PB  uint8 [pages, ranks x page_bytes]    row i: page i of rank 0, of rank 1, ...
             state_B   uint8 [ranks x slot_bytes]           the state of rank 0, of rank 1, ...

    rank 0   add  --RankBuffer and its descriptor-->  rank r maps it
             plan with loads and stores ----------->  rank r copies its own part, as rank 0 does
             free --RankBufferFreed-------------->    rank r unmaps it

The store sees one buffer with all parts. So a record holds the pages of all ranks, under one checksum. A
record whose part of one rank is missing or damaged is a damaged record, and no rank loads any of it. No rank
but 0 opens the store.

A load needs no reply: the memory of a buffer is never used for another one. A store needs one, since rank 0
hands the buffer to the store's thread (``RankedExecutor``).

The memory has no name (memfd): it goes when the last process that maps it ends, however that happens.

Rejected: a store for each rank (a hit only if all ranks have it, so N indexes must agree, and N ledgers after
a kill); named shared memory (a kill leaves it behind); one mapping for all buffers (an allocator of its own).
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
from weft.ranks.messages import RankBuffer, RankBufferFreed
from weft.units import BufferId

Share = Callable[[RankBuffer, int], None]
"""Sends a message and a descriptor to all other ranks."""


class SharedBuffers(TransferBuffers):
    """Those of rank 0, with the parts of all ``ranks``. ``page_bytes`` and ``slot_bytes`` are of one rank.
    ``share`` and ``tell`` reach the other ranks. Neither raises here: a rank that is lost ends the next
    step."""

    def __init__(self, page_bytes: int, slot_bytes: int, *, limit_bytes: int, ranks: int, share: Share,
                 tell: Callable[[RankBufferFreed], None]) -> None:
        super().__init__(ranks * page_bytes, ranks * slot_bytes, limit_bytes=limit_bytes,
                         allocate=self._allocate_shared)
        self._own_page_bytes, self._own_slot_bytes = page_bytes, slot_bytes
        self._share, self._tell = share, tell
        self._descriptor = -1

    def add(self, pages: int) -> BufferId:
        buffer = super().add(pages)
        with contextlib.suppress(WeftError):
            self._share(RankBuffer(buffer, pages), self._descriptor)
        os.close(self._descriptor)
        return buffer

    def free(self, buffer: BufferId) -> None:
        super().free(buffer)
        with contextlib.suppress(WeftError):
            self._tell(RankBufferFreed(buffer))

    def _allocate_shared(self, size_bytes: int) -> Uint8s:
        self._descriptor = os.memfd_create("weft-transfer")
        os.ftruncate(self._descriptor, max(1, size_bytes))
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
    """Those of rank ``rank`` of ``ranks``: its parts of what rank 0 shares."""

    def __init__(self, rank: int, ranks: int, page_bytes: int, slot_bytes: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes
        self._parts: dict[BufferId, TransferBuffer] = {}

    def __getitem__(self, buffer: BufferId) -> TransferBuffer:
        return self._parts[buffer]

    def __len__(self) -> int:
        return len(self._parts)

    def receive(self, message: RankBuffer, connection: Connection[Any, Any]) -> None:
        """The descriptor comes behind ``message``."""
        descriptor = recv_handle(connection)
        try:
            kv_bytes = message.pages * self._ranks * self._page_bytes
            flat = _mapped(descriptor, kv_bytes + self._ranks * self._slot_bytes)
        finally:
            os.close(descriptor)
        whole = TransferBuffer(flat[:kv_bytes].reshape(message.pages, self._ranks * self._page_bytes),
                               flat[kv_bytes:])
        self._parts[message.buffer] = part_of(whole, self._rank, self._page_bytes, self._slot_bytes)

    def forget(self, message: RankBufferFreed) -> None:
        del self._parts[message.buffer]


def part_of(whole: TransferBuffer, rank: int, page_bytes: int, slot_bytes: int) -> TransferBuffer:
    """Views of one rank's columns and state."""
    return TransferBuffer(whole.pages_PB[:, rank * page_bytes:(rank + 1) * page_bytes],
                          whole.state_B[rank * slot_bytes:(rank + 1) * slot_bytes])


def _mapped(descriptor: int, size_bytes: int) -> Uint8s:
    return np.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), np.uint8)[:size_bytes]
