"""Compressed KV: the pages of a node in 8 or 4 bits, in fewer pages.

    edge     pages  [ 17  4 90 33  8 51 | 12 60 ]          a node's KV is exact ...
                      |  compress: into its own first pages, the others are free
             pages  [ 17  4 90 ]                            ... or compressed: one record for each page,
             bytes  |r0 |r1 |r2 |r3 |r4 |r5 |...            side by side, on from page to page
    edge     pages  [ -9 -10 -11 -12 -13 -14 | 12 60 ]      the edge has record ids in place of pages
                      ^ restore: into these pages and some new ones, for a sequence that resumes past it

KV that no sequence reads may be rounded. A page becomes a *record* of ``ArenaPlan.compressed_kv_bytes``: codes and
their scales. Records are stored in KV pages without gaps.

**In place.** Record r is in compressed page r or an earlier one. So a node is compressed into its own first pages, the
first record first. It is restored the last record first, each into a page that no earlier record needs. Compression
therefore takes no memory, and works when none is free.

**Scope.** Only nodes that no lease holds are compressed; the KV that a lease holds is always exact. An opening restores
the path to its snapshot once, for every later reader. A sequence that publishes over a compressed node gives the tree
its own exact pages instead. A fork inside compressed pages does this to their front and cuts it off. **When** is
decided in ``eviction``: after the eviction of bare KV and before that of snapshots, and for no more than is missing.

*Record ids* count down from below PAD and are never reused. Code that mistakes one for a page is caught (law L4), and a
transaction that replaces some by pages finds them by id.

Laws: L1 (a compressed page belongs to its node; audited), L2 (a transaction changes nothing here), L7
(compressed KV has no readers), L11 (KV_COMPRESS_BYTES_PER_STEP, but always one node).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.memory.arena_work import CompressKv, KvForm, RestoreKv
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.values import NodeId
from weft.units import PAD, PageId, ceil_div

KV_COMPRESS_BYTES_PER_STEP = 1 << 30
"""Most bytes of KV compressed by a step, some 0.5 ms on a device that reads 3 TB a second."""


@dataclass(eq=False, slots=True)
class CompressedPages:
    """The compressed pages of a node. ``pages[i]`` was number ``cut + i`` at the compression. ``count``
    records begin at byte ``skip_bytes``; the first has the id ``first_id``, the next one ``first_id - 1``."""

    pages: list[PageId]
    cut: int
    skip_bytes: int
    first_id: int
    count: int

    @property
    def missing(self) -> int:
        """The pages besides its own that a restore takes; one to spare after a cut in the middle of a page."""
        return max(0, self.count - len(self.pages) + (self.skip_bytes > 0))

    def restore_into(self, pages: Sequence[PageId], form: KvForm) -> tuple[PageId, ...]:
        """Return a page for each record, of its own and ``pages``, in an order that works from the last record to the
        first: no restore overwrites an earlier record. All of ``pages`` are used."""
        targets, free, left = [], deque(pages), list(self.pages)
        for record in reversed(range(self.count)):
            needed = ceil_div(self.skip_bytes + record * form.record_bytes, form.page_bytes) if record else 0
            free += reversed(left[needed:])
            del left[needed:]
            targets.append(free.popleft())
        return tuple(reversed(targets))

    def move(self, index: int, page: PageId) -> None:
        """Replace its page number ``index`` by ``page``, to which it moved."""
        self.pages[index - self.cut] = page


class CompressedKv:
    """The compressed pages, and those that may be compressed. With ``plan.compressed_kv_bytes`` 0, nothing ever is."""

    __slots__ = ("_last_id", "by_node", "idle", "page_bytes", "page_count", "record_bytes", "record_count")

    def __init__(self, plan: ArenaPlan) -> None:
        self.record_bytes = plan.compressed_kv_bytes
        self.page_bytes = plan.page_bytes
        self.by_node: dict[NodeId, CompressedPages] = {}
        self.idle: OrderedDict[NodeId, Node] = OrderedDict()
        """Nodes without readers, tails excepted, the longest unread first; some are too short to compress."""
        self.page_count = 0
        """Number of compressed pages."""
        self.record_count = 0
        """Number of pages of KV in them."""
        self._last_id = PAD

    # ------------------------------------------------------------------ reading

    @property
    def form(self) -> KvForm:
        return KvForm(self.page_bytes, self.record_bytes)

    def pages_of(self, node: Node) -> int:
        """Return the number of pages that the KV of ``node`` occupies."""
        compressed = self.by_node.get(node.id)
        return node.page_count if compressed is None else len(compressed.pages)

    def compressed_node(self, node: Node) -> Node | None:
        """Return the node whose compressed pages have the KV of ``node``: itself, or the one below if ``node`` was
        just cut off its front. None: the KV is not compressed."""
        if not node.edge.pages or node.edge.pages_between(node.start, node.start + 1)[0] > PAD:
            return None
        return node if node.id in self.by_node else node.edge.node_at(node.end)

    def compressed_count(self, pages: int) -> int:
        """Return the number of compressed pages for the KV of ``pages`` pages."""
        return ceil_div(pages * self.record_bytes, self.page_bytes)

    def gain(self, node: Node) -> int:
        """Return the number of pages that compressing ``node`` frees; 0 if that is less than a quarter of them."""
        pages = node.page_count
        gain = pages - self.compressed_count(pages)
        return gain if 4 * gain >= pages and node.id not in self.by_node and not node.holds else 0

    def compressions(self, nodes: Iterable[Node]) -> tuple[CompressKv, ...]:
        """Return the work of compressing ``nodes``."""
        return tuple(
            CompressKv(node.id, tuple(node.pages), self.compressed_count(node.page_count), self.form) for node in nodes
        )

    def restore_pages(self, node: Node | None) -> int:
        """Return the number of pages that restoring the path to ``node`` takes. Nothing above a node with readers is
        compressed."""
        pages, ancestor = 0, node
        while self.by_node and ancestor is not None and not ancestor.holds:
            compressed = self.by_node.get(ancestor.id)
            pages += compressed.missing if compressed is not None else 0
            ancestor = ancestor.parent
        return pages

    def compressed_on_path(self, node: Node | None) -> Iterator[tuple[Node, CompressedPages]]:
        """Yield the compressed nodes on the path to ``node``, from below."""
        ancestor = node
        while self.by_node and ancestor is not None and not ancestor.holds:
            compressed = self.by_node.get(ancestor.id)
            if compressed is not None:
                yield ancestor, compressed
            ancestor = ancestor.parent

    # ------------------------------------------------------------------ writing, by a commit

    def stop_reading(self, node: Node) -> None:
        """Note that a lease no longer reads ``node`` and the nodes above it. Those with other readers still have
        holds."""
        ancestor: Node | None = node
        while self.record_bytes and ancestor is not None and ancestor.parent is not None and not ancestor.holds:
            self.idle[ancestor.id] = ancestor
            self.idle.move_to_end(ancestor.id)
            ancestor = ancestor.parent

    def start_reading(self, node: Node) -> None:
        """Note that a lease is about to hold ``node``."""
        ancestor: Node | None = node
        while self.record_bytes and ancestor is not None and not ancestor.holds:
            self.idle.pop(ancestor.id, None)
            ancestor = ancestor.parent

    def forget(self, node: Node) -> None:
        """Forget ``node``, which was removed."""
        self.idle.pop(node.id, None)

    def enter(self, node: Node, compressed_count: int) -> list[PageId]:
        """Enter ``node``, compressed into its first ``compressed_count`` pages. Return the others."""
        assert not node.holds, f"node {node.id} is read and was compressed"
        assert node.id not in self.by_node, f"node {node.id} is compressed"
        pages = node.pages
        assert len(pages) > compressed_count == self.compressed_count(len(pages))
        first_id = self._last_id - 1
        self._last_id -= len(pages)
        self.by_node[node.id] = CompressedPages(pages[:compressed_count], 0, 0, first_id, len(pages))
        self.page_count += compressed_count
        self.record_count += len(pages)
        node.edge.set_pages(node.start, [PageId(first_id - index) for index in range(len(pages))])
        node.kv_inexact = True
        self.idle.pop(node.id, None)
        return pages[compressed_count:]

    def leave(self, node: Node) -> list[PageId]:
        """Forget the compression of ``node``. Return its compressed pages."""
        compressed = self.by_node.pop(node.id)
        self.page_count -= len(compressed.pages)
        self.record_count -= compressed.count
        return compressed.pages

    def cut_front(self, node: Node, count: int) -> list[PageId]:
        """Cut off the first ``count`` records of ``node``, which are restored elsewhere. Returns the compressed pages
        that hold nothing else."""
        compressed = self.by_node[node.id]
        assert count <= compressed.count, f"{count} of {compressed.count} records are cut off"
        if count == compressed.count:
            return self.leave(node)
        end = compressed.skip_bytes + count * self.record_bytes
        freed, compressed.skip_bytes = compressed.pages[: end // self.page_bytes], end % self.page_bytes
        del compressed.pages[: len(freed)]
        compressed.cut += len(freed)
        compressed.first_id -= count
        compressed.count -= count
        self.page_count -= len(freed)
        self.record_count -= count
        return freed


class KvGain(NamedTuple):
    """A compression of ``node`` that frees ``pages`` pages."""

    node: NodeId
    pages: int


class KvCompression:
    """The KV that one choice of evictions compresses: a reading of ``compressed_kv`` and the choice so far.
    ``compressed_kv`` None, or ``enabled`` False: it compresses nothing."""

    __slots__ = ("_bytes_left", "_candidates", "_kv", "chosen")

    def __init__(self, compressed_kv: CompressedKv | None, *, enabled: bool = False) -> None:
        self._kv = compressed_kv
        self.chosen: set[NodeId] = set()
        self._bytes_left = KV_COMPRESS_BYTES_PER_STEP
        self._candidates = iter(compressed_kv.idle.values() if compressed_kv is not None and enabled else ())

    def compress_next(self, *spared: Container[NodeId]) -> KvGain | None:
        """Return the next node to compress that is in none of ``spared``. None: no node is left, or this step has
        done enough."""
        kv = self._kv
        for node in self._candidates if kv is not None and self._bytes_left > 0 else ():
            assert kv is not None
            stays = node.bare or any(node.id in ids for ids in spared)
            gain = 0 if stays else kv.gain(node)
            if gain:
                self._bytes_left -= node.page_count * kv.page_bytes
                self.chosen.add(node.id)
                return KvGain(node.id, gain)
        return None

    def pages_of(self, node: Node) -> int:
        """Return the number of pages that the KV of ``node`` occupies."""
        return node.page_count if self._kv is None else self._kv.pages_of(node)

    def is_compressed(self, node: Node) -> bool:
        return self._kv is not None and node.id in self._kv.by_node


class Restoring:
    """The pages by which one transaction replaces record ids, by id.

    An opening restores the KV that it needs, once for all openings of the transaction. A publication over compressed KV
    gives its own pages (sharing.py). So does a publication over inexact KV without readers: exactly computed KV of a
    sequence stays exact."""

    __slots__ = ("_kv", "_opened_on", "pages", "restored")

    def __init__(self, compressed_kv: CompressedKv) -> None:
        self._kv = compressed_kv
        self.pages: dict[int, PageId] = {}
        self._opened_on: set[NodeId] = set()
        self.restored: list[RestoreKv] = []

    def missing(self, node: Node) -> int | None:
        """Return the number of pages that restoring the path to ``node`` takes. None: impossible in this transaction,
        because it publishes over the front of compressed pages on the path and cuts them."""
        pages = 0
        for _, compressed in self._kv.compressed_on_path(node):
            if compressed.first_id not in self.pages:
                pages += compressed.missing
            elif compressed.first_id - compressed.count + 1 not in self.pages:
                return None
        return pages

    def restore(self, node: Node, take: Callable[[int], list[PageId]]) -> None:
        """Restore the path to ``node`` with pages from ``take``; the caller has asked ``missing``."""
        ancestor: Node | None = node
        while self._kv.record_bytes and ancestor is not None and not ancestor.holds:
            self._opened_on.add(ancestor.id)
            ancestor = ancestor.parent
        for ancestor, compressed in self._kv.compressed_on_path(node):
            if compressed.first_id in self.pages:
                continue
            pages = compressed.restore_into(take(compressed.missing), self._kv.form)
            self.pages.update((compressed.first_id - index, page) for index, page in enumerate(pages))
            self.restored.append(
                RestoreKv(ancestor.id, tuple(compressed.pages), compressed.skip_bytes, pages, self._kv.form)
            )

    def replace_inexact(self, node: Node, pages: list[PageId], own: list[PageId]) -> None:
        """Replace the ``pages`` of ``node`` by ``own`` pages of an exact sequence that publishes over it."""
        if node.kv_inexact and not node.holds and node.id not in self._opened_on:
            for page, mine in zip(pages, own, strict=True):
                self.pages.setdefault(page, mine)

    def resolve_over(self, pages: list[PageId], own: list[PageId]) -> list[PageId]:
        """Return ``pages`` with a page instead of each record id: that of ``own`` if it has none yet."""
        return [
            self.pages.get(page, page) if page > PAD else self.pages.setdefault(page, mine)
            for page, mine in zip(pages, own, strict=True)
        ]

    def resolve(self, pages: list[PageId]) -> list[PageId]:
        """Return ``pages`` with a page instead of each record id; this transaction has one for each."""
        return [self.pages.get(page, page) if page > PAD else self.pages[page] for page in pages]
