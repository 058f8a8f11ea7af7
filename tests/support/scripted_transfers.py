"""Loads and stores of the scripted device: the digests of pages and states as bytes in transfer buffers.

    page    16 digests of 8 bytes, then zeros to the size of a page
    state   one digest of 8 bytes, then zeros to the size of a state

It checks these rules. A load may write only pages and a slot that this plan opens for it. No row, copy or run of the
step may read them. Their frames must be zeroed or hold the same kind (L6). A store may read only pages and slots with
contents. Bytes that come back from a store are digests again, so a run that reads a wrong record finds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.digests import UNWRITTEN, Digests, require
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix_store import TransferBuffer, TransferBuffers
from weft.schedule.plan import Int32s, StepPlan
from weft.units import BufferId


class ScriptedTransfers:
    """Loads and stores over the contents of a ``ScriptedArena``, with its ``claim_page`` and ``claim_slot``."""

    def __init__(
        self,
        arena: ArenaPlan,
        cells: Digests,
        states: Digests,
        readers: Int32s,
        claim_page: Callable[[int], None],
        claim_slot: Callable[[int], None],
    ) -> None:
        self.buffers: TransferBuffers | None = None
        self._arena = arena
        self._cells = cells
        self._states = states
        self._readers = readers
        self._claim_page = claim_page
        self._claim_slot = claim_slot

    def load_pages(self, ids: Int32s, plan: StepPlan) -> None:
        owned = {page for opening in plan.reservation.opened if opening.loads for page in opening.pages}
        copied = {copy.src for copy in plan.arena_work.page_copies}
        for page, buffer, place in ids.tolist():
            require(page in owned, f"L1: page {page} is loaded and no lease of this plan loads it")
            require(self._readers[page] == 0, f"L7: page {page} is loaded while a row reads it")
            require(page not in copied, f"L7: page {page} is loaded and copied in one step")
            self._claim_page(page)
            loaded_B = self._buffer(buffer).pages_PB[place]
            self._cells[page] = loaded_B[: self._cells[page].nbytes].view(np.uint64)

    def load_states(self, ids: Int32s, plan: StepPlan) -> None:
        owned = {opening.slot for opening in plan.reservation.opened if opening.loads}
        copied = {copy.src for copy in plan.arena_work.slot_copies}
        for slot, buffer in ids.tolist():
            require(slot in owned, f"L1: slot {slot} is loaded and no lease of this plan loads it")
            require(slot not in copied, f"L7: slot {slot} is loaded and copied in one step")
            require(slot not in plan.slots, f"L7: slot {slot} is loaded and a run of this step uses it")
            self._claim_slot(slot)
            self._states[slot] = self._buffer(buffer).state_B[:8].view(np.uint64)[0]

    def store_pages(self, ids: Int32s) -> None:
        for page, buffer, place in ids.tolist():
            require(0 <= page < self._arena.page_count, f"L4: page {page} outside the arena is stored")
            require(self._cells[page][0] != UNWRITTEN, f"L6: page {page} is stored and holds no token")
            row = self._buffer(buffer).pages_PB[place]
            row[:] = 0
            row[: self._cells[page].nbytes] = self._cells[page].view(np.uint8)

    def store_states(self, ids: Int32s) -> None:
        for slot, buffer in ids.tolist():
            require(0 <= slot < self._arena.slot_count, f"L4: slot {slot} outside the arena is stored")
            require(self._states[slot] != UNWRITTEN, f"L6: slot {slot} is stored and holds no state")
            state = self._buffer(buffer).state_B
            state[:] = 0
            state[:8] = self._states[slot : slot + 1].view(np.uint8)

    def _buffer(self, buffer: int) -> TransferBuffer:
        require(
            self.buffers is not None and BufferId(buffer) in self.buffers,
            f"transfer buffer {buffer} was not added, or is freed",
        )
        assert self.buffers is not None
        return self.buffers[BufferId(buffer)]
