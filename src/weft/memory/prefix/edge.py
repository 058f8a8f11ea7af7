"""Edges and nodes of the prefix tree, and lookups: how far tokens match, and the deepest snapshot.

    edge   tokens  [ t0 ........................................ ]    int32 bytes, one piece
           pages   [ p0 p1 p2 p3 p4 p5 p6 p7 ]
           nodes   |-- a --|---- b ----|- c --|                       each the parent of the next

    root --[ a a a a )--[ b b b b )--[ c c c c )
                      ^ anchor     |
    prompt  a a a a b b b b c c x x                KV matches two tokens into c; it resumes at the anchor

A *node* is a span [start, end) of an edge, with children, a snapshot and readers at its end. A snapshot in the middle
of a node cuts it in two. A long prompt with a snapshot every 64 tokens is cut a thousand times, so nodes only mark
positions: a cut copies nothing, and the pages of a path down an edge are one slice. A walk compares the bytes of an
edge, not its nodes: 100,000 cached tokens are matched in about 40 microseconds.

A page records its edge as its owner. Cuts do not change that owner, so finding the node of a page is a
bisection and never a scan (compaction needs it). An edge loses nodes only at its end, because only leaves are
removed.

Laws: L8 (a hit is a snapshot), L10 (tokens are compared, never hashes).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NewType

import numpy as np

from weft.memory.values import NO_SLOT, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId, ceil_div

EdgeId = NewType("EdgeId", int)

NO_EDGE = EdgeId(PAD)
COMPRESSED = SlotId(PAD - 1)
"""Value of ``slot`` for a snapshot that is compressed (eviction.py)."""
TOKEN_BYTES = 4
PAGE_KEY_BYTES = PAGE_TOKENS * TOKEN_BYTES
_WINDOW_BYTES = 64 * PAGE_KEY_BYTES
_GHOSTS_MAX = 8
"""Most evicted children that a node remembers (law L11)."""

_end_of = attrgetter("end")
_start_of = attrgetter("start")


@dataclass(eq=False, slots=True)
class Edge:
    """A run of tokens with their pages. ``start``: the token position where it begins, a multiple of a page. ``pages``
    is empty in a model without attention. Compressed KV has record ids instead of pages (compressed_kv.py)."""

    id: EdgeId
    start: int
    tokens: bytes = field(repr=False)
    pages: list[PageId] = field(repr=False)
    nodes: list[Node] = field(default_factory=list, repr=False)

    def tokens_between(self, start: int, end: int) -> bytes:
        return self.tokens[(start - self.start) * TOKEN_BYTES : (end - self.start) * TOKEN_BYTES]

    def pages_between(self, start: int, end: int) -> list[PageId]:
        """Return the pages of the tokens [start, end); the last one may be partly filled."""
        if not self.pages:
            return []
        return self.pages[(start - self.start) // PAGE_TOKENS : -((self.start - end) // PAGE_TOKENS)]

    def set_pages(self, start: int, pages: Sequence[PageId]) -> None:
        """Replace the pages of the tokens from ``start`` on, a multiple of a page."""
        first = (start - self.start) // PAGE_TOKENS
        assert first + len(pages) <= len(self.pages)
        self.pages[first : first + len(pages)] = pages

    def index_of(self, node: Node) -> int:
        return bisect_left(self.nodes, node.start, key=_start_of)

    def node_at(self, position: int) -> Node:
        """Return the node whose span has the token at ``position``."""
        return self.nodes[bisect_right(self.nodes, position, key=_end_of)]

    def matches_until(self, position: int, data: bytes, first_byte: int) -> int:
        """Return the position up to which the edge, from ``position`` on, has the tokens of ``data`` from byte
        ``first_byte`` on; only complete pages count."""
        offset = (position - self.start) * TOKEN_BYTES
        length = min((self.nodes[-1].end - position) * TOKEN_BYTES, len(data) - first_byte)
        length -= length % PAGE_KEY_BYTES
        done, window = 0, _WINDOW_BYTES
        while done < length:
            piece = self.tokens[offset + done : offset + min(done + window, length)]
            if not data.startswith(piece, first_byte + done):
                done += common_pages(piece, data[first_byte + done : first_byte + done + len(piece)]) * PAGE_KEY_BYTES
                break
            done += len(piece)
            window *= 4
        return position + done // TOKEN_BYTES

    def cut_to(self, end: int) -> list[PageId]:
        """Drop everything past ``end``; the caller has removed or cut its nodes. Returns the pages."""
        page_count = -((self.start - end) // PAGE_TOKENS)
        dropped = self.pages[page_count:]
        del self.pages[page_count:]
        used = (end - self.start) * TOKEN_BYTES
        if 2 * used <= len(self.tokens):
            self.tokens = self.tokens[:used]
        return dropped


@dataclass(eq=False, slots=True)
class Node:
    """The span [start, end) of an edge, with the data at its end. ``parent`` is None for a root."""

    id: NodeId
    parent: Node | None = field(repr=False)
    edge: Edge = field(repr=False)
    start: int
    end: int
    children: dict[bytes, Node] = field(default_factory=dict, repr=False)
    tail_count: int = 0
    """Number of children that are tails."""
    slot: SlotId = NO_SLOT
    """Snapshot at ``end``: PAD without one, COMPRESSED if it is in pages."""
    epoch: int = 0
    holds: int = 0
    """Number of leases that read this node's pages."""
    state_lost: bool = False
    """Whether a snapshot at ``end``, or of a tail below, was evicted: a miss here is an evicted state."""
    ghosts: dict[bytes, int] = field(default_factory=dict, repr=False)
    """Tokens evicted below this node, by the key of their first page."""
    hits: int = 0
    """Number of leases that opened at its end."""
    used_at: int = 0
    """Version of memory's state at its creation or its last opening."""
    kv_inexact: bool = False
    """Whether its KV was compressed once, or computed from compressed data; ``state_inexact``: the same of its
    snapshot."""
    state_inexact: bool = False

    @property
    def tokens(self) -> bytes:
        """int32 bytes of the span; a copy."""
        return self.edge.tokens_between(self.start, self.end)

    @property
    def key(self) -> bytes:
        """The key in its parent's children: the first page of tokens, or all tokens of a tail."""
        return self.edge.tokens_between(self.start, min(self.end, self.start + PAGE_TOKENS))

    @property
    def pages(self) -> list[PageId]:
        """Pages of the span; empty in a model without attention. A copy."""
        return self.edge.pages_between(self.start, self.end)

    @property
    def page_count(self) -> int:
        return ceil_div(self.end - self.start, PAGE_TOKENS) if self.edge.pages else 0

    @property
    def is_tail(self) -> bool:
        return 0 < self.end - self.start < PAGE_TOKENS

    @property
    def bare(self) -> bool:
        """Whether no lease reads its KV and no snapshot needs it."""
        return not self.children and self.slot == PAD and not self.holds

    def lose_state(self) -> None:
        """Note that the snapshot is evicted."""
        self.slot = NO_SLOT
        lost_at = self.parent if self.is_tail else self
        assert lost_at is not None
        lost_at.state_lost = True

    def remember_evicted(self, tokens: bytes, below: int) -> None:
        """Note that ``tokens`` that began at its end were evicted, and ``below`` tokens that followed them."""
        while len(self.ghosts) >= _GHOSTS_MAX:
            del self.ghosts[next(iter(self.ghosts))]
        self.ghosts[tokens[:PAGE_KEY_BYTES]] = len(tokens) // TOKEN_BYTES + below


