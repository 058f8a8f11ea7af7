"""What is compressed, on the scripted executor's device: pages whose cells are no KV.

    a piece of a compressed state    [ state | piece number, piece number ...        ]
    a page of compressed KV          [ seal, seal ...                                ]  seal -> what was put there

A page of a packed has parts of several records. Which, is kept beside the cells, by a *seal* that is in all
of them: it goes along when the page is moved, and is gone when anything else is written there. A record is
put together from its two pages only if both have what one compression put there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.engine.digests import EMPTY, UNWRITTEN, Digests, digest, require
from weft.memory.frames.plan import ArenaPlan
from weft.schedule.plan import Int32s, StepPlan
from weft.units import PAGE_TOKENS

ClaimFrame = Callable[[int, str], None]
Record = tuple[int, ...]
"""The cells of a page of KV."""


class CompressedDigests:
    """Over the device's own ``cells``, ``states`` and ``readers``. ``claim_frame(frame, kind)``: it is used
    for that. Raises PlanViolation."""

    def __init__(self, arena: ArenaPlan, cells: Digests, states: Digests, readers: Int32s,
                 claim_frame: ClaimFrame) -> None:
        self._arena = arena
        self._cells = cells
        self._states = states
        self._readers = readers
        self._claim_frame = claim_frame
        self._sealed: dict[int, dict[int, Record]] = {}
        """By seal: records by the byte of the page where they begin; what goes on from the page before begins
        below 0."""
        self._seals = 0

    def run(self, plan: StepPlan) -> None:
        """All that ``plan`` restores and state_compressions."""
        self._restore_states(plan.state_restores)
        self._compress_states(plan.state_compressions)
        self._restore_kv(plan.kv_restores, plan.table_writes[2])
        self._compress_kv(plan.kv_compressions)

    # ------------------------------------------------------------------ states

    def _restore_states(self, state_restores: Int32s) -> None:
        for slot, *pages in state_restores.tolist():
            self._check_compressed(slot, pages)
            state = self._cells[pages[0], 0]
            for index, page in enumerate(pages):
                require(state != UNWRITTEN and self._cells[page, 0] == state
                        and self._cells[page, 1:].tolist() == [_piece(index)] * (PAGE_TOKENS - 1),
                        f"L5: page {page} is not piece {index} of the compressed state that slot {slot} gets")
            self._claim_frame(slot // self._arena.slots_per_frame, "slots")
            self._states[slot] = state

    def _compress_states(self, state_compressions: Int32s) -> None:
        for slot, *pages in state_compressions.tolist():
            self._check_compressed(slot, pages)
            require(self._states[slot] != UNWRITTEN, f"L6: slot {slot} is compressed and holds no state")
            require((self._readers[pages] == 0).all(), f"L7: slot {slot} is compressed where a row reads")
            for index, page in enumerate(pages):
                self._claim_page(page)
                self._cells[page, 0] = self._states[slot]
                self._cells[page, 1:] = _piece(index)
            self._states[slot] = UNWRITTEN

    def _check_compressed(self, slot: int, pages: list[int]) -> None:
        require(0 <= slot < self._arena.slot_count, f"L4: slot {slot} is outside the arena")
        require(len(pages) == self._arena.compressed_pages > 0, f"a compressed state has {len(pages)} pages")
        require(all(0 <= page < self._arena.page_count for page in pages), "L4: compressed outside the arena")
        require(len(set(pages)) == len(pages), f"slot {slot}: a page twice in a compressed state")

    # ------------------------------------------------------------------ KV

    def _restore_kv(self, state_restores: Int32s, written: Int32s) -> None:
        """Row by row, as a device may. ``written``: pages that rows have since this step began."""
        for page, first, last, start in state_restores.tolist():
            self._check_record(page, first, last, start)
            readers = self._readers[page] - np.count_nonzero(written == page)
            require(readers == 0, f"L7: page {page} is restored where a row reads")
            record = self._at(first, start)
            rest = record if first == last else self._at(last, start - self._arena.page_bytes)
            require(record is not None and record == rest,
                    f"L5: pages {first} and {last} have no compressed KV that begins at byte {start}")
            assert record is not None
            self._claim_page(page)
            self._cells[page] = record

    def _at(self, page: int, start: int) -> Record | None:
        seals = set(self._cells[page].tolist())
        return self._sealed.get(seals.pop(), {}).get(start) if len(seals) == 1 else None

    def _compress_kv(self, state_compressions: Int32s) -> None:
        """What is put on a page is sealed when the last of it is: a row that reads a page that an earlier one
        has written finds no cells there."""
        put: dict[int, dict[int, Record]] = {}
        for page, first, last, start in state_compressions.tolist():
            self._check_record(page, first, last, start)
            require(page not in put, f"L5: page {page} is compressed, and was written before")
            require((self._readers[[page, first, last]] == 0).all(), f"L7: page {page} is compressed and read")
            record = tuple(self._cells[page].tolist())
            require(UNWRITTEN not in record, f"L6: page {page} is compressed and holds no KV")
            put.setdefault(first, {})[start] = record
            if first != last:
                put.setdefault(last, {})[start - self._arena.page_bytes] = record
        self._cells[state_compressions[:, 0]] = UNWRITTEN
        for page, records in put.items():
            self._seals += 1
            seal = digest(EMPTY ^ 0x5EA1, self._seals)
            self._claim_page(page)
            self._sealed[seal] = records
            self._cells[page] = seal
        if len(self._sealed) > 4 * self._arena.page_count:
            there = set(self._cells[:, 0].tolist())
            self._sealed = {seal: records for seal, records in self._sealed.items() if seal in there}

    def _check_record(self, page: int, first: int, last: int, start: int) -> None:
        size = self._arena.page_bytes
        require(self._arena.compressed_kv_bytes, "KV is compressed that is always kept exact")
        require(all(0 <= one < self._arena.page_count for one in (page, first, last)),
                "L4: KV is compressed outside the arena")
        require(0 <= start < size, f"a compressed page begins at byte {start} of a page of {size}")
        ends_there = start + self._arena.compressed_kv_bytes <= size
        require(ends_there == (first == last), f"a compressed page at byte {start} of {first} ends on {last}")

    def _claim_page(self, page: int) -> None:
        self._claim_frame(page // self._arena.pages_per_frame, "pages")


def _piece(index: int) -> int:
    return digest(EMPTY, index)
