"""Transfers between the arena and the transfer buffers of a store: complete pages and states, bit for bit.

    load    pages_PB of a buffer --> pages          state_B --> the first bytes of a slot
    store   pages                --> pages_PB       the first bytes of a slot --> state_B

A page crosses with all of its bytes, so every layout of a page is the same here, those of the CPU
kernels included. A slot crosses without its padding: S bytes of S'. With several ranks, a rank copies its own
columns of a buffer (``ranks.shared_buffers``).

On a CPU numpy copies memory, inside the step. A GPU has a stream for each direction in addition to that of the steps,
so that no step waits for a transfer:

    steps    work k | runs k | gather | work k+1 | runs k+1 | ...        | unpack | work m | ...
                    |               |                                    |
    loads           '-> room, pages, room, pages, ..., slot --- done ----'
    stores                          '-> room to buffer --- done

*Loads* begin after all earlier work of the steps, which may still use their pages. They end some steps later. The host
asks whether they have ended (``are_done``), and only then are their pages and slots given to readers. A plan that
gives out or moves loaded pages first makes the stream of the steps wait for the load, and unpack records that were
stored compressed.

*Stores* are gathered on the stream of the steps, because the next step may write those pages.

Both go through rooms on the device, which are allocated with the arena and counted before the arena takes the
rest: a prefix may be larger than the memory that is free. Two rooms of stores alternate, each of a whole state. Ids of
a load are its own copy, as those of the step are overwritten by the next step.

The ids are those of ``WorkKind``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix_store import BufferPlaces
from weft.runner.staging import Staged
from weft.tensor.device import wait_for
from weft.units import BufferId

Ids = npt.NDArray[Any]
Work = Sequence[tuple[WorkKind, Staged]]

ROOMS_BYTES = 64 << 20
"""Bytes of buffers on the device: a half for loads and two quarters for stores. Larger states get larger buffers."""


def rooms_bytes_for(slot_bytes: int, page_bytes: int, rooms_bytes: int = ROOMS_BYTES) -> tuple[int, int]:
    """Return the bytes of the room of loads, and of each of the two of stores. A state is stored as one piece: the
    stream of the steps would wait for the copies of a third one.
    """
    return max(rooms_bytes // 2, page_bytes), max(rooms_bytes // 4, page_bytes, slot_bytes)


class _Places:
    """Both ends of transfers: ``arena_B``, uint8 [arena_bytes], and the buffers."""

    def __init__(self, plan: ArenaPlan, arena_B: torch.Tensor, buffers: BufferPlaces) -> None:
        self._plan = plan
        self._arena_B = arena_B
        self._buffers = buffers
        self.pages_NP = arena_B[: plan.page_count * plan.page_bytes].view(plan.page_count, plan.page_bytes)

    def states(self, ids_K2: Ids) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each slot and of its buffer."""
        plan = self._plan
        for slot, buffer in ids_K2.tolist():
            assert 0 <= slot < plan.slot_count, f"slot {slot} is not in the arena"
            begin = slot * plan.slot_stride_bytes
            yield (
                self._arena_B[begin : begin + plan.slot_bytes],
                torch.from_numpy(self._buffers[BufferId(buffer)].state_B),
            )

    def pages(self, ids_K3: Ids, most: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows of ``ids_K3`` whose pages are neighbours in one buffer, up to ``most`` of them, and those pages
        of the buffer [rows, page_bytes].
        """
        if not ids_K3.size:
            return
        assert ids_K3[:, 0].min() >= 0, "PAD is loaded or stored"
        assert ids_K3[:, 0].max() < self._plan.page_count, "a page outside the arena is loaded or stored"
        buffers, places = ids_K3[:, 1], ids_K3[:, 2]
        cuts = np.flatnonzero((np.diff(buffers) != 0) | (np.diff(places) != 1)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids_K3)], strict=True):
            for first in range(begin, end, most):
                rows = slice(first, min(first + most, end))
                buffer, place = int(buffers[first]), int(places[first])
                host_PB = self._buffers[BufferId(buffer)].pages_PB[place : place + rows.stop - first]
                assert len(host_PB) == rows.stop - first, f"buffer {buffer} ends before those pages"
                yield rows, torch.from_numpy(host_PB)


class HostTransfers:
    """Transfers on a CPU. ``arena_B``: uint8 [arena_bytes], memory of the host."""

    def __init__(self, plan: ArenaPlan, arena_B: torch.Tensor, buffers: BufferPlaces) -> None:
        self._places = _Places(plan, arena_B, buffers)

    def perform(self, kind: WorkKind, ids: Ids) -> None:
        """Perform loads or stores; they are done when this returns."""
        if kind in (WorkKind.LOAD_STATES, WorkKind.STORE_STATES):
            for slot_B, state_B in self._places.states(ids):
                if kind is WorkKind.LOAD_STATES:
                    slot_B.copy_(state_B)
                else:
                    state_B.copy_(slot_B)
            return
        pages_NP = self._places.pages_NP.numpy()
        for rows, host_PB in self._places.pages(ids, len(ids)):
            if kind is WorkKind.LOAD_PAGES:
                pages_NP[ids[rows, 0]] = host_PB.numpy()
            else:  # in place
                np.take(pages_NP, ids[rows, 0], axis=0, out=host_PB.numpy(), mode="clip")


class _Lane:
    """A stream for one direction, and its rooms; without a GPU, the order of the calls."""

    def __init__(self, device: torch.device, rooms: int, room_bytes: int) -> None:
        cuda: Any = torch.cuda
        self.room_bytes = room_bytes
        self._device = device
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._rooms = [torch.empty(room_bytes, dtype=torch.uint8, device=device) for _ in range(rooms)]
        self._emptied: list[Any] = [None] * rooms
        self._turn = 0

    def next_room(self) -> torch.Tensor:
        """Return uint8 [room_bytes]. The current stream may write it: its last copy comes before."""
        self._turn = (self._turn + 1) % len(self._rooms)
        self.let_in(self._emptied[self._turn])
        return self._rooms[self._turn]

    def after_steps(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose work goes to this stream, after all work that the current stream has."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def end(self) -> Any:
        """Return an event after all work of this stream, the last room included; None: it is done."""
        event = None if self._stream is None else self._stream.record_event()
        self._emptied[self._turn] = event
        return event

    def let_in(self, event: Any) -> None:
        """Let all later work of the current stream wait for ``event``."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way until ``end``. ``keys``: names that plans use for it. ``unpacks``: restores to do then.
    ``ids``: of all its work, on the device, kept until then.
    """

    keys: frozenset[Any]
    end: Any
    ids: Work
    unpacks: Work

    def writes(self, pages: Ids, slots: Ids) -> bool:
        """Return whether the load writes one of these pages or slots."""
        for kind, ids in self.ids:
            slot_first = kind in (WorkKind.LOAD_STATES, WorkKind.RESTORE_STATES)
            if np.isin(ids.host[:, 0], slots if slot_first else pages).any():
                return True
            if kind is WorkKind.RESTORE_STATES and np.isin(ids.host[:, 1:], pages).any():
                return True
        return False

    def reads(self, buffer: BufferId) -> bool:
        return any(
            kind in (WorkKind.LOAD_PAGES, WorkKind.LOAD_STATES) and (ids.host[:, 1] == buffer).any()
            for kind, ids in self.ids
        )


class DeviceTransfers:
    """Transfers on a GPU. ``arena_B``: uint8 [arena_bytes] on the device. The thread of the steps calls all but
    ``are_done``.
    """

    def __init__(
        self, plan: ArenaPlan, arena_B: torch.Tensor, buffers: BufferPlaces, *, rooms_bytes: int = ROOMS_BYTES
    ) -> None:
        device, self._page_bytes = arena_B.device, plan.page_bytes
        self._places = _Places(plan, arena_B, buffers)
        load_bytes, store_bytes = rooms_bytes_for(plan.slot_bytes, plan.page_bytes, rooms_bytes)
        self._loads = _Lane(device, 1, load_bytes)
        self._stores = _Lane(device, 2, store_bytes)
        self._under_way: list[_Load] = []
        self._ends: deque[tuple[int, Any]] = deque()
        """Steps of transfers that may be under way, and the events of their ends."""

    def load(self, step: int, keys: Collection[Any], work: Work, unpacks: Work) -> None:
        """Begin the loads of ``step``. ``unpacks``: restores of their compressed records."""
        work = [(kind, ids.copy()) for kind, ids in work]
        unpacks = [(kind, ids.copy()) for kind, ids in unpacks]
        with self._loads.after_steps():
            for kind, ids in work:
                if kind is WorkKind.LOAD_STATES:
                    for slot_B, state_B in self._places.states(ids.host):
                        slot_B.copy_(state_B, non_blocking=True)
                    continue
                room_B, most = self._loads.next_room(), self._loads.room_bytes // self._page_bytes
                for rows, host_PB in self._places.pages(ids.host, most):
                    pages_PB = room_B[: host_PB.numel()].view(host_PB.shape)
                    pages_PB.copy_(host_PB, non_blocking=True)
                    self._places.pages_NP.index_copy_(0, ids.device[rows, 0], pages_PB)
        end = self._loads.end()
        self._under_way.append(_Load(frozenset(keys), end, [*work, *unpacks], unpacks))
        self._ends.append((step, end))

    def store(self, step: int, work: Work) -> None:
        """Begin the stores of ``step``: bytes of the arena as they are now."""
        lane = self._stores
        for kind, ids in work:
            if kind is WorkKind.STORE_STATES:
                for slot_B, state_B in self._places.states(ids.host):
                    room_B = lane.next_room()[: len(slot_B)]
                    room_B.copy_(slot_B)
                    self._cross(step, room_B, state_B)
                continue
            for rows, host_PB in self._places.pages(ids.host, lane.room_bytes // self._page_bytes):
                pages_PB = lane.next_room()[: host_PB.numel()].view(host_PB.shape)
                torch.index_select(self._places.pages_NP, 0, ids.device[rows, 0], out=pages_PB)
                self._cross(step, pages_PB, host_PB)

    def _cross(self, step: int, room: torch.Tensor, host: torch.Tensor) -> None:
        with self._stores.after_steps():
            host.copy_(room, non_blocking=True)
        self._ends.append((step, self._stores.end()))

    def settle(self, keys: Collection[Any], pages: Ids, slots: Ids) -> Work:
        """Make the current stream wait for the loads that have one of ``keys``, or write one of these pages and slots.
        Return the restores that it must do first.
        """
        due = [load for load in self._under_way if not load.keys.isdisjoint(keys) or load.writes(pages, slots)]
        for load in due:
            self._under_way.remove(load)
            self._loads.let_in(load.end)
        return [unpack for load in due for unpack in load.unpacks]

    def follow(self, buffer: BufferId) -> None:
        """Make the current stream wait for the loads that read ``buffer``."""
        for load in self._under_way:
            if load.reads(buffer):
                self._loads.let_in(load.end)

    def are_done(self, step: int) -> bool:
        """Return whether all transfers of the steps up to ``step``, which are launched, have ended. Never waits. Any
        thread may call it.
        """
        while self._ends and self._ends[0][0] <= step:
            end = self._ends[0][1]
            if end is not None and not end.query():
                return False
            self._ends.popleft()
        return True

    def wait(self) -> None:
        """Wait until nothing is under way."""
        for _, end in self._ends:
            if end is not None:
                wait_for(end)
        self._ends.clear()