def common_pages(left: bytes, right: bytes) -> int:
    """Return how many complete pages of tokens are equal at the front of both."""
    length = min(len(left), len(right)) // PAGE_KEY_BYTES * PAGE_KEY_BYTES
    differ = np.frombuffer(left, np.int32, length // TOKEN_BYTES) != np.frombuffer(
        right, np.int32, length // TOKEN_BYTES
    )
    first = int(differ.argmax()) if length else 0
    return (first if length and differ[first] else length // TOKEN_BYTES) // PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The result of a lookup.

    ``node``: the deepest node that matches completely; ``partly``: its child that matches further in part.
    ``kv_tokens``: how far the KV matches, that part included. ``anchor``: the deepest node on the path with a snapshot.
    ``state_lost_at``: the deepest position beyond the anchor where a snapshot was evicted, 0 without one.
    ``kv_lost_tokens``: tokens beyond ``kv_tokens`` that were evicted; an upper bound."""

    node: Node
    partly: Node | None
    kv_tokens: int
    anchor: Node | None
    state_lost_at: int
    kv_lost_tokens: int


@dataclass(frozen=True, slots=True)
class TreePath:
    """A walk below a node, in complete pages. ``passed``: the nodes that match completely, in order. ``partly``: the
    child in which the walk ended, None at a node. ``end``: the position."""

    passed: tuple[Node, ...]
    partly: Node | None
    end: int


def find(root: Node, data: bytes) -> PrefixMatch:
    """Return the deepest match of the tokens ``data`` (int32 bytes) below ``root``."""
    path = walk(root, data)
    node = deepest = path.passed[-1] if path.passed else root
    anchor, lost = None, 0
    ancestor: Node | None = node
    while ancestor is not None:
        anchor = _tail_along(ancestor, data) or (ancestor if ancestor.slot != PAD else None)
        if anchor is not None:
            break
        if ancestor.state_lost and not lost:
            lost = ancestor.end
        ancestor = ancestor.parent
    position = anchor.end if anchor is not None else 0
    key = data[path.end * TOKEN_BYTES : path.end * TOKEN_BYTES + PAGE_KEY_BYTES]
    evicted = deepest.ghosts.get(key, 0) if path.partly is None else 0
    kv_lost = min(evicted, len(data) // TOKEN_BYTES - path.end)
    lost = lost if lost > position else 0
    return PrefixMatch(deepest, path.partly, max(path.end, position), anchor, lost, kv_lost)


def _tail_along(node: Node, data: bytes) -> Node | None:
    """Return the longest tail below ``node`` whose tokens ``data`` has."""
    if not node.tail_count:
        return None
    first = node.end * TOKEN_BYTES
    longest = min(len(data) - first, PAGE_KEY_BYTES - TOKEN_BYTES)
    for length in range(longest, 0, -TOKEN_BYTES):
        tail = node.children.get(data[first : first + length])
        if tail is not None:
            return tail
    return None


def walk(node: Node, data: bytes, first: int = 0) -> TreePath:
    """Follow ``data``, whose tokens begin at position ``first``, down from the end of ``node``."""
    passed: list[Node] = []
    offset = (node.end - first) * TOKEN_BYTES
    while offset + PAGE_KEY_BYTES <= len(data):
        child = node.children.get(data[offset : offset + PAGE_KEY_BYTES])
        if child is None:
            break
        edge = child.edge
        reached = edge.matches_until(child.start, data, offset)
        at_node = edge.index_of(child)
        passed += edge.nodes[at_node : bisect_right(edge.nodes, reached, at_node, key=_end_of)]
        if not passed or passed[-1].end < reached:
            return TreePath(tuple(passed), edge.node_at(reached - 1), reached)
        node = passed[-1]
        offset = (reached - first) * TOKEN_BYTES
    return TreePath(tuple(passed), None, first + offset // TOKEN_BYTES)


def path_pages(node: Node, first: int, end: int) -> list[PageId]:
    """Return the pages of the tokens [first, end) on the path to ``node``, whose span reaches ``end``; both are
    multiples of a page. Empty in a model without attention."""
    pieces: list[list[PageId]] = []
    ancestor: Node | None = node
    while ancestor is not None and ancestor.edge.pages and ancestor.end > first:
        edge = ancestor.edge
        if edge.start < end:
            pieces.append(edge.pages_between(max(first, edge.start), min(end, ancestor.end)))
        ancestor = edge.nodes[0].parent
    return [page for piece in reversed(pieces) for page in piece]
