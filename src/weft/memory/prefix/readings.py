"""Readings of the prefix cache: the contents of a snapshot for a store, and the shape of the tree for an operator.

    contents   root --[ pages 3 9 4 )--[ compressed 7 2 )o slot 5       tokens [0, position)
                                                                    rows   3 9 4 exact | 7 2 in 8 bits
                                                                    state  slot 5
    shape      salts, depths, lengths, and the places at which requests part or resume

**Contents.** Pages and slot are those of memory's state at this version. A caller names them in the plan of the same
version, and reads the contents again for the next plan. Codes of compressed KV are consecutive in its compressed pages,
from byte ``skip_bytes`` of the first page on.

**Shape.** Salts have numbers, the biggest salt first, because a salt is a tenant's secret. ``digest`` is a hash of the
tokens of a prefix, ``head`` the tokens with which the place begins to differ from its siblings. Both stay in the
server, which drops the head unless its operator asks for text. *Hits* of a prefix include those of all nodes below. The
shape takes one walk over at most NODES_MAX nodes, on request, never in a step (law L11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.edge import COMPRESSED, Node, path_pages
from weft.memory.prefix.tree import salt_of
from weft.memory.usage import CacheShape, PrefixShape, SaltShape, ShapeSum, SizeClass
from weft.memory.values import NO_SLOT, NodeId
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS, PageId, SlotId


class KvPart(NamedTuple):
    """KV of tokens [``start``, ``end``) in ``row_count`` pages. ``compressed``: codes, from ``skip_bytes`` of
    the first page on."""

    start: int
    end: int
    row_count: int
    compressed: bool = False
    skip_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotContents:
    """A snapshot's contents. ``tokens``: int32 [position]. ``pages``: those of all ``parts``, the KV of [``start``,
    position), and then those of a compressed state. ``slot``: NO_SLOT in a model without recurrent layers, COMPRESSED
    for a compressed state. ``exact``: no part of it was ever compressed. ``above``: the position of the next snapshot
    above, 0 without one. ``hits``: sequences that resumed at it."""

    node: NodeId
    salt: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    start: int
    pages: tuple[PageId, ...] = field(repr=False)
    parts: tuple[KvPart, ...]
    slot: SlotId
    exact: bool
    above: int
    hits: int

    @property
    def position(self) -> int:
        return int(self.tokens.size)

    @property
    def has_compressed(self) -> bool:
        return self.slot == COMPRESSED or any(part.compressed for part in self.parts)

    @property
    def form(self) -> tuple[object, ...]:
        """The parts that must not change while pages are copied over several steps."""
        return self.position, self.parts, self.slot == COMPRESSED


def snapshot_contents(cache: PrefixCache, name: NodeId, start: int = 0) -> SnapshotContents | None:
    """Return the snapshot of the node ``name``, with its pages from position ``start`` on, a multiple of a page.
    None if the node or its snapshot is gone."""
    node = cache.tree.by_id.get(name)
    if node is None or node.parent is None or (cache.stateful and node.slot == PAD):
        return None
    parts, pages = _parts(cache, node, start)
    exact, above = not (cache.stateful and node.state_inexact), 0
    ancestor: Node | None = node
    while ancestor is not None:
        exact &= not ancestor.kv_inexact
        ancestor = ancestor.parent
        if ancestor is not None and ancestor.slot != PAD and not above:
            above = ancestor.end
    slot, salt = node.slot if cache.stateful else NO_SLOT, salt_of(cache.tree, node)
    if slot == COMPRESSED:
        pages += cache.compressed_states.pages[node.id]
    return SnapshotContents(
        node.id, salt, _tokens(node), start, tuple(pages), tuple(parts), slot, exact, above, node.hits
    )


def _parts(cache: PrefixCache, node: Node, start: int) -> tuple[list[KvPart], list[PageId]]:
    if not cache.tree.paged or start >= node.end:
        return [KvPart(start, node.end, 0)], []
    if not cache.compressed_kv.by_node:
        pages = _pages(node, start)
        return [KvPart(start, node.end, len(pages))], pages
    pieces: list[tuple[KvPart, list[PageId]]] = []
    ancestor: Node | None = node
    while ancestor is not None and ancestor.parent is not None and ancestor.end > start:
        pieces.append(_part(cache, ancestor, max(start, ancestor.start)))
        ancestor = ancestor.parent
    parts: list[KvPart] = []
    for part, _ in reversed(pieces):
        before = parts[-1] if parts else None
        if before is not None and not before.compressed and not part.compressed:
            parts[-1] = KvPart(before.start, part.end, before.row_count + part.row_count)
        else:
            parts.append(part)
    return parts, [page for _, pages in reversed(pieces) for page in pages]


def _part(cache: PrefixCache, node: Node, start: int) -> tuple[KvPart, list[PageId]]:
    """Return the KV of one node from ``start`` on."""
    compressed = cache.compressed_kv.by_node.get(node.id)
    if compressed is None:
        pages = node.pages[(start - node.start) // PAGE_TOKENS :]
        return KvPart(start, node.end, len(pages)), pages
    form = cache.compressed_kv.form
    passed = (start - node.start) // PAGE_TOKENS
    row, skip_bytes = divmod(compressed.skip_bytes + passed * form.record_bytes, form.page_bytes)
    pages = compressed.pages[row:]
    return KvPart(start, node.end, len(pages), True, skip_bytes), pages


def _pages(node: Node, start: int) -> list[PageId]:
    if not node.is_tail:
        return path_pages(node, start, node.end)
    whole = node.end // PAGE_TOKENS * PAGE_TOKENS
    above = path_pages(node.parent, start, whole) if node.parent is not None and start < whole else []
    return [*above, *node.pages]


def _tokens(node: Node) -> npt.NDArray[np.int32]:
    pieces: list[bytes] = []
    ancestor: Node | None = node
    while ancestor is not None and ancestor.parent is not None:
        edge = ancestor.edge
        pieces.append(edge.tokens_between(edge.start, ancestor.end))
        ancestor = edge.nodes[0].parent
    return np.frombuffer(b"".join(reversed(pieces)), dtype=np.int32)


NODES_MAX = 20_000
SALTS_MAX = 16
PREFIXES_MAX = 12
HEAD_TOKENS = 24


def shape_of(cache: PrefixCache, seconds_since: Callable[[int], float]) -> CacheShape:
    """Return the shape of the cache. ``seconds_since``: how long ago a version of memory's state was."""
    plan = cache.plan
    by_root: dict[NodeId, tuple[bool, ShapeSum]] = {}
    root_of: dict[NodeId, NodeId] = {}
    depths: dict[int, SizeClass] = {}
    lengths: dict[int, SizeClass] = {}
    walked = list(islice(cache.tree.nodes(), NODES_MAX))
    salted = {root.id: bool(name) for name, root in cache.tree.roots.items()}
    uses: dict[NodeId, _Use] = {}
    for node in walked:
        if node.parent is None:
            root_of[node.id] = node.id
            by_root[node.id] = salted[node.id], ShapeSum()
            uses[node.id] = _Use()
            continue
        root = root_of[node.id] = root_of[node.parent.id]
        node_bytes = cache.compressed_kv.pages_of(node) * plan.page_bytes
        if node.slot != PAD:
            node_bytes += plan.compressed_bytes if node.slot == COMPRESSED else plan.slot_stride_bytes
        uses[node.id] = _Use(node.hits, node.hits * node.end, node_bytes, node.used_at)
        age_s = seconds_since(node.used_at)
        for total in (
            by_root[root][1],
            _class_of(depths, node.end, CHUNK_TOKENS).total,
            _class_of(lengths, node.end - node.start, PAGE_TOKENS).total,
        ):
            total.add(
                pages=node.page_count,
                snapshot=node.slot != PAD,
                node_bytes=node_bytes,
                inexact=node.kv_inexact or (node.slot != PAD and node.state_inexact),
                hits=node.hits,
                age_s=age_s,
            )
    biggest = nlargest(SALTS_MAX, by_root, key=lambda root: by_root[root][1].bytes)
    numbers = {root: number for number, root in enumerate(biggest, start=1)}
    return CacheShape(
        salts=[SaltShape(number, *by_root[root]) for root, number in numbers.items()],
        salt_count=len(cache.tree.roots),
        depths=sorted(depths.values(), key=lambda bucket: bucket.tokens_max),
        lengths=sorted(lengths.values(), key=lambda bucket: bucket.tokens_max),
        prefixes=[
            PrefixShape(
                _digest(node),
                _head(node),
                node.end,
                use.tokens_saved,
                use.bytes,
                use.hits,
                len(node.children),
                node.holds,
                node.slot != PAD,
                seconds_since(use.used_at),
                numbers.get(root_of[node.id], 0),
            )
            for node, use in _prefixes(walked, uses)
        ],
        cut_off=len(cache.tree.by_id) > len(walked),
    )


