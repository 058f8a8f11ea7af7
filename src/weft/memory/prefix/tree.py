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

Tokens and pages of an edge lie in its *edge* (edge.py), which nodes cut out of it share: a thousand
checkpoints along a prompt cost a lookup one comparison of bytes and not a thousand steps.

Rejected: hash-chained blocks (equality by hash; a lookup touches every block); a reference count per
page (6,250 increments to adopt a prefix of 100,000 tokens); cutting edges at any token (pages straddle
nodes and need counts again); a class for tails (they are nodes in everything but length); tokens and pages
by node (each of a thousand cuts copies what is left of the edge).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.memory.frames import owners
from weft.memory.prefix.edge import NO_EDGE, PAGE_KEY_BYTES, TOKEN_BYTES, Edge, EdgeId
from weft.memory.values import NO_SLOT, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId, ceil_div

COMPRESSED = SlotId(PAD - 1)
"""In place of a slot: the checkpoint is compressed (compression.py)."""
Owners = list[int] | dict[int, int]
"""By page or slot; see ``owners``."""

_GHOSTS_MAX = 8
"""Children whose eviction a node remembers (law L11)."""


@dataclass(eq=False, slots=True)
class Node:
    """An edge over the tokens [start, end), and what stands at its end. ``parent`` is None for a root."""

    id: NodeId
    parent: Node | None = field(repr=False)
    edge: Edge = field(repr=False)
    start: int
    end: int
    children: dict[bytes, Node] = field(default_factory=dict, repr=False)
    tail_count: int = 0
    """Children that are tails."""
    slot: SlotId = NO_SLOT
    """Checkpoint at ``end``: PAD without one, COMPRESSED where it has pages and no slot."""
    epoch: int = 0
    holds: int = 0
    """Leases that read this node's pages."""
    state_lost: bool = False
    """A checkpoint at ``end``, or of a tail here, was evicted: a miss is a lost state, not one never made."""
    ghosts: dict[bytes, int] = field(default_factory=dict, repr=False)
    """Tokens that were evicted below, by the key of their first page."""
    hits: int = 0
    """Leases that were opened on its end."""
    used_at: int = 0
    """Version of the books when it was made or last opened on."""
    kv_inexact: bool = False
    """Its KV was compressed once, or computed behind what was; ``state_inexact``: so was its checkpoint."""
    state_inexact: bool = False

    @property
    def tokens(self) -> bytes:
        """int32 of the edge; a copy."""
        return self.edge.tokens_between(self.start, self.end)

    @property
    def key(self) -> bytes:
        """Under which its parent has it: its first page of tokens, or all of a tail's."""
        return self.edge.tokens_between(self.start, min(self.end, self.start + PAGE_TOKENS))

    @property
    def pages(self) -> list[PageId]:
        """Of the edge; empty in a model without attention. A copy."""
        return self.edge.pages_between(self.start, self.end)

    @property
    def page_count(self) -> int:
        return ceil_div(self.end - self.start, PAGE_TOKENS) if self.edge.pages else 0

    @property
    def is_tail(self) -> bool:
        return 0 < self.end - self.start < PAGE_TOKENS

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
class TreePath:
    """A walk below a node, whole pages only. ``passed``: the nodes with all of their edge matching, in
    order; ``partly``: the child in whose edge the walk ended, None at a node; ``end``: the position."""

    passed: tuple[Node, ...]
    partly: Node | None
    end: int


