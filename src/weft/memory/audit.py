"""The recount: law L1 checked from the owners, trusting no counter.

    leases, nodes --own--> pages, slots --lie in--> frames --are--> claimed by one packing, or free in
                                                                    one stack

Owners are walked first: how often each page and slot is named by a lease as its own, or by a node of the
prefix tree; what a lease reads of the tree is compared with the way to the node that it holds. Then every
record that was kept along the way is compared with that: holder counts, free stacks, buckets, totals,
free frames, orders of eviction, counts of readers. Any two that disagree are a leak, a double owner or a
wrong count, and the message says which and where.

It reads everything once: linear in the arena, for property tests after each operation and for production
when the engine idles. It writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from weft.memory.arena import Arena
from weft.memory.books import Books
from weft.memory.cache import PrefixCache
from weft.memory.lease import Lease
from weft.memory.packing import Item, Packing
from weft.memory.tree import PAGE_KEY_BYTES, Node, NodeId
from weft.units import PAD, FrameId, PageId, SeqId, SlotId


def audit(books: Books) -> None:
    """Raises AssertionError where the books do not add up."""
    page_owners: Counter[PageId] = Counter()
    slot_owners: Counter[SlotId] = Counter()
    for seq, lease in books.leases.items():
        assert lease.seq == seq, f"the lease of sequence {seq} says {lease.seq}"
        page_owners.update(lease.pages[books.plan.pages_for(lease.shared_tokens):])
        if books.plan.slots_per_frame:
            books.slots.check(lease.slot, lease.epoch)
            slot_owners[lease.slot] += 1
        else:
            assert lease.slot == PAD, f"sequence {seq} holds slot {lease.slot} of a model without states"
        for tap in lease.taps:
            books.slots.check(tap.slot, tap.epoch)
            slot_owners[tap.slot] += 1
        assert len(set(lease.pages)) == len(lease.pages), f"sequence {seq} holds a page twice"
    for node in books.cache.tree.nodes():
        page_owners.update(node.pages)
        if node.slot != PAD:
            books.slots.check(node.slot, node.epoch)
            slot_owners[node.slot] += 1
    _audit_holders("page", books.pages.holders, page_owners)
    _audit_holders("slot", books.slots.holders, slot_owners)
    assert all(count == 1 for count in slot_owners.values()), "a slot has two owners"
    _audit_packing("page", books.pages.packing, page_owners)
    _audit_packing("slot", books.slots.packing, slot_owners)
    _audit_frames(books.arena, books.pages.packing, books.slots.packing)
    _audit_tree(books.cache)
    _audit_holds(books.cache, books.leases)


def _audit_holders(what: str, holders: Sequence[int], owners: Mapping[Item, int]) -> None:
    for item in owners:
        assert 0 <= item < len(holders), f"{what} {item} is owned and does not exist"
    counts: Mapping[int, int] = owners  # type: ignore[assignment]
    for index, count in enumerate(holders):
        named = counts.get(index, 0)
        assert count == named, f"{what} {index} counts {count} holders, its owners are {named}"


def _audit_packing(what: str, packing: Packing[Item], owners: Mapping[Item, int]) -> None:
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
        assert all(item // packing.per_frame == frame for item in free), (
            f"{what} frame {frame} has a free {what} of another frame")
        assert used + len(free) == packing.per_frame, (
            f"{what} frame {frame}: {used} held and {len(free)} free are not {packing.per_frame}: leaked")
        bucket = buckets.get(frame, packing.per_frame)
        assert bucket == used, f"{what} frame {frame} has {used} held and is in bucket {bucket}"
        free_count += len(free)
    occupied = sum(1 << used for used, bucket in enumerate(packing.by_used) if bucket)
    assert packing.occupied == occupied, (
        f"{what} buckets {occupied:b} are occupied, recorded as {packing.occupied:b}")
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
        if node.parent is not None:
            _audit_node(cache, node, node.parent)
        else:
            assert node.children, f"root {node.id} has nothing below"
            assert node.slot == PAD, f"root {node.id} has a checkpoint"
        tails = sum(child.is_tail for child in node.children.values())
        assert node.tail_count == tails, f"node {node.id} has {tails} tails, counted {node.tail_count}"
    pages = sum(len(node.pages) for node in nodes.values())
    assert tree.page_count == pages, f"the tree has {pages} pages, counted {tree.page_count}"
    states = {node.id for node in nodes.values() if node.slot != PAD}
    assert tree.slot_count == len(states), f"the tree has {len(states)} slots, counted {tree.slot_count}"
    assert set(order.states) == states, "the order of checkpoints is not that of the tree"
    bare = {node.id for node in nodes.values() if node.bare and node.parent is not None}
    assert set(order.bare) == bare, "the order of bare KV is not that of the tree"
    for node_id, node in (*order.states.items(), *order.bare.items()):
        assert nodes[node_id] is node, f"the order names a node {node_id} that is not in the tree"


def _audit_node(cache: PrefixCache, node: Node, parent: Node) -> None:
    name = f"node {node.id}"
    key = node.tokens if node.is_tail else node.tokens[:PAGE_KEY_BYTES]
    assert parent.children.get(key) is node, f"{name} is not where its parent looks for it"
    assert node.start == parent.end, f"{name} begins at {node.start}, its parent ends at {parent.end}"
    assert node.tokens, f"{name} has no tokens"
    if node.is_tail:
        assert not node.children, f"tail {node.id} has children"
        assert node.slot != PAD, f"tail {node.id} has no checkpoint"
        page_count = 1
    else:
        assert len(node.tokens) % PAGE_KEY_BYTES == 0, f"{name} ends inside a page"
        page_count = len(node.tokens) // PAGE_KEY_BYTES
    assert len(node.pages) == (page_count if cache.tree.paged else 0), f"{name} has {len(node.pages)} pages"
    assert cache.tree.paged or not node.bare, f"{name} has no pages, and leads to no checkpoint"


def _audit_holds(cache: PrefixCache, leases: Mapping[SeqId, Lease]) -> None:
    """Who reads what of the tree, recounted from the leases."""
    holds: Counter[NodeId] = Counter()
    for seq, lease in leases.items():
        held = cache.node(lease)
        if held is None:
            assert lease.shared_tokens == 0, f"sequence {seq} reads {lease.shared_tokens} tokens of no node"
            continue
        assert held.end == lease.shared_tokens, f"sequence {seq} holds a node that ends at {held.end}"
        way = cache.tree.path_pages(held, 0, held.end)
        assert lease.pages[:len(way)] == way, f"sequence {seq} reads other pages than those of its node"
        at: Node | None = held
        while at is not None:
            holds[at.id] += 1
            if at.parent is None:
                assert cache.tree.roots.get(lease.salt) is at, f"sequence {seq} reads another namespace"
            at = at.parent
    for node in cache.tree.nodes():
        readers = holds[node.id]
        assert node.holds == readers, f"node {node.id} counts {node.holds} leases, it has {readers}"
    held_pages = sum(len(node.pages) for node in cache.tree.nodes() if node.holds)
    assert cache.tree.held_page_count == held_pages, f"{held_pages} pages are read, counted wrong"