def _class_of(classes: dict[int, SizeClass], tokens: int, smallest: int) -> SizeClass:
    tokens_max = smallest
    while tokens_max < tokens:
        tokens_max *= 2
    return classes.setdefault(tokens_max, SizeClass(tokens_max))


@dataclass(slots=True)
class _Use:
    """Sizes and uses of a node, later summed with those of all nodes below it."""

    hits: int = 0
    tokens_saved: int = 0
    bytes: int = 0
    used_at: int = 0

    def add(self, below: _Use) -> None:
        self.hits += below.hits
        self.tokens_saved += below.tokens_saved
        self.bytes += below.bytes
        self.used_at = max(self.used_at, below.used_at)


def _prefixes(walked: list[Node], uses: dict[NodeId, _Use]) -> list[tuple[Node, _Use]]:
    """Return the nodes that requests began at or part after: those that saved most, then the longest; the latest use
    comes first."""
    for node in reversed(walked):  # children come after their parents
        if node.parent is not None:
            uses[node.parent.id].add(uses[node.id])
    places = [node for node in walked if node.parent is not None and (node.hits or len(node.children) > 1)]
    best = nlargest(PREFIXES_MAX, places, key=lambda node: (uses[node.id].hits * node.end, node.end, -node.id))
    best.sort(key=lambda node: (-uses[node.id].used_at, -node.end))
    return [(node, uses[node.id]) for node in best]


def _digest(node: Node) -> str:
    spans = []
    ancestor: Node | None = node
    while ancestor is not None:
        spans.append(ancestor.tokens)
        ancestor = ancestor.parent
    digest = blake2b(digest_size=16)
    for span in reversed(spans):
        digest.update(span)
    return digest.hexdigest()


def _head(node: Node) -> list[int]:
    """Return the tokens from the branch above the place: a node without siblings goes on with its parent's text."""
    while node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
    end = min(node.end, node.start + HEAD_TOKENS)
    tokens: list[int] = np.frombuffer(node.edge.tokens_between(node.start, end), dtype=np.int32).tolist()
    return tokens
