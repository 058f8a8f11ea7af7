"""Negative controls of the audit: each way to be wrong is made by hand, and must be seen and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.memory.geometry import close_now, open_now, small_memory
from weft.memory.arena import FrameKind
from weft.memory.memory import Memory
from weft.memory.transaction import Books
from weft.units import FrameId, PageId, SeqId, SlotId

ONE, TWO = SeqId(1), SeqId(2)


def sound() -> Memory:
    """Six frames of 4 pages or 2 slots: pages in frames 1 and 3, slots in 0 and 2, 4 and 5 free."""
    memory = small_memory(4, 2, 6)
    open_now(memory, (1, 40), (9, 1), (2, 17))
    close_now(memory, 9)
    memory.audit()
    return memory


def a_page_with_two_owners(books: Books) -> None:
    books.leases[TWO].pages[0] = books.leases[ONE].pages[0]


def a_page_held_twice_by_one(books: Books) -> None:
    books.leases[ONE].pages[1] = books.leases[ONE].pages[0]


def a_page_that_no_owner_names(books: Books) -> None:
    books.leases[ONE].pages.pop()


def a_page_beyond_the_arena(books: Books) -> None:
    books.leases[ONE].pages.append(PageId(99))


def a_count_too_high(books: Books) -> None:
    books.pages.holders[books.leases[ONE].pages[0]] = 2


def a_count_left_on_a_free_page(books: Books) -> None:
    books.pages.holders[20] = 1


def a_lease_that_vanished(books: Books) -> None:
    del books.leases[TWO]


def a_lease_under_another_name(books: Books) -> None:
    books.leases[TWO].seq = ONE


def a_slot_with_two_owners(books: Books) -> None:
    books.leases[TWO].slot, books.leases[TWO].epoch = books.leases[ONE].slot, books.leases[ONE].epoch


def a_slot_of_an_old_epoch(books: Books) -> None:
    books.slots.epochs[books.leases[ONE].slot] += 1


def a_slot_that_is_free(books: Books) -> None:
    books.leases[TWO].slot = SlotId(10)


def a_free_page_lost(books: Books) -> None:
    packing = books.pages.packing
    next(stack for stack in packing.stacks.values() if stack).pop()


def a_page_free_and_held(books: Books) -> None:
    page = books.leases[ONE].pages[0]
    books.pages.packing.stacks[FrameId(page // 4)].append(page)


def a_page_free_twice(books: Books) -> None:
    stack = next(stack for stack in books.pages.packing.stacks.values() if len(stack) > 1)
    stack[0] = stack[1]


def a_free_page_in_another_frame(books: Books) -> None:
    next(stack for stack in books.pages.packing.stacks.values() if stack)[0] = PageId(23)


def a_held_page_in_a_frame_of_slots(books: Books) -> None:
    del books.pages.packing.stacks[FrameId(books.leases[ONE].pages[0] // 4)]


def a_frame_kept_while_empty(books: Books) -> None:
    frame = books.arena.free[None].pop()
    books.pages.packing.add(frame)


def a_frame_in_the_wrong_bucket(books: Books) -> None:
    by_used = books.slots.packing.by_used
    by_used[0].update(by_used[1])
    by_used[1].clear()


def a_frame_in_two_buckets(books: Books) -> None:
    books.slots.packing.by_used[0].update(books.slots.packing.by_used[1])


def a_bucket_of_a_frame_that_is_not_there(books: Books) -> None:
    books.slots.packing.by_used[1][FrameId(5)] = None


def a_bit_of_an_empty_bucket(books: Books) -> None:
    books.pages.packing.occupied ^= 1


def a_wrong_total_of_held_pages(books: Books) -> None:
    books.pages.packing.held_count += 1


def a_wrong_total_of_free_slots(books: Books) -> None:
    books.slots.packing.free_count -= 1


def a_frame_leaked(books: Books) -> None:
    books.arena.free[None].pop()


def a_frame_free_twice(books: Books) -> None:
    books.arena.free[FrameKind.SLOTS].append(books.arena.free[None][0])


def a_frame_free_and_claimed(books: Books) -> None:
    books.arena.free[FrameKind.PAGES].append(next(iter(books.pages.packing.stacks)))


def a_frame_beyond_the_arena(books: Books) -> None:
    books.arena.free[None].append(FrameId(6))


CORRUPTIONS: list[tuple[Callable[[Books], None], str]] = [
    (a_page_with_two_owners, r"page \d+ counts \d holders, its owners are \d"),
    (a_page_held_twice_by_one, "sequence 1 holds a page twice"),
    (a_page_that_no_owner_names, "counts 1 holders, its owners are 0"),
    (a_page_beyond_the_arena, "page 99 is owned and does not exist"),
    (a_count_too_high, "counts 2 holders, its owners are 1"),
    (a_count_left_on_a_free_page, "page 20 counts 1 holders, its owners are 0"),
    (a_lease_that_vanished, "counts 1 holders, its owners are 0"),
    (a_lease_under_another_name, "the lease of sequence 2 says 1"),
    (a_slot_with_two_owners, "a slot has two owners|slot . counts . holders"),
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
def test_the_audit_sees(corrupt: Callable[[Books], None], complaint: str) -> None:
    memory = sound()
    corrupt(memory._books)
    with pytest.raises(AssertionError, match=complaint):
        memory.audit()


@pytest.mark.parametrize("corrupt", [a_count_left_on_a_free_page, a_page_free_twice])
def test_taking_a_page_that_is_not_free_is_caught_before_any_audit(corrupt: Callable[[Books], None]) -> None:
    """Asserts in pairs: a commit that would give a held page to a second owner stops itself."""
    memory = small_memory(4, 0, 6)
    open_now(memory, (1, 16))
    if corrupt is a_page_free_twice:
        stack = memory._books.pages.packing.stacks[FrameId(0)]
        stack[-1] = memory.lease(ONE).pages[0]
    else:
        memory._books.pages.holders[1] = 1
    with pytest.raises(AssertionError, match="is held and was drafted as free"):
        open_now(memory, (5, 64))


def test_giving_a_page_back_twice_is_caught() -> None:
    memory = sound()
    pages = list(memory.lease(ONE).pages)
    memory._books.pages.drop(pages)
    with pytest.raises(AssertionError, match="is free and was given back"):
        memory._books.pages.drop(pages)


def test_a_shared_page_is_freed_by_its_last_holder() -> None:
    """Counts carry shared pages: the audit accepts two owners when the count says two."""
    memory = small_memory(4, 0, 3)
    open_now(memory, (1, 48), (2, 16))
    books = memory._books
    shared = books.leases[ONE].pages[0]
    books.leases[TWO].pages.insert(0, shared)
    books.pages.holders[shared] += 1
    memory.audit()
    close_now(memory, 1)
    memory.audit()
    assert memory.lease(TWO).pages[0] == shared
    close_now(memory, 2)
    memory.audit()
    assert memory.usage().frames_free == 3
