"""Compressed contents on the scripted device: pages whose cells are not KV.

    a piece of a compressed state    [ state | piece number, piece number ... ]
    a page of compressed KV          [ seal, seal ...                         ]   seal -> the records on it

A page of compressed KV holds parts of several records. All cells of the page hold a *seal*, and a table maps the seal
to these records. The seal moves with the page, and any other write to the page removes it. A record is read back only
if the same compression wrote both of its pages.

Sources are checked as on a device that runs row by row. A compressed state or page that is put together from
other pages, or in another order, raises PlanViolation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.digests import EMPTY, UNWRITTEN, Digests, digest, require
from weft.memory.frames.plan import ArenaPlan
from weft.schedule.plan import Int32s
from weft.units import PAGE_TOKENS

ClaimFrame = Callable[[int, str], None]
Record = tuple[int, ...]
"""The cells of a page of KV."""


class CompressedDigests:
    """Compressed contents over the device's ``cells``, ``states`` and ``readers``. ``claim_frame(frame, kind)`` notes
    the kind for which a frame is used. Raises PlanViolation. The forms of ``ids`` are those of ``WorkKind``."""

    def __init__(
        self, arena: ArenaPlan, cells: Digests, states: Digests, readers: Int32s, claim_frame: ClaimFrame
    ) -> None:
        self._arena = arena
        self._cells = cells
        self._states = states
        self._readers = readers
        self._claim_frame = claim_frame
        self._sealed: dict[int, dict[int, Record]] = {}
        """Records of each seal, by the byte of the page where they begin; negative if they begin on the page before."""
        self._seals = 0

    # ------------------------------------------------------------------ states

    def restore_states(self, ids: Int32s) -> None:
        for slot, *pages in ids.tolist():
            self._check_state(slot, pages)
            state = self._cells[pages[0], 0]
            for index, page in enumerate(pages):
                require(
                    state != UNWRITTEN
                    and self._cells[page, 0] == state
                    and self._cells[page, 1:].tolist() == [_piece(index)] * (PAGE_TOKENS - 1),
                    f"L5: page {page} is not piece {index} of the compressed state that slot {slot} gets",
                )
            self._claim_frame(slot // self._arena.slots_per_frame, "slots")
            self._states[slot] = state

    def compress_states(self, ids: Int32s) -> None:
        for slot, *pages in ids.tolist():
            self._check_state(slot, pages)
            require(self._states[slot] != UNWRITTEN, f"L6: slot {slot} is compressed and holds no state")
            require((self._readers[pages] == 0).all(), f"L7: slot {slot} is compressed where a row reads")
            for index, page in enumerate(pages):
                self._claim_page(page)
                self._cells[page, 0] = self._states[slot]
                self._cells[page, 1:] = _piece(index)
            self._states[slot] = UNWRITTEN

    def _check_state(self, slot: int, pages: list[int]) -> None:
        require(0 <= slot < self._arena.slot_count, f"L4: slot {slot} is outside the arena")
        require(len(pages) == self._arena.compressed_pages > 0, f"a compressed state has {len(pages)} pages")
        require(all(0 <= page < self._arena.page_count for page in pages), "L4: compressed outside the arena")
        require(len(set(pages)) == len(pages), f"slot {slot}: a page twice in a compressed state")

    # ------------------------------------------------------------------ KV

    def restore_kv(self, ids: Int32s, table_pages: Int32s) -> None:
        """Restore row by row, as a device may. ``table_pages``: pages that this step has written into tables."""
        for page, first, last, start in ids.tolist():
            self._check_record(page, first, last, start)
            readers = self._readers[page] - np.count_nonzero(table_pages == page)
            require(readers == 0, f"L7: page {page} is restored where a row reads")
            record = self._record_at(first, start)
            rest = record if first == last else self._record_at(last, start - self._arena.page_bytes)
            require(
                record is not None and record == rest,
                f"L5: pages {first} and {last} have no compressed KV that begins at byte {start}",
            )
            assert record is not None
            self._claim_page(page)
            self._cells[page] = record

    def _record_at(self, page: int, start: int) -> Record | None:
        seals = set(self._cells[page].tolist())
        return self._sealed.get(seals.pop(), {}).get(start) if len(seals) == 1 else None

    def compress_kv(self, ids: Int32s) -> None:
        """Compress row by row, and seal a page once its last record is on it. So a row that reads a page after an
        earlier row has written to it finds no cells and fails."""
        compressed: dict[int, dict[int, Record]] = {}
        for page, first, last, start in ids.tolist():
            self._check_record(page, first, last, start)
            require(page not in compressed, f"L5: page {page} is compressed after it was overwritten")
            unread = (self._readers[[page, first, last]] == 0).all()
            require(unread, f"L7: page {page} is compressed and read")
            record = tuple(self._cells[page].tolist())
            require(UNWRITTEN not in record, f"L6: page {page} is compressed and holds no KV")
            compressed.setdefault(first, {})[start] = record
            if first != last:
                compressed.setdefault(last, {})[start - self._arena.page_bytes] = record
        self._cells[ids[:, 0]] = UNWRITTEN
        for page, records in compressed.items():
            self._seals += 1
            seal = digest(EMPTY ^ 0x5EA1, self._seals)
            self._claim_page(page)
            self._sealed[seal] = records
            self._cells[page] = seal
        if len(self._sealed) > 4 * self._arena.page_count:
            seals = set(self._cells[:, 0].tolist())
            self._sealed = {seal: records for seal, records in self._sealed.items() if seal in seals}

    def _check_record(self, page: int, first: int, last: int, start: int) -> None:
        size = self._arena.page_bytes
        require(self._arena.compressed_kv_bytes, "KV is compressed in a memory that keeps it exact")
        require(
            all(0 <= one < self._arena.page_count for one in (page, first, last)),
            "L4: KV is compressed outside the arena",
        )
        require(0 <= start < size, f"a compressed page begins at byte {start} of a page of {size}")
        on_one_page = start + self._arena.compressed_kv_bytes <= size
        require(on_one_page == (first == last), f"a compressed page at byte {start} of {first} ends on {last}")

    def _claim_page(self, page: int) -> None:
        self._claim_frame(page // self._arena.pages_per_frame, "pages")


def _piece(index: int) -> int:
    return digest(EMPTY, index)
