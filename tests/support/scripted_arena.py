"""The arena of the scripted device: pages and slots that hold digests instead of numbers.

    cells    uint64 [pages, 16]   digest of tokens [0, p] for position p, 0 where nothing is written
    states   uint64 [slots]       digest of tokens [0, p) for the state at position p
    readers  int32 [pages]        rows whose table names the page
    kinds    by frame             what it is used for since it was zeroed

It performs ``ArenaWork`` like the device's arena, in the order of ``ArenaWork.ordered``, and finds errors that kernels
would suffer from: memory that changed kind without zeros (L6), ids outside the arena (L4), a source that holds nothing,
a destination that a row reads (L7). Digests move with pages and slots, so a run that reads a wrong move finds it.
Compressed contents are in ``compressed_digests``, loads and stores in ``scripted_transfers``.

Rejected: checks of the plan without contents (a plan does not show the data that older steps have left in a page).
"""

from __future__ import annotations

import numpy as np

from tests.support.compressed_digests import CompressedDigests
from tests.support.digests import UNWRITTEN, Digests, require
from tests.support.scripted_transfers import ScriptedTransfers
from weft.memory.arena_work import WorkKind
from weft.memory.frames.plan import ArenaPlan
from weft.memory.reservation import Moves
from weft.schedule.plan import Int32s, StepPlan
from weft.units import PAGE_TOKENS


class ScriptedArena:
    """The arena of the scripted device. ``plan`` gives the geometry. Raises PlanViolation."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.cells: Digests = np.full((plan.page_count, PAGE_TOKENS), UNWRITTEN, dtype=np.uint64)
        self.states: Digests = np.full(plan.slot_count, UNWRITTEN, dtype=np.uint64)
        self.readers = np.zeros(plan.page_count, dtype=np.int32)
        self._frame_kinds = [""] * plan.frame_count
        self.transfers = ScriptedTransfers(
            plan, self.cells, self.states, self.readers, self.claim_page, self.claim_slot
        )
        self._compressed = CompressedDigests(plan, self.cells, self.states, self.readers, self.claim_frame)

    def forget(self) -> None:
        """Forget all contents."""
        self.cells[:] = UNWRITTEN
        self.states[:] = UNWRITTEN
        self._frame_kinds = [""] * len(self._frame_kinds)

    def perform(self, kind: WorkKind, ids: Int32s, plan: StepPlan) -> None:
        """Perform one kind of the arena work of ``plan``, after its changes of rows."""
        match kind:
            case WorkKind.ZERO_FRAMES:
                for frame in ids.tolist():
                    self._zero_frame(frame)
            case WorkKind.RESTORE_STATES:
                self._compressed.restore_states(ids)
            case WorkKind.RESTORE_KV:
                self._compressed.restore_kv(ids, plan.table_writes[2])
            case WorkKind.COMPRESS_STATES:
                self._compressed.compress_states(ids)
            case WorkKind.COMPRESS_KV:
                self._compressed.compress_kv(ids)
            case WorkKind.COPY_SLOTS:
                self._copy_slots(ids)
            case WorkKind.COPY_PAGES:
                self._copy_pages(ids, plan.reservation.moves)
            case WorkKind.LOAD_PAGES:
                self.transfers.load_pages(ids, plan)
            case WorkKind.LOAD_STATES:
                self.transfers.load_states(ids, plan)
            case WorkKind.STORE_PAGES:
                self.transfers.store_pages(ids)
            case WorkKind.STORE_STATES:
                self.transfers.store_states(ids)

    def vacate(self, moves: Moves) -> None:
        """Empty the sources of ``moves``, once the tables name the destinations."""
        for page in (copy.src for copy in moves.pages):
            require(self.readers[page] == 0, f"L5: page {page} was moved away from under a row")
            self.cells[page] = UNWRITTEN
        for slot in (copy.src for copy in moves.slots):
            self.states[slot] = UNWRITTEN

    def claim_page(self, page: int) -> None:
        """Claim ``page``, which is written."""
        self.claim_frame(page // self.plan.pages_per_frame, "pages")

    def claim_slot(self, slot: int) -> None:
        """Claim ``slot``, which is written."""
        self.claim_frame(slot // self.plan.slots_per_frame, "slots")

    def claim_frame(self, frame: int, kind: str) -> None:
        """Claim ``frame`` for ``kind`` from now on."""
        held = self._frame_kinds[frame]
        require(
            held in ("zero", kind),
            f"L6: frame {frame} is used for {kind} and was not zeroed (it held {held or 'nothing yet'})",
        )
        self._frame_kinds[frame] = kind

    def _zero_frame(self, frame: int) -> None:
        plan = self.plan
        first = frame * plan.pages_per_frame
        self.cells[first : first + plan.pages_per_frame] = UNWRITTEN
        first = frame * plan.slots_per_frame
        self.states[first : first + plan.slots_per_frame] = UNWRITTEN
        self._frame_kinds[frame] = "zero"

    def _copy_slots(self, copies: Int32s) -> None:
        sources, destinations = copies
        _check_copies(sources, destinations, self.plan.slot_count, "slot")
        held = self.states[sources]
        require((held != UNWRITTEN).all(), "L6: a slot is copied that holds no state")
        for slot in destinations.tolist():
            self.claim_slot(slot)
        self.states[destinations] = held

    def _copy_pages(self, copies: Int32s, moves: Moves) -> None:
        sources, destinations = copies
        _check_copies(sources, destinations, self.plan.page_count, "page")
        held = self.cells[sources]
        moved = [copy.src for copy in moves.pages]  # all pages of a lease may move, also those without tokens yet
        require(((held[:, 0] != UNWRITTEN) | np.isin(sources, moved)).all(), "L6: a page is copied that holds no token")
        for page in destinations.tolist():
            self.claim_page(page)
        self.cells[destinations] = held


def _check_copies(sources: Int32s, destinations: Int32s, count: int, what: str) -> None:
    for ids in (sources, destinations):
        require(((ids >= 0) & (ids < count)).all(), f"L4: a {what} outside the arena is copied")
    require(len(set(destinations.tolist())) == destinations.size, f"two copies into one {what}")
