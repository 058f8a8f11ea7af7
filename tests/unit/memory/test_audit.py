"""Negative controls of the audit: each way to be wrong is made by hand, and must be seen and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.memory.geometry import close_now, open_now, small_memory
from weft.memory.frames.arena import of_lease, of_tree
from weft.memory.memory import Memory
from weft.memory.prefix.compressed_kv import CompressedPages
from weft.memory.prefix.edge import Node
from weft.memory.state import MemoryState, _give_back
from weft.memory.values import Eviction, FrameKind, NodeId
from weft.units import PAD, FrameId, PageId, SeqId, SlotId

ONE, TWO = SeqId(1), SeqId(2)


def sound() -> Memory:
    """Six frames of 4 pages or 2 slots: pages in frames 1 and 3, slots in 0 and 2, 4 and 5 free."""
    memory = small_memory(4, 2, 6)
    open_now(memory, (1, 40), (9, 1), (2, 17))
    close_now(memory, 9)
    memory.audit()
    return memory


def a_page_with_two_owners(memory: MemoryState) -> None:
    memory.leases[TWO].pages[0] = memory.leases[ONE].pages[0]


def a_page_held_twice_by_one(memory: MemoryState) -> None:
    memory.leases[ONE].pages[1] = memory.leases[ONE].pages[0]


def a_page_that_no_owner_names(memory: MemoryState) -> None:
    memory.leases[ONE].pages.pop()


def a_page_beyond_the_arena(memory: MemoryState) -> None:
    memory.leases[ONE].pages.append(PageId(99))


def a_page_recorded_as_of_another(memory: MemoryState) -> None:
    memory.pages.owners[memory.leases[ONE].pages[0]] = of_lease(TWO)


def a_page_recorded_at_another_place(memory: MemoryState) -> None:
    memory.pages.indexes[memory.leases[ONE].pages[0]] += 1


def an_owner_of_a_free_page(memory: MemoryState) -> None:
    memory.pages.owners[20] = of_lease(ONE)


def a_slot_recorded_as_of_another(memory: MemoryState) -> None:
    memory.slots.owners[memory.leases[ONE].slot] = of_lease(TWO)


def a_lease_that_vanished(memory: MemoryState) -> None:
    del memory.leases[TWO]


def a_lease_under_another_name(memory: MemoryState) -> None:
    memory.leases[TWO].seq = ONE


def a_slot_with_two_owners(memory: MemoryState) -> None:
    memory.leases[TWO].slot, memory.leases[TWO].epoch = memory.leases[ONE].slot, memory.leases[ONE].epoch


def a_slot_of_an_old_epoch(memory: MemoryState) -> None:
    memory.slots.epochs[memory.leases[ONE].slot] += 1


def a_slot_that_is_free(memory: MemoryState) -> None:
    memory.leases[TWO].slot = SlotId(10)


def a_free_page_lost(memory: MemoryState) -> None:
    packing = memory.pages.packing
    next(stack for stack in packing.stacks.values() if stack).pop()


def a_page_free_and_held(memory: MemoryState) -> None:
    page = memory.leases[ONE].pages[0]
    memory.pages.packing.stacks[FrameId(page // 4)].append(page)


def a_page_free_twice(memory: MemoryState) -> None:
    stack = next(stack for stack in memory.pages.packing.stacks.values() if len(stack) > 1)
    stack[0] = stack[1]


def a_free_page_in_another_frame(memory: MemoryState) -> None:
    next(stack for stack in memory.pages.packing.stacks.values() if stack)[0] = PageId(23)


def a_held_page_in_a_frame_of_slots(memory: MemoryState) -> None:
    del memory.pages.packing.stacks[FrameId(memory.leases[ONE].pages[0] // 4)]


def a_frame_kept_while_empty(memory: MemoryState) -> None:
    frame = memory.arena.free[None].pop()
    memory.pages.packing.add(frame)


def a_frame_in_the_wrong_bucket(memory: MemoryState) -> None:
    by_used = memory.slots.packing.by_used
    by_used[0].update(by_used[1])
    by_used[1].clear()


def a_frame_in_two_buckets(memory: MemoryState) -> None:
    memory.slots.packing.by_used[0].update(memory.slots.packing.by_used[1])


def a_bucket_of_a_frame_that_is_not_there(memory: MemoryState) -> None:
    memory.slots.packing.by_used[1][FrameId(5)] = None


def a_bit_of_an_empty_bucket(memory: MemoryState) -> None:
    memory.pages.packing.occupied ^= 1


def a_wrong_total_of_held_pages(memory: MemoryState) -> None:
    memory.pages.packing.held_count += 1


def a_wrong_total_of_free_slots(memory: MemoryState) -> None:
    memory.slots.packing.free_count -= 1


def a_frame_leaked(memory: MemoryState) -> None:
    memory.arena.free[None].pop()


def a_frame_free_twice(memory: MemoryState) -> None:
    memory.arena.free[FrameKind.SLOTS].append(memory.arena.free[None][0])


def a_frame_free_and_claimed(memory: MemoryState) -> None:
    memory.arena.free[FrameKind.PAGES].append(next(iter(memory.pages.packing.stacks)))


def a_frame_beyond_the_arena(memory: MemoryState) -> None:
    memory.arena.free[None].append(FrameId(6))


def cached() -> Memory:
    """As ``sound``, and a tree: [0..32) with a snapshot, a tail below it, a branch of bare KV, and sequence
    3 reading the front."""
    memory = small_memory(4, 2, 12, cache=True)
    for tokens in ([0] * 40, [0] * 32, [0] * 16 + [1] * 16):
        open_now(memory, (1, len(tokens)))
        transaction = memory.transaction()
        transaction.close(ONE, keep=np.asarray(tokens, np.int32))
        memory.commit(transaction.seal())
    branch = next(node for node in memory._state.cache.tree.nodes() if node.tokens[:4] == b"\1\0\0\0")
    _give_back(memory._state, memory._state.cache.evict(Eviction(branch.id, "state")))
    open_now(memory, (1, 40), (2, 17))
    transaction = memory.transaction()
    assert transaction.open(SeqId(3), memory.match([0] * 33, salt=""), 50)
    assert transaction.save(ONE, 16) is not None
    memory.commit(transaction.seal())
    memory.audit()
    return memory


def nodes(memory: MemoryState) -> dict[str, Node]:
    """By what they are: the front, the reader's, the tail, the bare branch."""
    found = {}
    for node in memory.cache.tree.nodes():
        name = "root" if node.parent is None else "tail" if node.is_tail else "bare" if node.bare else "front"
        found["middle" if node.slot != PAD and name == "front" else name] = node
    return found