class PrefixTree:
    """Nodes by namespace. ``paged`` False: a model without attention, edges have no pages. What the tree
    takes over it enters into ``page_owners`` and ``slot_owners``."""

    __slots__ = (
        "_namespaces",
        "by_id",
        "edges",
        "held_page_count",
        "next_id",
        "page_count",
        "page_owners",
        "paged",
        "roots",
        "slot_count",
        "slot_owners",
        "version",
    )

    def __init__(self, *, paged: bool, page_owners: Owners | None = None,
                 slot_owners: Owners | None = None) -> None:
        self.paged = paged
        self.page_owners: Owners = {} if page_owners is None else page_owners
        self.slot_owners: Owners = {} if slot_owners is None else slot_owners
        self.roots: dict[str, Node] = {}
        self._namespaces: dict[NodeId, str] = {}
        self.by_id: dict[NodeId, Node] = {}
        self.edges: dict[EdgeId, Edge] = {}
        self.next_id = 0
        self.version = 0
        """Of the books once the commit that writes is done: nodes note it."""
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
        path = self.walk(node, data)
        node = path.passed[-1] if path.passed else node
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
        key = data[path.end * TOKEN_BYTES:path.end * TOKEN_BYTES + PAGE_KEY_BYTES]
        gone = deepest.ghosts.get(key, 0) if path.partly is None else 0
        kv_lost = min(gone, len(data) // TOKEN_BYTES - path.end)
        lost = lost if lost > position else 0
        return Found(deepest, path.partly, max(path.end, position), anchor, lost, kv_lost)

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

    def walk(self, node: Node, data: bytes, first: int = 0) -> TreePath:
        """Follow ``data``, whose tokens begin at position ``first``, down from the end of ``node``."""
        passed: list[Node] = []
        at = (node.end - first) * TOKEN_BYTES
        while at + PAGE_KEY_BYTES <= len(data):
            child = node.children.get(data[at:at + PAGE_KEY_BYTES])
            if child is None:
                break
            edge = child.edge
            reached = edge.matches_until(child.start, data, at)
            passed += edge.nodes_passed(edge.index_of(child), reached)
            if not passed or passed[-1].end < reached:
                return TreePath(tuple(passed), edge.node_at(reached - 1), reached)
            node = passed[-1]
            at = (reached - first) * TOKEN_BYTES
        return TreePath(tuple(passed), None, first + at // TOKEN_BYTES)

    def path_pages(self, node: Node, first: int, end: int) -> list[PageId]:
        """Pages of the tokens [first, end) on the way to ``node``, whose edge reaches ``end``; both are
        multiples of a page. Empty in a model without attention."""
        pieces: list[list[PageId]] = []
        at: Node | None = node
        while self.paged and at is not None and at.parent is not None and at.end > first:
            edge = at.edge
            if edge.start < end:
                pieces.append(edge.pages_between(max(first, edge.start), min(end, at.end)))
            at = edge.nodes[0].parent
        return [page for piece in reversed(pieces) for page in piece]

    def path_ids(self, name: NodeId) -> set[NodeId]:
        """The node ``name`` and those above it; none for NO_NODE."""
        found: set[NodeId] = set()
        at = self.by_id.get(name)
        while at is not None:
            found.add(at.id)
            at = at.parent
        return found

    def node_of_page(self, owner: int, index: int) -> Node:
        """The node with page number ``index`` of its path, which ``owner`` says is the tree's."""
        edge = self.edges[EdgeId(owners.name_in_tree(owner))]
        return edge.node_at(index * PAGE_TOKENS)

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
            root = self.roots[namespace] = self._new(None, Edge(NO_EDGE, 0, b"", []), 0, 0)
            self._namespaces[root.id] = namespace
        return root

    def insert(self, base: Node, data: bytes, pages: Sequence[PageId]) -> tuple[Node, int]:
        """Make ``data`` (whole pages that follow ``base``) exist, on ``pages`` where it does not. Returns
        the node that ends there, and the position up to which it was there already."""
        assert len(data) % PAGE_KEY_BYTES == 0
        assert len(pages) == (len(data) // PAGE_KEY_BYTES if self.paged else 0)
        path = self.walk(base, data, base.end)
        node = path.passed[-1] if path.passed else base
        if path.partly is not None:
            node = self.split(path.partly, path.end)
        done = (path.end - base.end) // PAGE_TOKENS
        if done * PAGE_KEY_BYTES < len(data):
            node = self._add(node, data[done * PAGE_KEY_BYTES:], list(pages[done:]))
        return node, path.end

    def add_tail(self, node: Node, data: bytes, pages: list[PageId]) -> Node | None:
        """A tail below ``node`` that takes over ``pages`` (one, or none without attention); None where
        it was there already."""
        assert 0 < len(data) < PAGE_KEY_BYTES
        if data in node.children:
            return None
        node.tail_count += 1
        return self._add(node, data, pages)

    def split(self, node: Node, at: int) -> Node:
        """Cut the edge of ``node`` at position ``at``; returns the new upper part. ``node`` stays the lower
        one, with its checkpoint, children and leases."""
        assert node.parent is not None
        assert node.start < at < node.end
        assert at % PAGE_TOKENS == 0
        edge = node.edge
        place = edge.index_of(node)
        upper = self._new(node.parent, edge, node.start, at)
        upper.holds, upper.kv_inexact = node.holds, node.kv_inexact
        node.parent.children[upper.key] = upper
        node.parent, node.start = upper, at
        upper.children[node.key] = node
        edge.nodes.insert(place, upper)
        return upper

    def node_ending(self, node: Node, position: int) -> Node:
        """The node on the way to ``node`` that ends at ``position``, cut out of an edge if need be."""
        while node.start >= position and node.parent is not None:
            edge = node.edge
            above = edge.nodes[0].parent
            assert above is not None
            node = edge.node_at(position - 1) if edge.start < position else above
        return node if node.end == position else self.split(node, position)

    def hold(self, node: Node) -> None:
        """A lease reads the pages up to the end of ``node``."""
        at: Node | None = node
        while at is not None:
            if not at.holds:
                self.held_page_count += at.page_count
            at.holds += 1
            at = at.parent

    def release(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            assert at.holds > 0, f"node {at.id} is released more often than held"
            at.holds -= 1
            if not at.holds:
                self.held_page_count -= at.page_count
            at = at.parent

    def set_slot(self, node: Node, slot: SlotId, epoch: int) -> None:
        assert node.slot == PAD
        assert slot != PAD
        assert node.parent is not None
        node.slot, node.epoch = slot, epoch
        self.slot_owners[slot] = owners.of_tree(node.id)
        self.slot_count += 1

    def replace_page(self, owner: int, index: int, page: PageId) -> None:
        """Page number ``index`` of its path, which ``owner`` says is the tree's, has moved to ``page``."""
        edge = self.edges[EdgeId(owners.name_in_tree(owner))]
        edge.pages[index - edge.start // PAGE_TOKENS] = page

    def replace_slot(self, owner: int, slot: SlotId, epoch: int) -> None:
        """A checkpoint, which ``owner`` says is the tree's, has moved to ``slot``."""
        node = self.by_id[NodeId(owners.name_in_tree(owner))]
        node.slot, node.epoch = slot, epoch

    def take_slot(self, node: Node, to: SlotId = NO_SLOT) -> tuple[SlotId, int]:
        """The checkpoint of ``node`` leaves its slot, and is lost or COMPRESSED."""
        assert node.slot >= 0, f"node {node.id} has no checkpoint in a slot"
        claim = node.slot, node.epoch
        self.slot_count -= 1
        node.slot = to
        if to == NO_SLOT:
            self.lose_state(node)
        return claim

    def lose_state(self, node: Node) -> None:
        node.slot = NO_SLOT
        lost_at = node.parent if node.is_tail else node
        assert lost_at is not None
        lost_at.state_lost = True

    def trim(self, node: Node, pages_kept: int) -> list[PageId]:
        """Cut a bare node to its first ``pages_kept`` pages, at least one; returns the others."""
        assert node.bare
        assert 0 < pages_kept < node.page_count
        kept_end = node.start + pages_kept * PAGE_TOKENS
        gone = node.edge.tokens_between(kept_end, node.end)
        node.end = kept_end
        dropped = node.edge.cut_to(kept_end)
        self.page_count -= len(dropped)
        node.state_lost = False
        below = max(node.ghosts.values(), default=0)
        node.ghosts.clear()
        self._remember(node, gone, below)
        return dropped

    def remove(self, node: Node) -> list[PageId]:
        """Take a bare node out; returns its pages. A root that is left with nothing goes too."""
        parent, edge = node.parent, node.edge
        assert node.bare
        assert parent is not None
        assert edge.nodes[-1] is node, "a leaf is the end of its edge"
        del parent.children[node.key]
        if node.is_tail:
            parent.tail_count -= 1
        else:
            self._remember(parent, node.tokens, max(node.ghosts.values(), default=0))
        pages = edge.cut_to(node.start)
        edge.nodes.pop()
        if not edge.nodes:
            del self.edges[edge.id]
        del self.by_id[node.id]
        self.page_count -= len(pages)
        if parent.parent is None and not parent.children:
            del self.by_id[parent.id]
            del self.roots[self._namespaces.pop(parent.id)]
        return pages

    def _add(self, parent: Node, tokens: bytes, pages: list[PageId]) -> Node:
        """A new leaf on a edge of its own; its pages are the tree's from now on."""
        edge = Edge(EdgeId(self.next_id), parent.end, tokens, pages)
        node = self._new(parent, edge, parent.end, parent.end + len(tokens) // TOKEN_BYTES)
        edge.nodes.append(node)
        self.edges[edge.id] = edge
        owner = owners.of_tree(edge.id)
        for page in pages:
            self.page_owners[page] = owner
        self.page_count += len(pages)
        parent.children[node.key] = node
        parent.ghosts.pop(node.key, None)
        return node

    def _new(self, parent: Node | None, edge: Edge, start: int, end: int) -> Node:
        node = self.by_id[NodeId(self.next_id)] = Node(NodeId(self.next_id), parent, edge, start, end,
                                                       used_at=self.version)
        self.next_id += 1
        return node

    def _remember(self, node: Node, gone: bytes, below: int) -> None:
        while len(node.ghosts) >= _GHOSTS_MAX:
            del node.ghosts[next(iter(node.ghosts))]
        node.ghosts[gone[:PAGE_KEY_BYTES]] = len(gone) // TOKEN_BYTES + below
