"""Compressed KV and what is inexact behind it, on the dull device of ``cache_world``: bytes by their place.

A compressed page has shares: which bytes of it are which bytes of the record of whose cells. A record that is
put together must have all of its bytes, of the same cells. ``Rounded`` follows what has been in 8 bits
through copies and computation, so that marks in the tree can be compared with it: marked too much is a pity,
marked too little is a lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.memory.arena_work import CompressKv, RestoreKv
from weft.memory.frames.plan import ArenaPlan
from weft.memory.reservation import Reservation
from weft.units import PageId

Cells = dict[int, list[object]]


@dataclass(frozen=True)
class Share:
    """Bytes [first, end) of a page: those of a record from ``offset`` on, that was made of ``cells``."""

    first: int
    end: int
    offset: int
    cells: tuple[object, ...]


def compress_kv(plan: ArenaPlan, cells: Cells, compress: CompressKv) -> None:
    """In place, so everything is read first."""
    shares: list[list[object]] = [[] for _ in range(compress.compressed_count)]
    for number, page in enumerate(compress.pages):
        for at, share in _places(plan, number * plan.compressed_kv_bytes, tuple(cells[page])):
            shares[at].append(share)
    for page in compress.pages:
        del cells[page]
    cells.update(zip(compress.pages[: compress.compressed_count], shares, strict=True))


def _places(plan: ArenaPlan, start: int, cells: tuple[object, ...]) -> Iterable[tuple[int, Share]]:
    """Where the record from byte ``start`` on lies: the number of a page, and its share of that page."""
    size, done = plan.page_bytes, 0
    while done < plan.compressed_kv_bytes:
        at, first = divmod(start + done, size)
        end = min(size, first + plan.compressed_kv_bytes - done)
        yield at, Share(first, end, done, cells)
        done += end - first


def records_in(
    plan: ArenaPlan, cells: Cells, pages: Sequence[PageId], skip_bytes: int, count: int
) -> list[list[object]]:
    """The cells of the ``count`` records that ``pages`` have, all of their bytes and in order."""
    found = []
    for number in range(count):
        start = skip_bytes + number * plan.compressed_kv_bytes
        first, offset = divmod(start, plan.page_bytes)
        begun = [
            one for one in cells[pages[first]] if isinstance(one, Share) and (one.first, one.offset) == (offset, 0)
        ]
        assert begun, f"record {number} does not begin where it should"
        for at, share in _places(plan, start, begun[0].cells):
            assert share in cells[pages[at]], f"record {number} lacks what page {pages[at]} had of it"
        found.append(list(begun[0].cells))
    return found


def restore_kv(plan: ArenaPlan, cells: Cells, restore: RestoreKv) -> None:
    wide = records_in(plan, cells, restore.compressed, restore.skip_bytes, len(restore.pages))
    for page in restore.compressed:
        del cells[page]
    cells.update(zip(restore.pages, wide, strict=True))


@dataclass
class Rounded:
    """Pages and slots whose contents are not what an exact engine would have."""

    pages: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)

    def memory(self, reservation: Reservation) -> None:
        """What a step does before it computes."""
        self.slots.update(restore.slot for restore in reservation.arena_work.state_restores)
        for restored in reservation.arena_work.kv_restores:
            self.pages.update(restored.pages)
        work = reservation.arena_work
        for copies, rounded in ((work.page_copies, self.pages), (work.slot_copies, self.slots)):
            read = [(copy.dst, copy.src in rounded) for copy in copies]
            rounded.update(dst for dst, inexact in read if inexact)
            rounded.difference_update(dst for dst, inexact in read if not inexact)

    def compute(
        self, pages: Sequence[PageId], slot: int, taps: Iterable[int], start: int, end: int, page_tokens: int
    ) -> None:
        """A run of [start, end) reads what is before it, and writes the rest."""
        written = start // page_tokens
        reads = {*pages[: -(-start // page_tokens)]}
        inexact = start > 0 and (slot in self.slots or not reads.isdisjoint(self.pages))
        for at in range(written, -(-end // page_tokens)):
            if pages and inexact:
                self.pages.add(pages[at])
            elif pages and at * page_tokens >= start:
                self.pages.discard(pages[at])
        for one in (slot, *taps):
            (self.slots.add if inexact else self.slots.discard)(one)