def a_reader_too_many(memory: MemoryState) -> None:
    nodes(memory)["front"].holds += 1


def a_reader_of_another_node(memory: MemoryState) -> None:
    memory.leases[SeqId(3)].shared_node = nodes(memory)["front"].id


def a_reader_of_no_node(memory: MemoryState) -> None:
    memory.leases[SeqId(3)].shared_node = NodeId(PAD)


def a_reader_of_other_pages(memory: MemoryState) -> None:
    pages = memory.leases[SeqId(3)].pages
    pages[0], pages[1] = pages[1], pages[0]


def a_reader_of_another_namespace(memory: MemoryState) -> None:
    memory.leases[SeqId(3)].salt = "other"


def a_page_of_a_node_and_a_lease(memory: MemoryState) -> None:
    nodes(memory)["bare"].edge.pages[0] = memory.leases[ONE].pages[0]


def a_page_that_its_node_forgot(memory: MemoryState) -> None:
    nodes(memory)["bare"].edge.pages.pop()


def a_snapshot_of_an_old_epoch(memory: MemoryState) -> None:
    nodes(memory)["middle"].epoch += 1


def a_snapshot_that_is_not_filed(memory: MemoryState) -> None:
    del memory.cache.order.states[nodes(memory)["middle"].id]


def bare_kv_that_is_not_filed(memory: MemoryState) -> None:
    memory.cache.order.bare.clear()


def a_tail_that_lost_its_snapshot(memory: MemoryState) -> None:
    tail = nodes(memory)["tail"]
    slot, epoch = memory.cache.tree.take_slot(tail)
    del memory.cache.order.states[tail.id]
    memory.cache.order.bare[tail.id] = tail
    memory.slots.drop(slot, epoch)


def a_tail_not_counted(memory: MemoryState) -> None:
    nodes(memory)["middle"].tail_count = 0


