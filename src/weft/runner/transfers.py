"""Transfers between the arena and the transfer buffers of a store: pages and states, whole, bit for bit.

    load    pages_PB of a buffer --> pages          state_B --> the first bytes of a slot
    store   pages                --> pages_PB       the first bytes of a slot --> state_B

A page crosses with all of its bytes, so every layout of a page is the same here, packed pages of the CPU
kernels included. A slot crosses without its padding: S bytes of S'. With several ranks, a rank copies its own
columns of a buffer (``ranks.shared_buffers``).

    on a CPU     numpy copies memory
    elsewhere    pages are gathered on the device and cross in one copy for each buffer. The copy is enqueued
                 on the stream of the step. Pinned buffers do not block the host: the step's readback is
                 behind the copy, so a finished step has its stores

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
from weft.memory.transfer_buffers import BufferPlaces
from weft.units import BufferId

Ids = npt.NDArray[Any]


class Transfers:
    """``arena_B``: uint8 [arena_bytes]."""

    def __init__(self, plan: ArenaPlan, arena_B: torch.Tensor, buffers: BufferPlaces) -> None:
        self._plan = plan
        self._arena_B = arena_B
        self._buffers = buffers

    def pages(self, ids_K3: Ids, *, load: bool) -> None:
        """Rows of a page, a buffer, and a page of that buffer."""
        plan = self._plan
        if not ids_K3.size:
            return
        assert ids_K3[:, 0].min() >= 0, "PAD is loaded or stored"
        assert ids_K3[:, 0].max() < plan.page_count, "a page outside the arena is loaded or stored"
        pages_NP = self._arena_B[:plan.page_count * plan.page_bytes].view(plan.page_count, plan.page_bytes)
        for buffer, first, items in _runs(ids_K3):
            host_PB = self._buffers[buffer].pages_PB[first:first + len(items)]
            assert len(host_PB) == len(items), f"buffer {buffer} ends before page {first + len(items)}"
            if pages_NP.device.type != "cpu":
                (load_by_index if load else store_by_index)(pages_NP, items, host_PB)
            elif load:
                pages_NP.numpy()[items] = host_PB
            else:
                np.take(pages_NP.numpy(), items, axis=0, out=host_PB, mode="clip")  # in place

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


def load_by_index(pages_NP: torch.Tensor, items: Ids, host_PB: npt.NDArray[np.uint8]) -> None:
    """``host_PB`` into the pages ``items``, on any device."""
    loaded_KP = torch.from_numpy(host_PB).to(pages_NP.device, non_blocking=True)
    pages_NP.index_copy_(0, _on_device(items, pages_NP.device), loaded_KP)


def store_by_index(pages_NP: torch.Tensor, items: Ids, host_PB: npt.NDArray[np.uint8]) -> None:
    """The pages ``items`` into ``host_PB``, from any device."""
    gathered_KP = pages_NP.index_select(0, _on_device(items, pages_NP.device))
    torch.from_numpy(host_PB).copy_(gathered_KP, non_blocking=True)


def _on_device(items: Ids, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(items.astype(np.int64)).to(device)


def _runs(ids_K3: Ids) -> Iterator[tuple[BufferId, int, Ids]]:
    """The buffer, its first page and the arena's pages, for each run of consecutive pages of a buffer."""
    buffers, places = ids_K3[:, 1], ids_K3[:, 2]
    cuts = np.flatnonzero((np.diff(buffers) != 0) | (np.diff(places) != 1)) + 1
    for rows in np.split(ids_K3, cuts):
        yield BufferId(int(rows[0, 1])), int(rows[0, 2]), rows[:, 0]
