"""The shape of the prefix tree as values: sums over nodes, by namespace, depth and length, and single places.

``shape`` computes them in the engine, and says what each list is and how it is bounded. The HTTP process
shows them, and never imports the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.units import PAD

if TYPE_CHECKING:
    from weft.memory.prefix.edge import Node


@dataclass(slots=True)
class ShapeSum:
    """Of a set of nodes. ``youngest_s`` and ``oldest_s`` are ages."""

    nodes: int = 0
    pages: int = 0
    checkpoints: int = 0
    inexact: int = 0
    """Nodes whose KV or checkpoint was compressed once, or was computed behind what was."""
    bytes: int = 0
    hits: int = 0
    youngest_s: float = 0.0
    oldest_s: float = 0.0

    def add(self, node: Node, node_bytes: int, age_s: float) -> None:
        self.youngest_s = age_s if not self.nodes else min(self.youngest_s, age_s)
        self.oldest_s = max(self.oldest_s, age_s)
        self.nodes += 1
        self.pages += node.page_count
        self.checkpoints += node.slot != PAD
        self.inexact += node.kv_inexact or (node.slot != PAD and node.state_inexact)
        self.bytes += node_bytes
        self.hits += node.hits


@dataclass(slots=True)
class NamespaceShape:
    """``number`` from 1, in the order of size; ``salted``: it has a name."""

    number: int
    salted: bool
    total: ShapeSum


@dataclass(slots=True)
class SizeClass:
    """Nodes whose position or length, in tokens, is above the class before and at most ``tokens_max``."""

    tokens_max: int
    total: ShapeSum = field(default_factory=ShapeSum)


@dataclass(slots=True)
class PrefixShape:
    """One place in the tree. ``tokens``: from the root to the place. ``hits``, ``tokens_saved`` and
    ``bytes``: its own and of all nodes below. ``age_s``: since the last use of any of them. ``branches``: its
    children. ``readers``: leases that run now. ``namespace``: by number, 0 if it is not listed."""

    digest: str
    head: list[int]
    tokens: int
    tokens_saved: int
    bytes: int
    hits: int
    branches: int
    readers: int
    checkpoint: bool
    age_s: float
    namespace: int


@dataclass(slots=True)
class CacheShape:
    """``cut_off``: the tree has more nodes than were looked at."""

    namespaces: list[NamespaceShape]
    namespace_count: int
    depths: list[SizeClass]
    lengths: list[SizeClass]
    prefixes: list[PrefixShape]
    cut_off: bool
