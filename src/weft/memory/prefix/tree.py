"""The prefix tree: which tokens have KV pages, and which positions along them have a snapshot.

This file owns the shape only: nodes, edges, which node has which pages and which snapshot. It allocates and frees
nothing. An operation returns the pages and slots that it takes out, and ``cache`` gives them back.

    root of "tenant-a"
      └─ [0..512)  pages 3 9 4 ...                   a node is a run of whole pages
           ├─ [512..1088) ...  snapshot @1088      the state after token 1088
           │     └─ [1088..1093)  snapshot @1093   a tail: less than a page, always with a snapshot
           └─ [512..768) ...   snapshot @768

Nodes are cut at page boundaries only, so each page belongs to one node. Children are keyed by the bytes of their first
page of tokens: equality is by tokens, never only by a hash (law L10). A *tail* has no children, owns its partly filled
page, and is keyed by all of its tokens. That key is shorter than all others, so it collides with none. A reader copies
the page of a tail before it extends it (law L7).

A lease *holds* the node at whose end its shared pages end. ``holds`` counts the leases at or below a node. So the tree
knows which pages are read without a scan, and each page has exactly one owner: the pool, a lease, or an edge (law L1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.memory.frames.arena import of_tree, tree_id_of
from weft.memory.prefix.edge import NO_EDGE, PAGE_KEY_BYTES, TOKEN_BYTES, Edge, EdgeId, Node, PrefixMatch, find, walk
from weft.memory.values import NO_SLOT, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

Owners = list[int] | dict[int, int]
"""Owner numbers by page or slot; see ``frames.arena``."""


class PrefixTree:
    """Nodes by salt. ``paged`` False: a model without attention, its edges have no pages. The tree enters the pages and
    slots that it adopts into ``page_owners`` and ``slot_owners``."""

    __slots__ = (
        "_salts",
        "by_id",
        "change_count",
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
        "watches",
    )

    def __init__(self, *, paged: bool, page_owners: Owners | None = None, slot_owners: Owners | None = None) -> None:
        self.paged = paged
        self.page_owners: Owners = {} if page_owners is None else page_owners
        self.slot_owners: Owners = {} if slot_owners is None else slot_owners
        self.roots: dict[str, Node] = {}
        self._salts: dict[NodeId, str] = {}
        self.by_id: dict[NodeId, Node] = {}
        self.edges: dict[EdgeId, Edge] = {}
        self.next_id = 0
        self.version = 0
        """Version of memory's state after the current commit; nodes record it."""
        self.page_count = 0
        self.held_page_count = 0
        """Pages of nodes with holds; they cannot be evicted."""
        self.slot_count = 0
        self.change_count = 0
        """Changes that a lookup may see: while the count is the same, every prompt resumes where it did."""
        self.watches: list[set[NodeId]] = []
        """One set for each follower, which empties it (followers.py). Each set gets the nodes that are added,
        removed or cut, or whose snapshot changes.
        """

    # ------------------------------------------------------------------ reading

    def find(self, salt: str, data: bytes) -> PrefixMatch | None:
        """Return the deepest match of the tokens ``data`` (int32 bytes); None for an unknown salt."""
        root = self.roots.get(salt)
        return None if root is None else find(root, data)

    def path_ids(self, name: NodeId) -> set[NodeId]:
        """Return the node ``name`` and all nodes above it; empty for NO_NODE."""
        ids: set[NodeId] = set()
        ancestor = self.by_id.get(name)
        while ancestor is not None:
            ids.add(ancestor.id)
            ancestor = ancestor.parent
        return ids

    def node_of_page(self, owner: int, index: int) -> Node:
        """Return the node with page number ``index`` of its path; ``owner`` is the owner number of that page."""
        edge = self.edges[EdgeId(tree_id_of(owner))]
        return edge.node_at(index * PAGE_TOKENS)

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children, roots included; for the audit and the shape."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ------------------------------------------------------------------ writing

    def root(self, salt: str) -> Node:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = self._new(None, Edge(NO_EDGE, 0, b"", []), 0, 0)
            self._salts[root.id] = salt
        return root

    def insert(self, base: Node, data: bytes, pages: Sequence[PageId]) -> tuple[Node, int]:
        """Add ``data`` (whole pages that follow ``base``), with ``pages`` where the tree lacks it. Returns
        the node that ends there, and the position up to which the tree had the tokens before."""
        assert len(data) % PAGE_KEY_BYTES == 0
        assert len(pages) == (len(data) // PAGE_KEY_BYTES if self.paged else 0)
        path = walk(base, data, base.end)
        node = path.passed[-1] if path.passed else base
        if path.partly is not None:
            node = self.split(path.partly, path.end)
        done = (path.end - base.end) // PAGE_TOKENS
        if done * PAGE_KEY_BYTES < len(data):
            node = self._add(node, data[done * PAGE_KEY_BYTES :], list(pages[done:]))
        return node, path.end

    def add_tail(self, node: Node, data: bytes, pages: list[PageId]) -> Node | None:
        """Add a tail below ``node`` that adopts ``pages`` (one, or none without attention), and return it; None for a
        duplicate."""
        assert 0 < len(data) < PAGE_KEY_BYTES
        if data in node.children:
            return None
        node.tail_count += 1
        return self._add(node, data, pages)

    def split(self, node: Node, position: int) -> Node:
        """Cut ``node`` at ``position``; returns the new upper part. ``node`` stays the lower part, with
        its snapshot, children and leases."""
        assert node.parent is not None
        assert node.start < position < node.end
        assert position % PAGE_TOKENS == 0
        edge = node.edge
        place = edge.index_of(node)
        upper = self._new(node.parent, edge, node.start, position)
        upper.holds, upper.kv_inexact = node.holds, node.kv_inexact
        node.parent.children[upper.key] = upper
        node.parent, node.start = upper, position
        upper.children[node.key] = node
        edge.nodes.insert(place, upper)
        note_change(self, node)
        return upper

    def node_ending(self, node: Node, position: int) -> Node:
        """Return the node on the path to ``node`` that ends at ``position``; cuts a node if none ends there."""
        while node.start >= position and node.parent is not None:
            edge = node.edge
            above = edge.nodes[0].parent
            assert above is not None
            node = edge.node_at(position - 1) if edge.start < position else above
        return node if node.end == position else self.split(node, position)

    def hold(self, node: Node) -> None:
        """Hold the pages up to the end of ``node`` for a lease."""
        ancestor: Node | None = node
        while ancestor is not None:
            if not ancestor.holds:
                self.held_page_count += ancestor.page_count
            ancestor.holds += 1
            ancestor = ancestor.parent

    def release(self, node: Node) -> None:
        ancestor: Node | None = node
        while ancestor is not None:
            assert ancestor.holds > 0, f"node {ancestor.id} is released more often than held"
            ancestor.holds -= 1
            if not ancestor.holds:
                self.held_page_count -= ancestor.page_count
            ancestor = ancestor.parent

    def set_slot(self, node: Node, slot: SlotId, epoch: int) -> None:
        assert node.slot == PAD
        assert slot != PAD
        assert node.parent is not None
        node.slot, node.epoch = slot, epoch
        self.slot_owners[slot] = of_tree(node.id)
        self.slot_count += 1
        note_change(self, node)

    def replace_page(self, owner: int, index: int, page: PageId) -> None:
        """Replace page number ``index`` of its path by ``page``, to which it moved; ``owner`` is its owner number, an
        edge."""
        edge = self.edges[EdgeId(tree_id_of(owner))]
        edge.pages[index - edge.start // PAGE_TOKENS] = page

    def replace_slot(self, owner: int, slot: SlotId, epoch: int) -> None:
        """Set the slot of a snapshot that moved to ``slot``; ``owner`` is its owner number, a node."""
        node = self.by_id[NodeId(tree_id_of(owner))]
        node.slot, node.epoch = slot, epoch

    def take_slot(self, node: Node, to: SlotId = NO_SLOT) -> tuple[SlotId, int]:
        """Take the snapshot of ``node`` out of its slot: ``to`` is COMPRESSED, or NO_SLOT for an eviction. Return the
        slot and its epoch."""
        assert node.slot >= 0, f"node {node.id} has no snapshot in a slot"
        claim = node.slot, node.epoch
        self.slot_count -= 1
        node.slot = to
        if to == NO_SLOT:
            node.lose_state()
        note_change(self, node)
        return claim

    def trim(self, node: Node, pages_left: int) -> list[PageId]:
        """Cut a bare node to its first ``pages_left`` pages, at least one; returns the other pages."""
        assert node.bare
        assert 0 < pages_left < node.page_count
        note_change(self, node)
        end = node.start + pages_left * PAGE_TOKENS
        evicted = node.edge.tokens_between(end, node.end)
        node.end = end
        dropped = node.edge.cut_to(end)
        self.page_count -= len(dropped)
        node.state_lost = False
        below = max(node.ghosts.values(), default=0)
        node.ghosts.clear()
        node.remember_evicted(evicted, below)
        return dropped

    def remove(self, node: Node) -> list[PageId]:
        """Remove a bare node; returns its pages. Its root goes with the last node below."""
        parent, edge = node.parent, node.edge
        note_change(self, node)
        assert node.bare
        assert parent is not None
        assert edge.nodes[-1] is node, "a leaf is the end of its edge"
        del parent.children[node.key]
        if node.is_tail:
            parent.tail_count -= 1
        else:
            parent.remember_evicted(node.tokens, max(node.ghosts.values(), default=0))
        pages = edge.cut_to(node.start)
        edge.nodes.pop()
        if not edge.nodes:
            del self.edges[edge.id]
        del self.by_id[node.id]
        self.page_count -= len(pages)
        if parent.parent is None and not parent.children:
            del self.by_id[parent.id]
            del self.roots[self._salts.pop(parent.id)]
        return pages

    def _add(self, parent: Node, tokens: bytes, pages: list[PageId]) -> Node:
        """Add a leaf on an edge of its own, and return it; the tree owns its pages from now on."""
        edge = Edge(EdgeId(self.next_id), parent.end, tokens, pages)
        node = self._new(parent, edge, parent.end, parent.end + len(tokens) // TOKEN_BYTES)
        edge.nodes.append(node)
        self.edges[edge.id] = edge
        owner = of_tree(edge.id)
        for page in pages:
            self.page_owners[page] = owner
        self.page_count += len(pages)
        parent.children[node.key] = node
        parent.ghosts.pop(node.key, None)
        return node

    def _new(self, parent: Node | None, edge: Edge, start: int, end: int) -> Node:
        node = self.by_id[NodeId(self.next_id)] = Node(
            NodeId(self.next_id), parent, edge, start, end, used_at=self.version
        )
        self.next_id += 1
        note_change(self, node)
        return node


def note_change(tree: PrefixTree, node: Node) -> None:
    """Note that ``node`` came, goes, is cut, or its snapshot changed."""
    tree.change_count += 1
    for changed in tree.watches:
        changed.add(node.id)


def salt_of(tree: PrefixTree, node: Node) -> str:
    """Return the salt of a node of ``tree``."""
    while node.parent is not None:
        node = node.edge.nodes[0].parent or node.parent
    return tree._salts[node.id]