def a_node_at_the_wrong_position(memory: MemoryState) -> None:
    nodes(memory)["bare"].start += 16


def a_node_that_is_not_on_its_edge(memory: MemoryState) -> None:
    nodes(memory)["bare"].edge.nodes.clear()


def a_edge_that_nobody_knows(memory: MemoryState) -> None:
    del memory.cache.tree.edges[nodes(memory)["bare"].edge.id]


def a_edge_with_a_page_too_many(memory: MemoryState) -> None:
    edge = nodes(memory)["front"].edge
    edge.pages.append(edge.pages[0])


def a_edge_out_of_order(memory: MemoryState) -> None:
    assert nodes(memory)["middle"].edge is nodes(memory)["front"].edge
    nodes(memory)["middle"].edge.nodes.reverse()


def a_snapshot_recorded_as_of_another(memory: MemoryState) -> None:
    memory.slots.owners[nodes(memory)["middle"].slot] = of_tree(nodes(memory)["tail"].id)


def a_node_under_the_wrong_key(memory: MemoryState) -> None:
    children = nodes(memory)["front"].children
    keys = list(children)
    children[keys[0]], children[keys[1]] = children[keys[1]], children[keys[0]]


def a_wrong_total_of_cached_pages(memory: MemoryState) -> None:
    memory.cache.tree.page_count += 1


def a_wrong_total_of_snapshots(memory: MemoryState) -> None:
    memory.cache.tree.slot_count += 1


def a_wrong_total_of_read_pages(memory: MemoryState) -> None:
    memory.cache.tree.held_page_count += 1


def a_node_missing_in_the_index(memory: MemoryState) -> None:
    del memory.cache.tree.by_id[nodes(memory)["bare"].id]


def compressed_kv_of_a_node_that_is_gone(memory: MemoryState) -> None:
    memory.cache.compressed_kv.by_node[NodeId(99)] = CompressedPages([], 0, 0, -1, 0)


def a_root_of_nothing(memory: MemoryState) -> None:
    memory.cache.tree.root("nobody")


def a_tap_that_is_forgotten(memory: MemoryState) -> None:
    memory.leases[ONE].snapshots.clear()


CACHE_CORRUPTIONS: list[tuple[Callable[[MemoryState], None], str]] = [
    (a_reader_too_many, "counts 2 leases, it has 1"),
    (a_reader_of_another_node, "holds a node that ends at 16"),
    (a_reader_of_no_node, "reads 32 tokens of no node"),
    (a_reader_of_other_pages, "reads other pages than those of its node"),
    (a_reader_of_another_namespace, "sequence 3 reads another salt"),
    (a_page_of_a_node_and_a_lease, r"page \d+ has two owners"),
    (a_page_that_its_node_forgot, r"page \d+ is recorded as of -\d+, its owner is 0"),
    (a_snapshot_of_an_old_epoch, "stale claim on slot"),
    (a_snapshot_that_is_not_filed, "the order of snapshots is not that of the tree"),
    (bare_kv_that_is_not_filed, "the order of bare KV is not that of the tree"),
    (a_tail_that_lost_its_snapshot, "tail . has no snapshot"),
    (a_tail_not_counted, "has 1 tails, counted 0"),
    (a_node_at_the_wrong_position, r"edge \d+ has no node from position 16 on|is recorded as of -\d+, its"),
    (a_node_that_is_not_on_its_edge, "node . is not on its edge"),
    (a_edge_that_nobody_knows, "edges have nodes that the tree has not"),
    (a_edge_with_a_page_too_many, "has 3 pages and not 2"),
    (a_edge_out_of_order, r"edge \d+ has no node from position 0 on"),
    (a_snapshot_recorded_as_of_another, r"slot \d+ is recorded as of -\d+, its owner is -\d+"),
    (a_node_under_the_wrong_key, "is not under its key in its parent"),
    (a_wrong_total_of_cached_pages, "the tree has . pages, counted"),
    (a_wrong_total_of_snapshots, "the tree has . slots, counted"),
    (a_wrong_total_of_read_pages, "pages are read, counted wrong"),
    (a_node_missing_in_the_index, "the index of nodes and the tree differ"),
    (compressed_kv_of_a_node_that_is_gone, "the KV of a node is compressed that is not in the tree"),
    (a_root_of_nothing, "has nothing below"),
    (a_tap_that_is_forgotten, r"slot \d+ is recorded as of 2, its owner is 0"),
]


