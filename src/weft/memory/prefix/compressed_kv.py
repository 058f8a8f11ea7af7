"""Compressed KV: the pages of a node of the prefix tree in 8 bits, some half of their bytes, in fewer pages.

    edge   pages  [ 17  4 90 33  8 51 | 12 60 ]            a node's KV is wide ...
                      |  state_compressions: into the first of its own pages, the others are free
    packed   pages  [ 17  4 90 ]                              ... or in a *packed*: a record for each page
             bytes  |r0 |r1 |r2 |r3 |r4 |r5 |...              side by side, on from page to page
    edge   pages  [ -9 -10 -11 -12 -13 -14 | 12 60 ]        the edge has names in place of them
                      ^ state_restores: a packed's own pages and some new ones, when somebody begins behind it

Most bytes of a cache are KV, and what nobody reads need not have its last bits. A page becomes a *record*
(``ArenaPlan.compressed_kv_bytes``: codes, and a scale for each token and head), and the records of a node are
packed without gaps, so a packed of a few pages wastes less than one. No third kind of frame: its bytes lie
in KV pages, like those of a compressed state, and compaction moves them.

**In place.** Record r lies in packed page r or one before it, so a node is compressed into its own first pages,
the first record first, and restored the last record first, each into a page that no record before it needs.
Compression takes no memory at all: it helps when there is none. Restoring takes only the pages that compression gave
up (and one more, where a fork has cut the packed in the middle of a page).

**What is compressed.** Nodes that no lease holds: ``idle`` has them, the longest unread first, put there by the
lease that left. A node that is held is wide: opening restores the way to the checkpoint (one copy, which all
who come later read), and publishing over a compressed node puts the wide pages of the sequence in its place,
which it has computed itself. A fork in the middle of a packed does that to the front part and cuts it off.

**When** is ``eviction``'s: after bare KV, before anything is lost; no more than is short. At most
KV_COMPRESS_BYTES_PER_STEP are read for it in a step (law L11), but one node is compressed however large it is.

*Names* count down from below PAD, and none is used twice: whoever would take one for a page is caught (L4),
and a draft that puts pages in place of some, for an opening or a publication, finds them by name.

Laws: L1 (a page of a packed is its node's; audited), L2 (a draft changes nothing here), L7 (nobody reads a
page that is compressed: it has no holds).

Rejected: compression into new pages (there are none when it is needed); parts of a node (a second way to cut an
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

from weft.memory.arena_work import CompressKv, KvForm, RestoreKv
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.tree import Node
from weft.memory.values import NodeId
from weft.units import PAD, PageId, ceil_div

Int32s = npt.NDArray[np.int32]

KV_COMPRESS_BYTES_PER_STEP = 1 << 30
"""Some 0.5 ms on a device that reads 3 TB a second."""










@dataclass(eq=False, slots=True)
class PackedPages:
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

    def wide_in(self, pages: Sequence[PageId], form: KvForm) -> tuple[PageId, ...]:
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


class PackedKv:
    """What is compressed, and what could be. With ``plan.compressed_kv_bytes`` 0 nothing ever is."""

    __slots__ = ("_last_name", "by_node", "idle", "page_bytes", "page_count", "record_bytes",
                 "record_count")

    def __init__(self, plan: ArenaPlan) -> None:
        self.record_bytes = plan.compressed_kv_bytes
        self.page_bytes = plan.page_bytes
        self.by_node: dict[NodeId, PackedPages] = {}
        self.idle: OrderedDict[NodeId, Node] = OrderedDict()
        """Nodes that nobody reads, but for tails, those left first in front; some are too short to compress."""
        self.page_count = 0
        """Pages that packed_kv lie in."""
        self.record_count = 0
        """Pages that they stand for."""
        self._last_name = PAD

    # ------------------------------------------------------------------ reading

    @property
    def form(self) -> KvForm:
        return KvForm(self.page_bytes, self.record_bytes)

    def pages_of(self, node: Node) -> int:
        """Pages that the KV of ``node`` lies in."""
        packed = self.by_node.get(node.id)
        return node.page_count if packed is None else len(packed.pages)

    def packed(self, node: Node) -> Node | None:
        """The node whose packed has the KV of ``node``: its own, or, where ``node`` was just cut off the
        front of it, the one below. None: it is wide."""
        if not node.edge.pages or node.edge.pages_between(node.start, node.start + 1)[0] > PAD:
            return None
        return node if node.id in self.by_node else node.edge.node_at(node.end)

    def kept(self, pages: int) -> int:
        """Pages of a packed that has the KV of so many."""
        return ceil_div(pages * self.record_bytes, self.page_bytes)

    def gain(self, node: Node) -> int:
        """Pages that compression ``node`` makes free: 0 where that is less than a quarter of them."""
        pages = node.page_count
        gain = pages - self.kept(pages)
        return gain if 4 * gain >= pages and node.id not in self.by_node and not node.holds else 0

    def state_compressions(self, nodes: Iterable[Node]) -> tuple[CompressKv, ...]:
        """What compression ``nodes`` is."""
        return tuple(CompressKv(node.id, tuple(node.pages), self.kept(node.page_count), self.form)
                     for node in nodes)

    def restore_pages(self, node: Node | None) -> int:
        """Pages that making the way to ``node`` wide takes. Nothing above a node that is read is compressed."""
        pages, at = 0, node
        while self.by_node and at is not None and not at.holds:
            packed = self.by_node.get(at.id)
            pages += packed.missing if packed is not None else 0
            at = at.parent
        return pages

    def compressed_on(self, node: Node | None) -> Iterator[tuple[Node, PackedPages]]:
        """The compressed nodes on the way to ``node``, from below."""
        at = node
        while self.by_node and at is not None and not at.holds:
            packed = self.by_node.get(at.id)
            if packed is not None:
                yield at, packed
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
        """CompressState ``node`` in its first ``kept`` pages. Returns the others."""
        assert not node.holds, f"node {node.id} is read and was compressed"
        assert node.id not in self.by_node, f"node {node.id} is compressed"
        pages = node.pages
        assert len(pages) > kept == self.kept(len(pages))
        name = self._last_name - 1
        self._last_name -= len(pages)
        self.by_node[node.id] = PackedPages(pages[:kept], 0, 0, name, len(pages))
        self.page_count += kept
        self.record_count += len(pages)
        node.edge.put(node.start, [PageId(name - at) for at in range(len(pages))])
        node.kv_inexact = True
        self.idle.pop(node.id, None)
        return pages[kept:]

    def leave(self, node: Node) -> list[PageId]:
        """What ``node`` has is compressed no more. Returns the pages it was in."""
        packed = self.by_node.pop(node.id)
        self.page_count -= len(packed.pages)
        self.record_count -= packed.count
        return packed.pages

    def cut_front(self, node: Node, count: int) -> list[PageId]:
        """The first ``count`` records of the packed of ``node`` are wide elsewhere. Returns the pages that
        have nothing else."""
        packed = self.by_node[node.id]
        assert count <= packed.count, f"{count} of {packed.count} records are cut off"
        if count == packed.count:
            return self.leave(node)
        end = packed.skip_bytes + count * self.record_bytes
        freed, packed.skip_bytes = packed.pages[:end // self.page_bytes], end % self.page_bytes
        del packed.pages[:len(freed)]
        packed.cut += len(freed)
        packed.name -= count
        packed.count -= count
        self.page_count -= len(freed)
        self.record_count -= count
        return freed


class KvGain(NamedTuple):
    """Compression ``node`` makes so many ``pages`` free."""

    node: NodeId
    pages: int


class KvCompression:
    """What one choice of evictions state_compressions: a reading of ``packed_kv``, and what it has chosen so far; None: of
    nothing."""

    __slots__ = ("_bytes_left", "_candidates", "_chosen", "_packed_kv")

    def __init__(self, packed_kv: PackedKv | None, *, state_compressions: bool = False) -> None:
        self._packed_kv = packed_kv
        self._chosen: set[NodeId] = set()
        self._bytes_left = KV_COMPRESS_BYTES_PER_STEP
        self._candidates = iter(packed_kv.idle.values() if packed_kv is not None and state_compressions else ())

    def compress_next(self, *spared: Container[NodeId]) -> KvGain | None:
        """The next one to compress that is in none of ``spared``; None: there is none, or this step has done
        enough."""
        packed_kv = self._packed_kv
        for node in self._candidates if packed_kv is not None and self._bytes_left > 0 else ():
            assert packed_kv is not None
            stays = node.bare or any(node.id in names for names in spared)
            gain = 0 if stays else packed_kv.gain(node)
            if gain:
                self._bytes_left -= node.page_count * packed_kv.page_bytes
                self._chosen.add(node.id)
                return KvGain(node.id, gain)
        return None

    def pages_of(self, node: Node) -> int:
        """Pages that it lies in."""
        return node.page_count if self._packed_kv is None else self._packed_kv.pages_of(node)

    def is_compressed(self, node: Node) -> bool:
        return self._packed_kv is not None and node.id in self._packed_kv.by_node

    def is_chosen(self, node: Node) -> bool:
        """It is compressed by this: so it stays until the next draft, as this step writes its pages."""
        return node.id in self._chosen


class Unpacking:
    """What one draft puts in place of names: ``pages`` by name. What is opened on is restored, once for all
    who open on it; what is published over gets the pages of the sequence (sharing.py), and so does what is
    wide, inexact and read by nobody: what a sequence has computed exactly stays exact."""

    __slots__ = ("_opened_on", "_packed_kv", "pages", "restored")

    def __init__(self, packed_kv: PackedKv) -> None:
        self._packed_kv = packed_kv
        self.pages: dict[int, PageId] = {}
        self._opened_on: set[NodeId] = set()
        self.restored: list[RestoreKv] = []

    def missing(self, node: Node) -> int | None:
        """Pages it takes to make the way to ``node`` wide; None: not in this draft, which publishes over the
        front of a packed on it and cuts it."""
        pages = 0
        for _, packed in self._packed_kv.compressed_on(node):
            if packed.name not in self.pages:
                pages += packed.missing
            elif packed.name - packed.count + 1 not in self.pages:
                return None
        return pages

    def restore(self, node: Node, take: Callable[[int], list[PageId]]) -> None:
        """Make the way to ``node`` wide, with pages from ``take``; ``missing`` was asked before."""
        at: Node | None = node
        while self._packed_kv.record_bytes and at is not None and not at.holds:
            self._opened_on.add(at.id)
            at = at.parent
        for compressed, packed in self._packed_kv.compressed_on(node):
            if packed.name in self.pages:
                continue
            pages = packed.wide_in(take(packed.missing), self._packed_kv.form)
            self.pages.update((packed.name - at, page) for at, page in enumerate(pages))
            self.restored.append(RestoreKv(compressed.id, tuple(packed.pages), packed.skip_bytes, pages,
                                           self._packed_kv.form))

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
