"""Frames change kind, and their bytes are zeroed then and only then (law L6)."""

from __future__ import annotations

from tests.unit.memory.geometry import close_now, open_in, open_now, small_memory
from weft.memory.frames.arena import (
    FREE,
    kv_node_of,
    lease_of,
    of_compressed_kv,
    of_compressed_state,
    of_lease,
    of_tree,
    state_node_of,
)
from weft.memory.values import FrameKind
from weft.units import SeqId


def test_a_frame_never_used_is_zeroed_once() -> None:
    memory = small_memory(pages_per_frame=4, slots_per_frame=2, frame_count=3)
    first = open_now(memory, (1, 16))
    assert set(first.arena_work.zero_frames) == {0, 1}, "one frame of slots, one of pages"
    assert open_now(memory, (2, 32)).arena_work.zero_frames == (), "in use: the second sequence joins them"


def test_a_frame_that_returns_to_its_own_kind_is_not_zeroed() -> None:
    memory = small_memory(4, 2, 2)
    open_now(memory, (1, 64))
    close_now(memory, 1)
    assert open_now(memory, (2, 64)).arena_work.zero_frames == ()


def test_a_frame_that_changes_kind_is_zeroed_each_time_and_both_ways() -> None:
    memory = small_memory(4, 1, 3)
    open_now(memory, (1, 128))
    close_now(memory, 1)
    to_slots = open_now(memory, (2, 1), (3, 1))
    assert [(claim.former_kind, claim.kind) for claim in to_slots.frames if claim.needs_zero] == [
        (FrameKind.PAGES, FrameKind.SLOTS)
    ]
    assert len(to_slots.arena_work.zero_frames) == 1
    close_now(memory, 2, 3)
    to_pages = open_now(memory, (4, 128))
    assert [(claim.former_kind, claim.kind) for claim in to_pages.frames if claim.needs_zero] == [
        (FrameKind.SLOTS, FrameKind.PAGES)
    ]
    assert len(to_pages.arena_work.zero_frames) == 1


def test_claims_prefer_bytes_of_their_own_kind_then_untouched_frames_then_the_other_kind() -> None:
    memory = small_memory(1, 1, 4)
    open_now(memory, (1, 16))  # a frame each of slots and pages; two untouched
    close_now(memory, 1)
    order = [(claim.kind, claim.former_kind) for claim in open_now(memory, (2, 48)).frames]
    assert order == [
        (FrameKind.SLOTS, FrameKind.SLOTS),
        (FrameKind.PAGES, FrameKind.PAGES),
        (FrameKind.PAGES, None),
        (FrameKind.PAGES, None),
    ]
    close_now(memory, 2)
    transaction = memory.transaction()
    assert open_in(transaction, memory, 3, 16)
    assert open_in(transaction, memory, 4, 16)
    assert [claim.former_kind for claim in transaction.seal().frames if claim.needs_zero] == [FrameKind.PAGES]


def test_pages_come_from_the_fullest_frame_so_that_the_emptiest_drains() -> None:
    memory = small_memory(4, 0, 3)
    open_now(memory, (1, 48), (2, 16), (3, 16), (4, 32), (5, 16))  # frames: 1112, 3445, none
    close_now(memory, 3)
    close_now(memory, 1)  # frames: ...2, .445, none
    taken = open_now(memory, (6, 16)).pages
    assert [page // 4 for page in taken] == [1], "the one hole of the fuller frame"
    close_now(memory, 2)
    assert memory.usage().frames_free == 2


def test_all_holes_are_used_before_a_frame_is_claimed() -> None:
    memory = small_memory(3, 0, 4)
    open_now(memory, *((seq, 16) for seq in range(9)))  # three full frames
    close_now(memory, 0, 3, 4, 7)
    transaction = memory.transaction()
    assert open_in(transaction, memory, 20, 4 * 16)
    assert transaction.seal().frames == ()
    assert transaction.extend(SeqId(20), 5 * 16)
    assert [claim.frame for claim in transaction.seal().frames] == [3]


def test_free_frames_serve_either_kind() -> None:
    """States starve in split pools while pages are free; here the same frames can hold only states or
    nearly only pages."""
    memory = small_memory(8, 1, 6)
    open_now(memory, *((seq, 1) for seq in range(5)))
    assert memory.usage().frames_of_slots == 5
    close_now(memory, *range(5))
    open_now(memory, (9, 5 * 8 * 16))
    assert memory.usage().frames_of_pages == 5


def test_pages_that_come_back_are_handed_out_in_ascending_order_again() -> None:
    memory = small_memory(8, 0, 1)
    open_now(memory, (1, 16), (2, 5 * 16))
    close_now(memory, 2)
    assert open_now(memory, (3, 5 * 16)).pages == (1, 2, 3, 4, 5)


def test_an_owner_of_a_page_is_of_one_kind() -> None:
    kinds = (of_lease(SeqId(5)), of_tree(5), of_compressed_kv(5), of_compressed_state(5), FREE)
    assert [kv_node_of(owner) for owner in kinds] == [None, None, 5, None, None]
    assert [state_node_of(owner) for owner in kinds] == [None, None, None, 5, None]
    assert [lease_of(owner) for owner in kinds[:-1]] == [5, None, None, None]