CORRUPTIONS: list[tuple[Callable[[MemoryState], None], str]] = [
    (a_page_with_two_owners, r"page \d+ has two owners, 2 and 3"),
    (a_page_held_twice_by_one, "sequence 1 holds a page twice"),
    (a_page_that_no_owner_names, "is recorded as of 2, its owner is 0"),
    (a_page_beyond_the_arena, "page 99 is owned and does not exist"),
    (a_page_recorded_as_of_another, r"page \d+ is recorded as of 3, its owner is 2"),
    (a_page_recorded_at_another_place, "is number 0 of its sequence, recorded as 1"),
    (an_owner_of_a_free_page, "page 20 is recorded as of 2, its owner is 0"),
    (a_slot_recorded_as_of_another, r"slot \d+ is recorded as of 3, its owner is 2"),
    (a_lease_that_vanished, "is recorded as of 3, its owner is 0"),
    (a_lease_under_another_name, "the lease of sequence 2 says 1"),
    (a_slot_with_two_owners, r"slot \d+ has two owners, 2 and 3"),
    (a_slot_of_an_old_epoch, "stale claim on slot"),
    (a_slot_that_is_free, "stale claim on slot 10: it is free"),
    (a_free_page_lost, "leaked"),
    (a_page_free_and_held, "both free and held"),
    (a_page_free_twice, "has a page free twice"),
    (a_free_page_in_another_frame, "has a free page of another frame"),
    (a_held_page_in_a_frame_of_slots, "in a frame that is not of pages"),
    (a_frame_kept_while_empty, "is empty and was not given back"),
    (a_frame_in_the_wrong_bucket, "is in bucket 0"),
    (a_frame_in_two_buckets, "a slot frame is in two buckets"),
    (a_bucket_of_a_frame_that_is_not_there, "a bucket names a frame that is not of slots"),
    (a_bit_of_an_empty_bucket, "page buckets 1100 are occupied, recorded as 1101"),
    (a_wrong_total_of_held_pages, "5 pages are held, counted 6"),
    (a_wrong_total_of_free_slots, "2 slots are free, counted 1"),
    (a_frame_leaked, "frame 4 is free nowhere and claimed by none"),
    (a_frame_free_twice, "is in two places"),
    (a_frame_free_and_claimed, "is in two places"),
    (a_frame_beyond_the_arena, "a frame beyond the arena"),
]


@pytest.mark.parametrize(("corrupt", "complaint"), CORRUPTIONS, ids=[c.__name__ for c, _ in CORRUPTIONS])
def test_the_audit_sees(corrupt: Callable[[MemoryState], None], complaint: str) -> None:
    memory = sound()
    corrupt(memory._state)
    with pytest.raises(AssertionError, match=complaint):
        memory.audit()


@pytest.mark.parametrize(("corrupt", "complaint"), CACHE_CORRUPTIONS, ids=[c.__name__ for c, _ in CACHE_CORRUPTIONS])
def test_the_audit_sees_in_the_cache(corrupt: Callable[[MemoryState], None], complaint: str) -> None:
    memory = cached()
    corrupt(memory._state)
    with pytest.raises(AssertionError, match=complaint):
        memory.audit()


@pytest.mark.parametrize("corrupt", [an_owner_of_a_free_page, a_page_free_twice])
def test_taking_a_page_that_is_not_free_is_caught_before_any_audit(corrupt: Callable[[MemoryState], None]) -> None:
    """Asserts in pairs: a commit that would give a held page to a second owner stops itself."""
    memory = small_memory(4, 0, 6)
    open_now(memory, (1, 16))
    if corrupt is a_page_free_twice:
        stack = memory._state.pages.packing.stacks[FrameId(0)]
        stack[-1] = memory.lease(ONE).pages[0]
    else:
        memory._state.pages.owners[1] = of_lease(ONE)
    with pytest.raises(AssertionError, match="is held and was planned as free"):
        open_now(memory, (5, 64))


def test_giving_a_page_back_twice_is_caught() -> None:
    memory = sound()
    pages = list(memory.lease(ONE).pages)
    memory._state.pages.drop(pages)
    with pytest.raises(AssertionError, match="is free and was given back"):
        memory._state.pages.drop(pages)
