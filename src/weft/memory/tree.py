"""The prefix tree: which tokens have KV pages, and where along them a recurrent state is kept.

Owns the shape only: nodes, edges, which node holds which page and which checkpoint. It allocates and
frees nothing; what an operation takes out is its return value, and ``cache`` gives it back.

    root of "tenant-a"
      └─ [0..512)  pages 3 9 4 ...                   an edge is a run of whole pages
           ├─ [512..1088) ...  checkpoint @1088      a state was kept after token 1088
           │     └─ [1088..1093)  checkpoint @1093   a tail: less than a page, always with a checkpoint
           └─ [512..768) ...   checkpoint @768

Edges are cut at page boundaries only, so that a page lies in one node, and children are keyed by the
bytes of their first page of tokens: equality is by tokens, never by a hash alone (law L10). A *tail* is
an edge shorter than a page. It has no children, owns its partly filled page, and is keyed by all of its
tokens; as it is shorter, its key meets no other. A reader copies that page before extending it (law L7).

A lease *holds* the node at whose end the pages that it reads end. ``holds`` counts the leases at or below
a node, so what is read is known without a scan, and a page has exactly one owner: the pool, a lease, or
a node (law L1). A root is made for the first node of its namespace and goes with the last one.

Tokens are kept as bytes of int32: keys are slices of them, and the comparison of an edge is one memcmp
(100,000 tokens in some 20 microseconds).

Rejected: hash-chained blocks (equality by hash; a lookup touches every block); a reference count per
page (6,250 increments to adopt a prefix of 100,000 tokens); cutting edges at any token (pages straddle
nodes and need counts again); a class for tails (they are nodes in everything but length).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

NodeId = NewType("NodeId", int)

TOKEN_BYTES = 4
PAGE_KEY_BYTES = PAGE_TOKENS * TOKEN_BYTES
NO_NODE = NodeId(PAD)
NO_SLOT = SlotId(PAD)

_GHOSTS_MAX = 8
"""Children whose eviction a node remembers (law L11)."""


@dataclass(eq=False, slots=True)
class Node:
    """An edge from token position ``start`` on, and what stands at its end. ``parent`` is None for a root."""

    id: NodeId
    parent: Node | None = field(repr=False)
    start: int
    tokens: bytes = field(repr=False)
    """int32 of the edge."""
    pages: list[PageId] = field(repr=False)
    """Of the edge; empty in a model without attention."""
    children: dict[bytes, Node] = field(default_factory=dict, repr=False)
    tail_count: int = 0
    """Children that are tails."""
    slot: SlotId = NO_SLOT
    """Checkpoint at ``end``, PAD without one."""
    epoch: int = 0
    holds: int = 0
    """Leases that read this node's pages."""
    state_lost: bool = False
    """A checkpoint at ``end``, or of a tail here, was evicted: a miss is a lost state, not one never made."""
    ghosts: dict[bytes, int] = field(default_factory=dict, repr=False)
    """Tokens that were evicted below, by the key of their first page."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def is_tail(self) -> bool:
        return 0 < len(self.tokens) < PAGE_KEY_BYTES

    @property
    def bare(self) -> bool:
        """KV that no lease reads and no checkpoint needs."""
        return not self.children and self.slot == PAD and not self.holds


@dataclass(frozen=True, slots=True)
class Found:
    """Where a lookup came to. ``node``: the deepest node with all of its edge matching; ``partly``: its child
    that matches further in part; ``kv_tokens``: how far the KV matches, that part included; ``anchor``: the
    deepest node on the way with a checkpoint; ``state_lost_at``: the deepest position where there was one
    that was evicted, 0 if none beyond the anchor; ``kv_lost_tokens``: how many tokens beyond ``kv_tokens``
    were evicted, at most."""

    node: Node
    partly: Node | None
    kv_tokens: int
    anchor: Node | None
    state_lost_at: int
    kv_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Way:
    """A walk below a node, whole pages only. ``passed``: the nodes with all of their edge matching, in
    order; ``partly``: the child in whose edge the walk ended, None at a node; ``end``: the position."""

    passed: tuple[Node, ...]
    partly: Node | None
    end: int


class PrefixTree:
    """Nodes by namespace. ``paged`` False: a model without attention, edges have no pages."""

    __slots__ = ("_namespaces", "by_id", "held_page_count", "next_id", "page_count", "paged", "roots",
                 "slot_count")

    def __init__(self, *, paged: bool) -> None:
        self.paged = paged
        self.roots: dict[str, Node] = {}
        self._namespaces: dict[NodeId, str] = {}
        self.by_id: dict[NodeId, Node] = {}
        self.next_id = 0
        self.page_count = 0
        self.held_page_count = 0
        """Pages of nodes with holds: those that cannot be evicted."""
        self.slot_count = 0

    # ------------------------------------------------------------------ reading

    def find(self, namespace: str, data: bytes) -> Found | None:
        """The deepest match of the tokens ``data`` (int32 bytes); None where the namespace has nothing."""
        node = self.roots.get(namespace)
        if node is None:
            return None
        way = self.walk(node, data)
        node = way.passed[-1] if way.passed else node
        deepest, anchor, lost = node, None, 0
        at: Node | None = node
        while at is not None:
            anchor = self._tail(at, data) or (at if at.slot != PAD else None)
            if anchor is not None:
                break
            if at.state_lost and not lost:
                lost = at.end
            at = at.parent
        position = anchor.end if anchor is not None else 0
        key = data[way.end * TOKEN_BYTES:way.end * TOKEN_BYTES + PAGE_KEY_BYTES]
        gone = deepest.ghosts.get(key, 0) if way.partly is None else 0
        kv_lost = min(gone, len(data) // TOKEN_BYTES - way.end)
        lost = lost if lost > position else 0
        return Found(deepest, way.partly, max(way.end, position), anchor, lost, kv_lost)

    def _tail(self, node: Node, data: bytes) -> Node | None:
        """The longest tail below ``node`` that ``data`` goes through."""
        if not node.tail_count:
            return None
        first = node.end * TOKEN_BYTES
        longest = min(len(data) - first, PAGE_KEY_BYTES - TOKEN_BYTES)
        for length in range(longest, 0, -TOKEN_BYTES):
            tail = node.children.get(data[first:first + length])
            if tail is not None:
                return tail
        return None

    def walk(self, node: Node, data: bytes, first: int = 0) -> Way:
        """Follow ``data``, whose tokens begin at position ``first``, down from the end of ``node``."""
        passed: list[Node] = []
        at = (node.end - first) * TOKEN_BYTES
        while at + PAGE_KEY_BYTES <= len(data):
            child = node.children.get(data[at:at + PAGE_KEY_BYTES])
            if child is None:
                break
            tokens = child.tokens
            if not data.startswith(tokens, at):
                pages = common_pages(tokens, data[at:at + len(tokens)])
                return Way(tuple(passed), child, child.start + pages * PAGE_TOKENS)
            passed.append(child)
            node = child
            at += len(tokens)
        return Way(tuple(passed), None, first + at // TOKEN_BYTES)

    def path_pages(self, node: Node, first: int, end: int) -> list[PageId]:
        """Pages of the tokens [first, end) on the way to ``node``, whose edge reaches ``end``; both are
        multiples of a page. Empty in a model without attention."""
        pieces: list[list[PageId]] = []
        at: Node | None = node
        while self.paged and at is not None and at.end > first:
            lower = max(first - at.start, 0) // PAGE_TOKENS
            pieces.append(at.pages[lower:max(end - at.start, 0) // PAGE_TOKENS])
            at = at.parent
        return [page for piece in reversed(pieces) for page in piece]

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children, roots included: for the audit and for telling the shape."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------------ writing

    def root(self, namespace: str) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self._new(None, 0, b"", [])
            self._namespaces[root.id] = namespace
        return root

    def insert(self, base: Node, data: bytes, pages: Sequence[PageId]) -> tuple[Node, int]:
        """Make ``data`` (whole pages that follow ``base``) exist, on ``pages`` where it does not. Returns
        the node that ends there, and the position up to which it was there already."""
        assert len(data) % PAGE_KEY_BYTES == 0
        assert len(pages) == (len(data) // PAGE_KEY_BYTES if self.paged else 0)
        way = self.walk(base, data, base.end)
        node = way.passed[-1] if way.passed else base
        if way.partly is not None:
            node = self.split(way.partly, way.end)
        done = (way.end - base.end) // PAGE_TOKENS
        if done * PAGE_KEY_BYTES < len(data):
            child = self._new(node, way.end, data[done * PAGE_KEY_BYTES:], list(pages[done:]))
            node.children[child.tokens[:PAGE_KEY_BYTES]] = child
            node.ghosts.pop(child.tokens[:PAGE_KEY_BYTES], None)
            node = child
        return node, way.end

    def add_tail(self, node: Node, data: bytes, pages: list[PageId]) -> Node | None:
        """A tail below ``node`` that takes over ``pages`` (one, or none without attention); None where
        it was there already."""
        assert 0 < len(data) < PAGE_KEY_BYTES
        if data in node.children:
            return None
        tail = node.children[data] = self._new(node, node.end, data, pages)
        node.tail_count += 1
        return tail

    def split(self, node: Node, at: int) -> Node:
        """Cut the edge of ``node`` at position ``at``; returns the new upper part. ``node`` stays the lower
        one, with its checkpoint, children and leases."""
        assert node.parent is not None
        assert node.start < at < node.end
        assert at % PAGE_TOKENS == 0
        cut = (at - node.start) // PAGE_TOKENS
        upper = self._new(node.parent, node.start, node.tokens[:cut * PAGE_KEY_BYTES], node.pages[:cut],
                          counted=False)
        upper.holds = node.holds
        node.parent.children[upper.tokens[:PAGE_KEY_BYTES]] = upper
        node.parent, node.start = upper, at
        node.tokens, node.pages = node.tokens[cut * PAGE_KEY_BYTES:], node.pages[cut:]
        upper.children[node.tokens[:PAGE_KEY_BYTES]] = node
        return upper

    def node_ending(self, node: Node, position: int) -> Node:
        """The node on the way to ``node`` that ends at ``position``, cut out of an edge if need be."""
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node if node.end == position else self.split(node, position)

    def hold(self, node: Node) -> None:
        """A lease reads the pages up to the end of ``node``."""
        at: Node | None = node
        while at is not None:
            if not at.holds:
                self.held_page_count += len(at.pages)
            at.holds += 1
            at = at.parent

    def release(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            assert at.holds > 0, f"node {at.id} is released more often than held"
            at.holds -= 1
            if not at.holds:
                self.held_page_count -= len(at.pages)
            at = at.parent

    def set_slot(self, node: Node, slot: SlotId, epoch: int) -> None:
        assert node.slot == PAD
        assert slot != PAD
        assert node.parent is not None
        node.slot, node.epoch = slot, epoch
        self.slot_count += 1

    def take_slot(self, node: Node) -> tuple[SlotId, int]:
        """The checkpoint of ``node`` leaves."""
        assert node.slot != PAD, f"node {node.id} has no checkpoint"
        claim = node.slot, node.epoch
        node.slot = NO_SLOT
        self.slot_count -= 1
        lost_at = node.parent if node.is_tail else node
        assert lost_at is not None
        lost_at.state_lost = True
        return claim

    def trim(self, node: Node, pages_kept: int) -> list[PageId]:
        """Cut a bare node to its first ``pages_kept`` pages, at least one; returns the others."""
        assert node.bare
        assert 0 < pages_kept < len(node.pages)
        dropped = node.pages[pages_kept:]
        gone = node.tokens[pages_kept * PAGE_KEY_BYTES:]
        del node.pages[pages_kept:]
        node.tokens = node.tokens[:pages_kept * PAGE_KEY_BYTES]
        self.page_count -= len(dropped)
        node.state_lost = False
        below = max(node.ghosts.values(), default=0)
        node.ghosts.clear()
        self._remember(node, gone, below)
        return dropped

    def remove(self, node: Node) -> list[PageId]:
        """Take a bare node out; returns its pages. A root that is left with nothing goes too."""
        parent = node.parent
        assert node.bare
        assert parent is not None
        if node.is_tail:
            del parent.children[node.tokens]
            parent.tail_count -= 1
        else:
            del parent.children[node.tokens[:PAGE_KEY_BYTES]]
            self._remember(parent, node.tokens, max(node.ghosts.values(), default=0))
        del self.by_id[node.id]
        self.page_count -= len(node.pages)
        if parent.parent is None and not parent.children:
            del self.by_id[parent.id]
            del self.roots[self._namespaces.pop(parent.id)]
        return node.pages

    def _new(self, parent: Node | None, start: int, tokens: bytes, pages: list[PageId], *,
             counted: bool = True) -> Node:
        node = self.by_id[NodeId(self.next_id)] = Node(NodeId(self.next_id), parent, start, tokens, pages)
        self.next_id += 1
        if counted:
            self.page_count += len(pages)
        return node

    def _remember(self, node: Node, gone: bytes, below: int) -> None:
        while len(node.ghosts) >= _GHOSTS_MAX:
            del node.ghosts[next(iter(node.ghosts))]
        node.ghosts[gone[:PAGE_KEY_BYTES]] = len(gone) // TOKEN_BYTES + below


def common_pages(left: bytes, right: bytes) -> int:
    """Whole pages of tokens at the front of both that are equal."""
    length = min(len(left), len(right)) // PAGE_KEY_BYTES * PAGE_KEY_BYTES
    differ = np.frombuffer(left, np.int32, length // TOKEN_BYTES) != np.frombuffer(
        right, np.int32, length // TOKEN_BYTES)
    first = int(differ.argmax()) if length else 0
    return (first if length and differ[first] else length // TOKEN_BYTES) // PAGE_TOKENS
