"""The shape of the prefix tree in numbers: what is cached, how deep, for which namespaces, and how it is
used.

    namespaces   biggest first, by number: a salt is a tenant's secret and its name never leaves
    depths       nodes by the position at which they end     (0, 64] (64, 128] (128, 256] ...
    lengths      nodes by their tokens                       (0, 16] (16, 32] (32, 64] ...
    prefixes     the places that saved most, latest use first, at which requests part or resume

``digest`` is a hash of the tokens of a prefix, and ``head`` has the tokens with which the place begins to
differ from its siblings. Both stay in the server. It shows the digest under a key of its own, as text could
be guessed from it. It drops the head unless its operator asks for text (``--show-text``).

It takes one walk over at most NODES_MAX nodes, and its lists are bounded for every tree (law L11). It is
computed on request, never in a step.

*Hits* of a node are the sequences that resumed at its end. Hits of a prefix include those of all nodes below,
because each of them read it. *Age* is the time since the creation of a node or its last hit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest
from itertools import islice

import numpy as np

from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.cache_shape import CacheShape, NamespaceShape, PrefixShape, ShapeSum, SizeClass
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.values import NodeId
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS

NODES_MAX = 20_000
NAMESPACES_MAX = 16
PREFIXES_MAX = 12
HEAD_TOKENS = 24


def shape_of(cache: PrefixCache, seconds_since: Callable[[int], float]) -> CacheShape:
    """``seconds_since``: how long ago a version of the books was."""
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
        for total in (by_root[root][1], _class_of(depths, node.end, CHUNK_TOKENS).total,
                      _class_of(lengths, node.end - node.start, PAGE_TOKENS).total):
            total.add(node, node_bytes, age_s)
    biggest = nlargest(NAMESPACES_MAX, by_root, key=lambda root: by_root[root][1].bytes)
    numbers = {root: number for number, root in enumerate(biggest, start=1)}
    return CacheShape(
        namespaces=[NamespaceShape(number, *by_root[root]) for root, number in numbers.items()],
        namespace_count=len(cache.tree.roots),
        depths=sorted(depths.values(), key=lambda one: one.tokens_max),
        lengths=sorted(lengths.values(), key=lambda one: one.tokens_max),
        prefixes=[PrefixShape(_digest(node), _head(node), node.end, use.tokens_saved, use.bytes, use.hits,
                              len(node.children), node.holds, node.slot != PAD, seconds_since(use.used_at),
                              numbers.get(root_of[node.id], 0))
                  for node, use in _prefixes(walked, uses)],
        cut_off=len(cache.tree.by_id) > len(walked))


def _class_of(classes: dict[int, SizeClass], tokens: int, smallest: int) -> SizeClass:
    tokens_max = smallest
    while tokens_max < tokens:
        tokens_max *= 2
    return classes.setdefault(tokens_max, SizeClass(tokens_max))


@dataclass(slots=True)
class _Use:
    """Of a node, and then of all nodes below it too."""

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
    """Nodes that requests began at or part behind: those that saved most, then the longest; the latest use
    comes first."""
    for node in reversed(walked):  # children come after their parents
        if node.parent is not None:
            uses[node.parent.id].add(uses[node.id])
    places = [node for node in walked if node.parent is not None and (node.hits or len(node.children) > 1)]
    best = nlargest(PREFIXES_MAX, places,
                    key=lambda node: (uses[node.id].hits * node.end, node.end, -node.id))
    best.sort(key=lambda node: (-uses[node.id].used_at, -node.end))
    return [(node, uses[node.id]) for node in best]


def _digest(node: Node) -> str:
    spans = []
    at: Node | None = node
    while at is not None:
        spans.append(at.tokens)
        at = at.parent
    digest = blake2b(digest_size=16)
    for span in reversed(spans):
        digest.update(span)
    return digest.hexdigest()


def _head(node: Node) -> list[int]:
    """From the branch above the place: a node without siblings goes on with its parent's text."""
    while node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
        node = node.parent
    end = min(node.end, node.start + HEAD_TOKENS)
    tokens: list[int] = np.frombuffer(node.edge.tokens_between(node.start, end), dtype=np.int32).tolist()
    return tokens
