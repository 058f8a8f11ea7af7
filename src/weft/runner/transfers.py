"""Transfers between the arena and the transfer buffers of a store: pages and states, whole, bit for bit.

    load    pages_PB of a buffer --> pages          state_B --> the first bytes of a slot
    store   pages                --> pages_PB       the first bytes of a slot --> state_B

A page crosses with all of its bytes, so every layout of a page is the same here, packed pages of the CPU
kernels included. A slot crosses without its padding: S bytes of S'. With several ranks, a rank copies its own
columns of a buffer (``ranks.shared_buffers``).

    on a CPU     numpy copies memory
    elsewhere    pages are gathered on the device, in pieces of 64 MiB through one buffer, and each piece
                 crosses in one copy. Copies are enqueued on the stream of the step. Pinned buffers do not
                 block the host: the step's readback is behind the copies, so a finished step has its stores

The buffer of the pieces is allocated with the arena, and counted before the arena takes the rest: a prefix
may be larger than the memory that is free. Ids are on the device already, with the rest of the step.

The ids are those of ``WorkKind``. Rejected: a kernel that reads host memory (its speed depends on the bus);
one copy for each page (a prefix of 12,000 tokens has 750).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix_store import BufferPlaces
from weft.tensor.device import is_remote
from weft.units import BufferId

Ids = npt.NDArray[Any]
PIECE_BYTES = 64 << 20
"""Of the buffer on the device."""


class Transfers:
    """``arena_B``: uint8 [arena_bytes]; ``pieces_B``: uint8 on the same device, for pages on their way; None
    on a CPU."""

    def __init__(self, plan: ArenaPlan, arena_B: torch.Tensor, buffers: BufferPlaces,
                 pieces_B: torch.Tensor | None = None) -> None:
        self._plan = plan
        self._arena_B = arena_B
        self._buffers = buffers
        self._pieces_B = pieces_B

    def pages(self, ids_K3: Ids, pages_K: torch.Tensor | None = None, *, load: bool) -> None:
        """Rows of a page, a buffer, and a page of that buffer. ``pages_K``: the pages of all rows, on the
        device."""
        plan = self._plan
        if not ids_K3.size:
            return
        assert ids_K3[:, 0].min() >= 0, "PAD is loaded or stored"
        assert ids_K3[:, 0].max() < plan.page_count, "a page outside the arena is loaded or stored"
        pages_NP = self._arena_B[:plan.page_count * plan.page_bytes].view(plan.page_count, plan.page_bytes)
        begin = 0
        for buffer, first, items in _runs(ids_K3):
            host_PB = self._buffers[buffer].pages_PB[first:first + len(items)]
            assert len(host_PB) == len(items), f"buffer {buffer} ends before page {first + len(items)}"
            if self._pieces_B is not None:
                assert pages_K is not None, "ids that are not on the device"
                move = load_pages if load else store_pages
                move(pages_NP, pages_K[begin : begin + len(items)], host_PB, self._pieces_B)
            elif load:
                pages_NP.numpy()[items] = host_PB
            else:
                np.take(pages_NP.numpy(), items, axis=0, out=host_PB, mode="clip")  # in place
            begin += len(items)

    def states(self, ids_K2: Ids, *, load: bool) -> None:
        """Rows of a slot and a buffer."""
        plan = self._plan
        for slot, buffer in ids_K2.tolist():
            assert 0 <= slot < plan.slot_count, f"slot {slot} is not in the arena"
            begin = slot * plan.slot_stride_bytes
            slot_B = self._arena_B[begin:begin + plan.slot_bytes]
            state_B = torch.from_numpy(self._buffers[BufferId(buffer)].state_B)
            if load:
                slot_B.copy_(state_B, non_blocking=True)
            else:
                state_B.copy_(slot_B, non_blocking=True)


def pieces_for(plan: ArenaPlan, device: torch.device) -> torch.Tensor | None:
    """The buffer of the pieces; at least of a page."""
    if not is_remote(device):
        return None
    return torch.empty(max(PIECE_BYTES, plan.page_bytes), dtype=torch.uint8, device=device)


def load_pages(pages_NP: torch.Tensor, pages_K: torch.Tensor, host_PB: npt.NDArray[np.uint8],
               pieces_B: torch.Tensor) -> None:
    """``host_PB`` into the pages ``pages_K``, on any device."""
    for items_K, piece_KP, host_KP in _pieces(pages_K, host_PB, pieces_B):
        piece_KP.copy_(host_KP, non_blocking=True)
        pages_NP.index_copy_(0, items_K, piece_KP)


def store_pages(pages_NP: torch.Tensor, pages_K: torch.Tensor, host_PB: npt.NDArray[np.uint8],
                pieces_B: torch.Tensor) -> None:
    """The pages ``pages_K`` into ``host_PB``, from any device."""
    for items_K, piece_KP, host_KP in _pieces(pages_K, host_PB, pieces_B):
        torch.index_select(pages_NP, 0, items_K, out=piece_KP)
        host_KP.copy_(piece_KP, non_blocking=True)


def _pieces(pages_K: torch.Tensor, host_PB: npt.NDArray[np.uint8], pieces_B: torch.Tensor,
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, room on the device and the place on the host, of as many pages as fit."""
    host, page_bytes = torch.from_numpy(host_PB), host_PB.shape[1]
    count = len(pieces_B) // page_bytes
    for begin in range(0, len(host_PB), count):
        host_KP = host[begin : begin + count]
        room_KP = pieces_B[: len(host_KP) * page_bytes].view(len(host_KP), page_bytes)
        yield pages_K[begin : begin + count], room_KP, host_KP


def _runs(ids_K3: Ids) -> Iterator[tuple[BufferId, int, Ids]]:
    """The buffer, its first page and the arena's pages, for each run of consecutive pages of a buffer."""
    buffers, places = ids_K3[:, 1], ids_K3[:, 2]
    cuts = np.flatnonzero((np.diff(buffers) != 0) | (np.diff(places) != 1)) + 1
    for rows in np.split(ids_K3, cuts):
        yield BufferId(int(rows[0, 1])), int(rows[0, 2]), rows[:, 0]
