"""Parked KV: the pages of a node of the prefix tree in 8 bits, some half of their bytes, in fewer pages.

    edge   pages  [ 17  4 90 33  8 51 | 12 60 ]            a node's KV is wide ...
                      |  parks: into the first of its own pages, the others are free
    parcel   pages  [ 17  4 90 ]                              ... or in a *parcel*: a record for each page
             bytes  |r0 |r1 |r2 |r3 |r4 |r5 |...              side by side, on from page to page
    edge   pages  [ -9 -10 -11 -12 -13 -14 | 12 60 ]        the edge has names in place of them
                      ^ restores: a parcel's own pages and some new ones, when somebody begins behind it

Most bytes of a cache are KV, and what nobody reads need not have its last bits. A page becomes a *record*
(``ArenaPlan.parked_kv_bytes``: codes, and a scale for each token and head), and the records of a node are
packed without gaps, so a parcel of a few pages wastes less than one. No third kind of frame: its bytes lie
in KV pages, like those of a parked state, and compaction moves them.

**In place.** Record r lies in parcel page r or one before it, so a node is parked into its own first pages,
the first record first, and restored the last record first, each into a page that no record before it needs.
Parking takes no memory at all: it helps when there is none. Restoring takes only the pages that parking gave
up (and one more, where a fork has cut the parcel in the middle of a page).

**What is parked.** Nodes that no lease holds: ``idle`` has them, the longest unread first, put there by the
lease that left. A node that is held is wide: opening restores the way to the checkpoint (one copy, which all
who come later read), and publishing over a parked node puts the wide pages of the sequence in its place,
which it has computed itself. A fork in the middle of a parcel does that to the front part and cuts it off.

**When** is ``eviction``'s: after bare KV, before anything is lost; no more than is short. At most
KV_PARK_BYTES_PER_STEP are read for it in a step (law L11), but one node is parked however large it is.

*Names* count down from below PAD, and none is used twice: whoever would take one for a page is caught (L4),
and a draft that puts pages in place of some, for an opening or a publication, finds them by name.

Laws: L1 (a page of a parcel is its node's; audited), L2 (a draft changes nothing here), L7 (nobody reads a
page that is parked: it has no holds).

Rejected: parking into new pages (there are none when it is needed); parts of a node (a second way to cut an
edge; a fork cuts one where it has to); leases that get a wide copy of their own (each pays for the same
bytes, and they publish over what they came from); scales by channel (12 to 25 % more bytes a page, and the
numbers of ``--kv-dtype int8`` are known to do).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.tree import Node, NodeId
from weft.units import PAD, PageId, ceil_div

Int32s = npt.NDArray[np.int32]

KV_PARK_BYTES_PER_STEP = 1 << 30
"""Some 0.5 ms on a device that reads 3 TB a second."""


class Form(NamedTuple):
    """Bytes of a page, wide and parked."""

    page_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class KvPark:
    """Before anything is computed, the KV of ``node`` in ``pages`` goes, in 8 bits, to the first ``kept`` of
    them; the others are free from the next draft on."""

    node: NodeId
    pages: tuple[PageId, ...]
    kept: int
    form: Form

    @property
    def rows(self) -> Int32s:
        """[records, 4] in the order in which they can go, all in place: a page, the two pages that its record
        lies on (or one, twice), and where it begins on the first, in bytes."""
        return _rows(self.pages, self.pages[:self.kept], 0, self.form)


@dataclass(frozen=True, slots=True)
class KvRestore:
    """Before anything is computed, the parked KV of ``node``, which begins at byte ``skip_bytes`` of
    ``parked``, goes to ``pages``, its own from then on: most of ``parked``, and new ones. What it leaves of
    ``parked`` is free from the next draft on."""

    node: NodeId
    parked: tuple[PageId, ...]
    skip_bytes: int
    pages: tuple[PageId, ...]
    form: Form

    @property
    def rows(self) -> Int32s:
        """As those of ``KvPark``, the last record first."""
        return _rows(self.pages, self.parked, self.skip_bytes, self.form)[::-1]


def _rows(pages: Sequence[PageId], parked: Sequence[PageId], skip_bytes: int, form: Form) -> Int32s:
    start = skip_bytes + np.arange(len(pages), dtype=np.int64) * form.record_bytes
    lies_on = np.asarray(parked, dtype=np.int64)
    first, last = start // form.page_bytes, (start + form.record_bytes - 1) // form.page_bytes
    columns = (np.asarray(pages, dtype=np.int64), lies_on[first], lies_on[last], start % form.page_bytes)
    return np.stack(columns, axis=1).astype(np.int32)


@dataclass(eq=False, slots=True)
class Parcel:
    """``pages[i]`` is number ``cut + i`` of those it had at first; its first record begins at ``skip_bytes``
    of them and has the name ``name``, the next one ``name - 1``; ``count`` records."""

    pages: list[PageId]
    cut: int
    skip_bytes: int
    name: int
    count: int

    @property
    def missing(self) -> int:
        """Pages besides its own that making it wide takes: one to spare where it was cut in the middle of a
        page."""
        return max(0, self.count - len(self.pages) + (self.skip_bytes > 0))

    def wide_in(self, pages: Sequence[PageId], form: Form) -> tuple[PageId, ...]:
        """A page for each record, of its own and ``pages``, such that the last record can go first, then the
        one before it, and none is written over. All of ``pages`` are used."""
        wide, free, left = [], deque(pages), list(self.pages)
        for record in reversed(range(self.count)):
            needed = ceil_div(self.skip_bytes + record * form.record_bytes, form.page_bytes) if record else 0
            free += reversed(left[needed:])
            del left[needed:]
            wide.append(free.popleft())
        return tuple(reversed(wide))

    def move(self, index: int, page: PageId) -> None:
        """Its page number ``index`` is ``page`` now."""
        self.pages[index - self.cut] = page


class Parcels:
    """What is parked, and what could be. With ``plan.parked_kv_bytes`` 0 nothing ever is."""

    __slots__ = ("_last_name", "by_node", "idle", "page_bytes", "page_count", "record_bytes",
                 "record_count")

    def __init__(self, plan: ArenaPlan) -> None:
        self.record_bytes = plan.parked_kv_bytes
        self.page_bytes = plan.page_bytes
        self.by_node: dict[NodeId, Parcel] = {}
        self.idle: OrderedDict[NodeId, Node] = OrderedDict()
        """Nodes that nobody reads, but for tails, those left first in front; some are too short to park."""
        self.page_count = 0
        """Pages that parcels lie in."""
        self.record_count = 0
        """Pages that they stand for."""
        self._last_name = PAD

    # ------------------------------------------------------------------ reading

    @property
    def form(self) -> Form:
        return Form(self.page_bytes, self.record_bytes)

    def pages_of(self, node: Node) -> int:
        """Pages that the KV of ``node`` lies in."""
        parcel = self.by_node.get(node.id)
        return node.page_count if parcel is None else len(parcel.pages)

    def packed(self, node: Node) -> Node | None:
        """The node whose parcel has the KV of ``node``: its own, or, where ``node`` was just cut off the
        front of it, the one below. None: it is wide."""
        if not node.edge.pages or node.edge.pages_between(node.start, node.start + 1)[0] > PAD:
            return None
        return node if node.id in self.by_node else node.edge.node_at(node.end)

    def kept(self, pages: int) -> int:
        """Pages of a parcel that has the KV of so many."""
        return ceil_div(pages * self.record_bytes, self.page_bytes)

    def gain(self, node: Node) -> int:
        """Pages that parking ``node`` makes free: 0 where that is less than a quarter of them."""
        pages = node.page_count
        gain = pages - self.kept(pages)
        return gain if 4 * gain >= pages and node.id not in self.by_node and not node.holds else 0

    def parks(self, nodes: Iterable[Node]) -> tuple[KvPark, ...]:
        """What parking ``nodes`` is."""
        return tuple(KvPark(node.id, tuple(node.pages), self.kept(node.page_count), self.form)
                     for node in nodes)

    def restore_pages(self, node: Node | None) -> int:
        """Pages that making the way to ``node`` wide takes. Nothing above a node that is read is parked."""
        pages, at = 0, node
        while self.by_node and at is not None and not at.holds:
            parcel = self.by_node.get(at.id)
            pages += parcel.missing if parcel is not None else 0
            at = at.parent
        return pages

    def parked_on(self, node: Node | None) -> Iterator[tuple[Node, Parcel]]:
        """The parked nodes on the way to ``node``, from below."""
        at = node
        while self.by_node and at is not None and not at.holds:
            parcel = self.by_node.get(at.id)
            if parcel is not None:
                yield at, parcel
            at = at.parent

    # ------------------------------------------------------------------ writing, by a commit

    def left(self, node: Node) -> None:
        """A lease does not read ``node`` any more, nor what is above it: who else does has holds."""
        at: Node | None = node
        while self.record_bytes and at is not None and at.parent is not None and not at.holds:
            self.idle[at.id] = at
            self.idle.move_to_end(at.id)
            at = at.parent

    def read(self, node: Node) -> None:
        """A lease is about to hold ``node``."""
        at: Node | None = node
        while self.record_bytes and at is not None and not at.holds:
            self.idle.pop(at.id, None)
            at = at.parent

    def forget(self, node: Node) -> None:
        """``node`` is gone."""
        self.idle.pop(node.id, None)

    def enter(self, node: Node, kept: int) -> list[PageId]:
        """Park ``node`` in its first ``kept`` pages. Returns the others."""
        assert not node.holds, f"node {node.id} is read and was parked"
        assert node.id not in self.by_node, f"node {node.id} is parked"
        pages = node.pages
        assert len(pages) > kept == self.kept(len(pages))
        name = self._last_name - 1
        self._last_name -= len(pages)
        self.by_node[node.id] = Parcel(pages[:kept], 0, 0, name, len(pages))
        self.page_count += kept
        self.record_count += len(pages)
        node.edge.put(node.start, [PageId(name - at) for at in range(len(pages))])
        node.kv_inexact = True
        self.idle.pop(node.id, None)
        return pages[kept:]

    def leave(self, node: Node) -> list[PageId]:
        """What ``node`` has is parked no more. Returns the pages it was in."""
        parcel = self.by_node.pop(node.id)
        self.page_count -= len(parcel.pages)
        self.record_count -= parcel.count
        return parcel.pages

    def cut_front(self, node: Node, count: int) -> list[PageId]:
        """The first ``count`` records of the parcel of ``node`` are wide elsewhere. Returns the pages that
        have nothing else."""
        parcel = self.by_node[node.id]
        assert count <= parcel.count, f"{count} of {parcel.count} records are cut off"
        if count == parcel.count:
            return self.leave(node)
        end = parcel.skip_bytes + count * self.record_bytes
        freed, parcel.skip_bytes = parcel.pages[:end // self.page_bytes], end % self.page_bytes
        del parcel.pages[:len(freed)]
        parcel.cut += len(freed)
        parcel.name -= count
        parcel.count -= count
        self.page_count -= len(freed)
        self.record_count -= count
        return freed


class KvGain(NamedTuple):
    """Parking ``node`` makes so many ``pages`` free."""

    node: NodeId
    pages: int


class KvParking:
    """What one choice of evictions parks: a reading of ``parcels``, and what it has chosen so far; None: of
    nothing."""

    __slots__ = ("_bytes_left", "_candidates", "_chosen", "_parcels")

    def __init__(self, parcels: Parcels | None, *, parks: bool = False) -> None:
        self._parcels = parcels
        self._chosen: set[NodeId] = set()
        self._bytes_left = KV_PARK_BYTES_PER_STEP
        self._candidates = iter(parcels.idle.values() if parcels is not None and parks else ())

    def park_next(self, *spared: Container[NodeId]) -> KvGain | None:
        """The next one to park that is in none of ``spared``; None: there is none, or this step has done
        enough."""
        parcels = self._parcels
        for node in self._candidates if parcels is not None and self._bytes_left > 0 else ():
            assert parcels is not None
            stays = node.bare or any(node.id in names for names in spared)
            gain = 0 if stays else parcels.gain(node)
            if gain:
                self._bytes_left -= node.page_count * parcels.page_bytes
                self._chosen.add(node.id)
                return KvGain(node.id, gain)
        return None

    def pages_of(self, node: Node) -> int:
        """Pages that it lies in."""
        return node.page_count if self._parcels is None else self._parcels.pages_of(node)

    def is_parked(self, node: Node) -> bool:
        return self._parcels is not None and node.id in self._parcels.by_node

    def is_chosen(self, node: Node) -> bool:
        """It is parked by this: so it stays until the next draft, as this step writes its pages."""
        return node.id in self._chosen


class Widening:
    """What one draft puts in place of names: ``pages`` by name. What is opened on is restored, once for all
    who open on it; what is published over gets the pages of the sequence (sharing.py), and so does what is
    wide, inexact and read by nobody: what a sequence has computed exactly stays exact."""

    __slots__ = ("_opened_on", "_parcels", "pages", "restored")

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self.pages: dict[int, PageId] = {}
        self._opened_on: set[NodeId] = set()
        self.restored: list[KvRestore] = []

    def missing(self, node: Node) -> int | None:
        """Pages it takes to make the way to ``node`` wide; None: not in this draft, which publishes over the
        front of a parcel on it and cuts it."""
        pages = 0
        for _, parcel in self._parcels.parked_on(node):
            if parcel.name not in self.pages:
                pages += parcel.missing
            elif parcel.name - parcel.count + 1 not in self.pages:
                return None
        return pages

    def restore(self, node: Node, take: Callable[[int], list[PageId]]) -> None:
        """Make the way to ``node`` wide, with pages from ``take``; ``missing`` was asked before."""
        at: Node | None = node
        while self._parcels.record_bytes and at is not None and not at.holds:
            self._opened_on.add(at.id)
            at = at.parent
        for parked, parcel in self._parcels.parked_on(node):
            if parcel.name in self.pages:
                continue
            pages = parcel.wide_in(take(parcel.missing), self._parcels.form)
            self.pages.update((parcel.name - at, page) for at, page in enumerate(pages))
            self.restored.append(KvRestore(parked.id, tuple(parcel.pages), parcel.skip_bytes, pages,
                                           self._parcels.form))

    def renew(self, node: Node, pages: list[PageId], own: list[PageId]) -> None:
        """``node`` is published over by a sequence that is exact and has ``own`` for its ``pages``."""
        if node.kv_inexact and not node.holds and node.id not in self._opened_on:
            for page, mine in zip(pages, own, strict=True):
                self.pages.setdefault(page, mine)

    def over(self, names: list[PageId], own: list[PageId]) -> list[PageId]:
        """``names``, most of which are pages, with those in place of them: one of ``own`` where a name has
        none yet."""
        return [self.pages.get(page, page) if page > PAD else self.pages.setdefault(page, mine)
                for page, mine in zip(names, own, strict=True)]

    def wide(self, names: list[PageId]) -> list[PageId]:
        """Pages in place of ``names``, all of which have one or are one."""
        return [self.pages.get(page, page) if page > PAD else self.pages[page] for page in names]
