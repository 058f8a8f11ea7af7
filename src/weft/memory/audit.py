"""The audit counts pages, slots and frames again from their owners and compares all records with that (law L1).

    leases, nodes --own--> pages, slots --in--> frames --are--> claimed by one packing, or free in
                                                                one stack

The audit walks the owners first: which pages and slots a lease or a node of the prefix tree names as its own.
The pages that a lease reads are compared with the path to the node that it holds. Then every record is
compared with that: owners, free stacks, buckets, totals, free frames, edges, orders of eviction, counts of
readers. A difference is a leak, a double owner or a wrong count, and the message says which and where.

It reads everything once, in time linear in the arena, and writes nothing. Property tests call it after each operation,
and an engine when it has fallen idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from weft.memory.frames.arena import (
    FREE,
    Arena,
    Item,
    Packing,
    of_compressed_kv,
    of_compressed_state,
    of_lease,
    of_tree,
)
from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.edge import COMPRESSED, TOKEN_BYTES, Node, path_pages
from weft.memory.prefix.tree import PrefixTree
from weft.memory.reservation import Lease
from weft.memory.state import MemoryState
from weft.memory.values import NodeId
from weft.units import PAD, PAGE_TOKENS, FrameId, PageId, SeqId, SlotId, ceil_div


def audit(memory: MemoryState) -> None:
    """Raise AssertionError if memory's state does not add up."""
    page_owners, slot_owners = _Recount("page", memory.pages.owners), _Recount("slot", memory.slots.owners)
    for seq, lease in memory.leases.items():
        assert lease.seq == seq, f"the lease of sequence {seq} says {lease.seq}"
        assert len(set(lease.pages)) == len(lease.pages), f"sequence {seq} holds a page twice"
        for index in range(memory.plan.pages_for(lease.shared_tokens), len(lease.pages)):
            page_owners.add(lease.pages[index], of_lease(seq), index, memory.pages.indexes)
        if memory.plan.slots_per_frame:
            memory.slots.check(lease.slot, lease.epoch)
            slot_owners.add(lease.slot, of_lease(seq))
        else:
            assert lease.slot == PAD, f"sequence {seq} holds slot {lease.slot} of a model without states"
        for snapshot in lease.snapshots:
            memory.slots.check(snapshot.slot, snapshot.epoch)
            slot_owners.add(snapshot.slot, of_lease(seq))
    for node in memory.cache.tree.nodes():
        compressed = memory.cache.compressed_kv.by_node.get(node.id)
        for index, page in enumerate(node.pages, start=node.start // PAGE_TOKENS):
            if compressed is None:
                page_owners.add(page, of_tree(node.edge.id), index, memory.pages.indexes)
        for index, page in enumerate(
            compressed.pages if compressed is not None else (), start=compressed.cut if compressed is not None else 0
        ):
            page_owners.add(page, of_compressed_kv(node.id), index, memory.pages.indexes)
        if node.slot == COMPRESSED:
            for index, page in enumerate(memory.cache.compressed_states.pages.get(node.id, ())):
                page_owners.add(page, of_compressed_state(node.id), index, memory.pages.indexes)
        elif node.slot != PAD:
            memory.slots.check(node.slot, node.epoch)
            slot_owners.add(node.slot, of_tree(node.id))
    page_owners.compare()
    slot_owners.compare()
    _audit_packing("page", memory.pages.packing, page_owners.owners)
    _audit_packing("slot", memory.slots.packing, slot_owners.owners)
    _audit_frames(memory.arena, memory.pages.packing, memory.slots.packing)
    _audit_tree(memory.cache)
    _audit_holds(memory.cache, memory.leases)
    memory.cache.pins.audit()


class _Recount:
    """Owners according to leases and nodes, compared with the owner ``recorded`` for each item."""

    def __init__(self, what: str, recorded: Sequence[int]) -> None:
        self.what = what
        self.recorded = recorded
        self.owners: dict[int, int] = {}

    def add(self, item: int, owner: int, index: int = 0, indexes: Sequence[int] = ()) -> None:
        assert 0 <= item < len(self.recorded), f"{self.what} {item} is owned and does not exist"
        assert item not in self.owners, f"{self.what} {item} has two owners, {self.owners[item]} and {owner}"
        assert not indexes or indexes[item] == index, (
            f"{self.what} {item} is number {index} of its sequence, recorded as {indexes[item]}"
        )
        self.owners[item] = owner

    def compare(self) -> None:
        named_owners = [FREE] * len(self.recorded)
        for item, owner in self.owners.items():
            named_owners[item] = owner
        if named_owners == list(self.recorded):
            return
        for item, owner in enumerate(self.recorded):
            named = self.owners.get(item, FREE)
            assert owner == named, f"{self.what} {item} is recorded as of {owner}, its owner is {named}"


def _audit_packing(what: str, packing: Packing[Item], owners: Mapping[int, int]) -> None:
    held_in: Counter[int] = Counter(item // packing.per_frame for item in owners)
    assert set(held_in) <= set(packing.stacks), f"a held {what} is in a frame that is not of {what}s"
    buckets = {frame: used for used, bucket in enumerate(packing.by_used) for frame in bucket}
    assert sum(len(bucket) for bucket in packing.by_used) == len(buckets), f"a {what} frame is in two buckets"
    assert set(buckets) <= set(packing.stacks), f"a bucket names a frame that is not of {what}s"
    free_count = 0
    for frame, stack in packing.stacks.items():
        used = held_in[frame]
        assert used, f"{what} frame {frame} is empty and was not given back"
        free = set(stack)
        assert len(free) == len(stack), f"{what} frame {frame} has a {what} free twice"
        assert free.isdisjoint(owners), f"{what} frame {frame} has a {what} both free and held"
        assert not free or min(free) // packing.per_frame == frame == max(free) // packing.per_frame, (
            f"{what} frame {frame} has a free {what} of another frame"
        )
        assert used + len(free) == packing.per_frame, (
            f"{what} frame {frame}: {used} held and {len(free)} free are not {packing.per_frame}: leaked"
        )
        bucket = buckets.get(frame, packing.per_frame)
        assert bucket == used, f"{what} frame {frame} has {used} held and is in bucket {bucket}"
        free_count += len(free)
    occupied = sum(1 << used for used, bucket in enumerate(packing.by_used) if bucket)
    assert packing.occupied == occupied, f"{what} buckets {occupied:b} are occupied, recorded as {packing.occupied:b}"
    assert packing.held_count == len(owners), f"{len(owners)} {what}s are held, counted {packing.held_count}"
    assert packing.free_count == free_count, f"{free_count} {what}s are free, counted {packing.free_count}"


def _audit_frames(arena: Arena, pages: Packing[PageId], slots: Packing[SlotId]) -> None:
    places: list[FrameId] = [frame for stack in arena.free.values() for frame in stack]
    places += list(pages.stacks)
    places += list(slots.stacks)
    seen = Counter(places)
    twice = [frame for frame, count in seen.items() if count > 1]
    assert not twice, f"frame {twice[0]} is in two places"
    lost = set(range(arena.frame_count)) - set(seen)
    assert not lost, f"frame {min(lost)} is free nowhere and claimed by none"
    assert len(seen) == arena.frame_count, "a frame beyond the arena"


def _audit_tree(cache: PrefixCache) -> None:
    tree, order = cache.tree, cache.order
    nodes = {node.id: node for node in tree.nodes()}
    assert set(tree.by_id) == set(nodes), "the index of nodes and the tree differ"
    for node in nodes.values():
        assert tree.by_id[node.id] is node, f"node {node.id} is not the one in the index"
        assert node.parent is None or node in node.edge.nodes, f"node {node.id} is not on its edge"
        if node.parent is not None:
            _audit_node(cache, node, node.parent)
        else:
            assert node.children, f"root {node.id} has nothing below"
            assert node.slot == PAD, f"root {node.id} has a snapshot"
        tails = sum(child.is_tail for child in node.children.values())
        assert node.tail_count == tails, f"node {node.id} has {tails} tails, counted {node.tail_count}"
    _audit_edges(tree)
    pages = sum(len(node.pages) for node in nodes.values())
    assert tree.page_count == pages, f"the tree has {pages} pages, counted {tree.page_count}"
    states = {node.id for node in nodes.values() if node.slot != PAD}
    compressed = {node.id for node in nodes.values() if node.slot == COMPRESSED}
    in_slots = states - compressed
    assert tree.slot_count == len(in_slots), f"the tree has {len(in_slots)} slots, counted {tree.slot_count}"
    assert set(order.in_slots) == in_slots, "the order of snapshots in slots is not that of the tree"
    _audit_compressed(cache, compressed)
    _audit_compressed_kv(cache, nodes)
    assert set(order.states) == states, "the order of snapshots is not that of the tree"
    bare = {node.id for node in nodes.values() if node.bare and node.parent is not None}
    assert set(order.bare) == bare, "the order of bare KV is not that of the tree"
    for node_id, node in (*order.states.items(), *order.bare.items()):
        assert nodes[node_id] is node, f"the order names a node {node_id} that is not in the tree"


def _audit_compressed(cache: PrefixCache, nodes: set[NodeId]) -> None:
    compressed, each = cache.compressed_states, cache.plan.compressed_pages
    assert set(compressed.pages) == nodes, "the compressed nodes differ from the tree's"
    for node, pages in compressed.pages.items():
        assert len(pages) == each, f"node {node} is compressed in {len(pages)} pages and not {each}"
    count = each * len(nodes)
    assert compressed.page_count == count, f"compressed states have {count} pages, counted {compressed.page_count}"


def _audit_compressed_kv(cache: PrefixCache, nodes: Mapping[NodeId, Node]) -> None:
    kv = cache.compressed_kv
    assert set(kv.by_node) <= set(nodes), "the KV of a node is compressed that is not in the tree"
    for node_id, compressed in kv.by_node.items():
        node, name = nodes[node_id], f"the compressed KV of node {node_id}"
        ids = [compressed.first_id - index for index in range(compressed.count)]
        assert node.pages == ids, f"{name} has other records than the node"
        assert not node.holds, f"{name} is read"
        assert node.kv_inexact, f"{name} is taken for exact"
        size = compressed.skip_bytes + compressed.count * kv.record_bytes
        pages = ceil_div(size, kv.page_bytes)
        assert compressed.skip_bytes < kv.page_bytes, f"{name} has a page with nothing in it"
        assert len(compressed.pages) == pages, f"{name} is in {len(compressed.pages)} pages and not {pages}"
    count = sum(len(compressed.pages) for compressed in kv.by_node.values())
    assert kv.page_count == count, f"compressed KV has {count} pages, counted {kv.page_count}"
    count = sum(compressed.count for compressed in kv.by_node.values())
    assert kv.record_count == count, f"compressed KV has {count} records, counted {kv.record_count}"
    idle = {node.id for node in nodes.values() if node.parent and not node.holds and not node.is_tail}
    expected = idle - set(kv.by_node) if kv.record_bytes else set()
    assert set(kv.idle) == expected, "the order of KV without readers is not that of the tree"


def _audit_edges(tree: PrefixTree) -> None:
    assert len(tree.by_id) - len(tree.roots) == sum(len(edge.nodes) for edge in tree.edges.values()), (
        "edges have nodes that the tree has not"
    )
    for edge in tree.edges.values():
        name = f"edge {edge.id}"
        assert edge.nodes, f"{name} has no nodes"
        position = edge.start
        for above, node in zip((None, *edge.nodes), edge.nodes, strict=False):
            assert node.edge is edge, f"{name} has a node of another"
            assert node.start == position, f"{name} has no node from position {position} on"
            assert above is None or node.parent is above, f"{name} parts above node {node.id}"
            position = node.end
        pages = -((edge.start - position) // PAGE_TOKENS) if tree.paged else 0
        assert len(edge.pages) == pages, f"{name} has {len(edge.pages)} pages and not {pages}"


def _audit_node(cache: PrefixCache, node: Node, parent: Node) -> None:
    name = f"node {node.id}"
    assert parent.children.get(node.key) is node, f"{name} is not under its key in its parent"
    assert node.start == parent.end, f"{name} begins at {node.start}, its parent ends at {parent.end}"
    assert node.tokens, f"{name} has no tokens"
    assert len(node.tokens) == TOKEN_BYTES * (node.end - node.start), f"{name} lacks tokens"
    if node.is_tail:
        assert not node.children, f"tail {node.id} has children"
        assert node.slot != PAD, f"tail {node.id} has no snapshot"
    else:
        assert node.end % PAGE_TOKENS == 0, f"{name} ends inside a page"
    expected = ceil_div(node.end - node.start, PAGE_TOKENS) if cache.tree.paged else 0
    assert len(node.pages) == node.page_count == expected, f"{name} has {len(node.pages)} pages"
    assert cache.tree.paged or not node.bare, f"{name} has no pages, and leads to no snapshot"


def _audit_holds(cache: PrefixCache, leases: Mapping[SeqId, Lease]) -> None:
    """Compare the readers of each node, recounted from the leases."""
    holds: Counter[NodeId] = Counter()
    for seq, lease in leases.items():
        lease_node = cache.node(lease)
        if lease_node is None:
            assert lease.shared_tokens == 0, f"sequence {seq} reads {lease.shared_tokens} tokens of no node"
            continue
        assert lease_node.end == lease.shared_tokens, f"sequence {seq} holds a node that ends at {lease_node.end}"
        path = path_pages(lease_node, 0, lease_node.end)
        assert lease.pages[: len(path)] == path, f"sequence {seq} reads other pages than those of its node"
        ancestor: Node | None = lease_node
        while ancestor is not None:
            holds[ancestor.id] += 1
            if ancestor.parent is None:
                assert cache.tree.roots.get(lease.salt) is ancestor, f"sequence {seq} reads another salt"
            ancestor = ancestor.parent
    for node in cache.tree.nodes():
        readers = holds[node.id]
        assert node.holds == readers, f"node {node.id} counts {node.holds} leases, it has {readers}"
    held_pages = sum(len(node.pages) for node in cache.tree.nodes() if node.holds)
    assert cache.tree.held_page_count == held_pages, f"{held_pages} pages are read, counted wrong"
