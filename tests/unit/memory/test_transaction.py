"""Transactions change nothing, reservations are caught when stale, pressure is a value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from tests.unit.memory.geometry import close_now, open_in, open_now, picture, small_memory
from weft.memory.memory import Memory
from weft.memory.transaction import Transaction
from weft.memory.values import Lost
from weft.units import PAD, SeqId

ONE, TWO, NEW = SeqId(1), SeqId(2), SeqId(7)


def lived_in() -> Memory:
    """Five frames (4 pages or 3 slots): two sequences, a hole in each kind, frames of both pasts free."""
    memory = small_memory(4, 3, 5)
    open_now(memory, (1, 40), (2, 17), (3, 64), (4, 1))
    close_now(memory, 3)
    close_now(memory, 4)
    return memory


def every_verb(transaction: Transaction, memory: Memory) -> None:
    assert open_in(transaction, memory, NEW, 70)
    assert transaction.extend(ONE, 49)
    assert transaction.extend(NEW, 90)
    transaction.save(TWO, 16)
    transaction.close(TWO)


def test_a_dropped_transaction_changes_nothing() -> None:
    memory = lived_in()
    before = picture(memory)
    for _ in range(3):
        transaction = memory.transaction()
        every_verb(transaction, memory)
        transaction.seal()
    assert picture(memory) == before
    memory.audit()


@pytest.mark.parametrize(
    "verb",
    [
        lambda transaction, memory: open_in(transaction, memory, NEW, 1),
        lambda transaction, memory: transaction.extend(ONE, 49),
        lambda transaction, memory: transaction.close(TWO),
    ],
    ids=["open", "extend", "close"],
)
def test_the_picture_shows_each_verb_once_it_is_committed(verb: Callable[[Transaction, Memory], object]) -> None:
    """The negative control of "changes nothing": what is compared can see every change."""
    memory = lived_in()
    before = picture(memory)
    transaction = memory.transaction()
    verb(transaction, memory)
    memory.commit(transaction.seal())
    after = picture(memory)
    changed = {key for key in before if before[key] != after[key]}
    assert {"version", "packings", "page owners", "leases", "usage"} <= changed
    memory.audit()


def test_what_is_planned_is_what_the_lease_holds() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    held = list(memory.lease(ONE).pages)
    every_verb(transaction, memory)
    gained, new = list(transaction.new_pages(ONE)), list(transaction.new_pages(NEW))
    slot = transaction.slot_of(NEW)
    memory.commit(transaction.seal())
    assert memory.lease(ONE).pages == held + gained
    assert len(gained) == 1
    assert memory.lease(NEW).pages == new
    assert len(new) == 6
    assert memory.lease(NEW).slot == slot
    with pytest.raises(AssertionError, match="sequence 2 has no lease"):
        memory.lease(TWO)


def test_the_same_books_give_the_same_reservation() -> None:
    memory = lived_in()
    transactions = [memory.transaction() for _ in range(2)]
    for transaction in transactions:
        every_verb(transaction, memory)
    assert transactions[0].seal() == transactions[1].seal()


def test_a_reservation_is_a_frozen_value() -> None:
    reservation = lived_in().transaction().seal()
    with pytest.raises(FrozenInstanceError):
        reservation.version = 3  # type: ignore[misc]
    assert hash(reservation) == hash(reservation), "hashable: nothing in it can change"


def test_a_reservation_is_committed_once() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    assert transaction.extend(ONE, 49)
    reservation = transaction.seal()
    memory.commit(reservation)
    before = picture(memory)
    with pytest.raises(AssertionError, match="a reservation of version 3 was committed to version 4"):
        memory.commit(reservation)
    assert picture(memory) == before, "and being caught, it changes nothing"


def test_a_transaction_is_caught_when_another_was_committed_meanwhile() -> None:
    memory = lived_in()
    stale = memory.transaction()
    assert stale.extend(ONE, 49)
    close_now(memory, 2)
    for use in (
        lambda: stale.extend(ONE, 1),
        lambda: open_in(stale, memory, NEW, 1),
        lambda: stale.close(ONE),
        lambda: stale.slot_of(ONE),
        stale.seal,
    ):
        with pytest.raises(AssertionError, match="a transaction of version 3 was used on version 4"):
            use()


def test_a_page_for_each_is_what_extending_one_after_the_other_gives() -> None:
    memory = lived_in()
    together, alone = memory.transaction(), memory.transaction()
    pages = together.extend_by_page([TWO, ONE])
    assert alone.extend(TWO, 33)
    assert alone.extend(ONE, 49)
    assert pages == [*alone.new_pages(TWO), *alone.new_pages(ONE)]
    assert together.seal() == alone.seal()
    memory.commit(together.seal())
    memory.audit()


def test_a_page_for_each_ends_where_the_arena_does() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    room = memory.usage().pages_available
    assert open_in(transaction, memory, NEW, 16 * (room - 1)), "one page is left"
    assert len(transaction.extend_by_page([TWO, ONE])) == 1
    assert transaction.new_pages(TWO)
    assert not transaction.new_pages(ONE)
    with pytest.raises(AssertionError, match="sequence 2 was extended in this transaction"):
        transaction.extend_by_page([TWO])


def test_a_failed_open_takes_nothing() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    assert transaction.extend(ONE, 49)
    sealed = transaction.seal()
    room = memory.usage().pages_available - 1
    assert not open_in(transaction, memory, NEW, 16 * (room + 1))
    assert not open_in(transaction, memory, NEW, 16 * room, headroom_pages=1)
    assert transaction.seal() == sealed
    assert transaction.new_pages(NEW) == []
    assert open_in(transaction, memory, NEW, 16 * room), "one page less and no headroom: it is all there"


def test_a_failed_extend_takes_nothing_and_harms_nobody() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    room = memory.usage().pages_available
    sealed = transaction.seal()
    assert not transaction.extend(ONE, 16 * (3 + room + 1))
    assert transaction.seal() == sealed
    assert transaction.extend(TWO, 48), "an unrelated sequence is not blocked"
    assert not transaction.extend(ONE, 16 * (3 + room))
    assert transaction.extend(ONE, 16 * (3 + room - 1))


def test_slots_running_out_is_a_value_while_pages_are_left() -> None:
    memory = small_memory(4, 1, 3)
    open_now(memory, (1, 1), (2, 1))
    transaction = memory.transaction()
    assert memory.usage().pages_available == 2
    assert not open_in(transaction, memory, NEW, 1)
    assert transaction.extend(ONE, 33)


def test_a_slot_and_pages_compete_for_the_last_frame() -> None:
    """Two frames are free. A slot takes one, so only one frame's worth of pages is left to the same open."""
    memory = small_memory(4, 1, 2)
    transaction = memory.transaction()
    assert not open_in(transaction, memory, NEW, 4 * 16 + 1)
    assert not open_in(transaction, memory, NEW, 4 * 16, headroom_pages=1)
    assert open_in(transaction, memory, NEW, 4 * 16)


def test_what_a_transaction_closes_is_free_from_the_next_transaction_on() -> None:
    memory = small_memory(2, 1, 2)
    open_now(memory, (1, 32))
    transaction = memory.transaction()
    transaction.close(ONE)
    assert not open_in(transaction, memory, NEW, 32)
    memory.commit(transaction.seal())
    assert open_in(memory.transaction(), memory, NEW, 32)


def test_a_sequence_may_be_extended_or_opened_and_closed_in_one_transaction() -> None:
    """A step may extend the sequence that it preempts a moment later."""
    memory = lived_in()
    free = memory.usage().pages_available
    transaction = memory.transaction()
    assert transaction.extend(ONE, 64)
    assert open_in(transaction, memory, NEW, 20)
    transaction.close(ONE)
    transaction.close(NEW)
    memory.commit(transaction.seal())
    memory.audit()
    assert memory.usage().pages_available == free + 3
    assert memory.usage().leases == 1


def test_misuse_is_caught() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    with pytest.raises(AssertionError, match="sequence 1 has a lease"):
        open_in(transaction, memory, ONE, 1)
    assert open_in(transaction, memory, NEW, 1)
    with pytest.raises(AssertionError, match="sequence 7 was opened in this transaction"):
        open_in(transaction, memory, NEW, 1)
    with pytest.raises(AssertionError, match="sequence 9 has no lease"):
        transaction.extend(SeqId(9), 1)
    transaction.close(TWO)
    for use in (lambda: transaction.close(TWO), lambda: transaction.extend(TWO, 1), lambda: transaction.slot_of(TWO)):
        with pytest.raises(AssertionError, match="sequence 2 was closed in this transaction"):
            use()


def test_an_old_claim_on_a_slot_is_caught_although_the_slot_is_held_again() -> None:
    memory = small_memory(4, 1, 2)
    open_now(memory, (1, 1))
    old = memory.lease(ONE)
    memory._state.slots.check(old.slot, old.epoch)
    close_now(memory, 1)
    with pytest.raises(AssertionError, match="stale claim on slot 0: it is free"):
        memory._state.slots.check(old.slot, old.epoch)
    open_now(memory, (1, 1))
    assert memory.lease(ONE).slot == old.slot, "the same slot, another claim"
    with pytest.raises(AssertionError, match="stale claim on slot 0: of epoch 0, and the slot is at 1"):
        memory._state.slots.check(old.slot, old.epoch)
    memory.lease(ONE).epoch = old.epoch
    with pytest.raises(AssertionError, match="stale claim"):
        memory.transaction().slot_of(ONE)
    with pytest.raises(AssertionError, match="stale claim"):
        close_now(memory, 1)


def test_a_model_without_attention_extends_for_free() -> None:
    memory = small_memory(0, 2, 2)
    open_now(memory, (1, 100_000), (2, 1), (3, 1), (4, 1))
    transaction = memory.transaction()
    assert transaction.extend(ONE, 10**9)
    assert transaction.seal().pages == ()
    assert not open_in(transaction, memory, NEW, 1)
    assert memory.lease(ONE).pages == []
    close_now(memory, 3)
    assert open_in(memory.transaction(), memory, NEW, 1, headroom_pages=5), "pages that do not exist"


def test_a_model_without_recurrent_layers_holds_no_slot() -> None:
    memory = small_memory(2, 0, 2)
    reservation = open_now(memory, (1, 20), (2, 20))
    assert reservation.slots == ()
    assert memory.lease(ONE).slot == PAD
    transaction = memory.transaction()
    assert transaction.slot_of(TWO) == PAD
    assert not transaction.extend(ONE, 33)
    memory.audit()


def test_extending_inside_a_page_allocates_nothing() -> None:
    memory = lived_in()
    transaction = memory.transaction()
    sealed = transaction.seal()
    assert transaction.extend(ONE, 41)
    before = sys.getallocatedblocks()
    for _ in range(10_000):
        transaction.extend(ONE, 41)
    assert sys.getallocatedblocks() - before < 50
    assert transaction.seal() == sealed


def test_nothing_matches_while_nothing_is_kept() -> None:
    memory = lived_in()
    before = picture(memory)
    match = memory.match([1, 2, 3], salt="a")
    assert (match.cached_tokens, match.lost) == (0, Lost())
    assert picture(memory) == before


def test_every_byte_is_accounted_for() -> None:
    memory = small_memory(4, 2, 5)  # P = 512, S' = 1024, F = 2048
    open_now(memory, (1, 40), (2, 17), (3, 1))
    usage = memory.usage()
    assert usage.arena_bytes == 5 * 2048
    assert (usage.page_bytes, usage.slot_bytes) == (6 * 512, 3 * 1024)
    assert (usage.open_bytes, usage.free_bytes) == (2 * 512 + 1 * 1024, 1 * 2048)
    assert usage.page_bytes + usage.slot_bytes + usage.open_bytes + usage.free_bytes == usage.arena_bytes
    assert (usage.frames_of_pages, usage.frames_of_slots, usage.frames_free) == (2, 2, 1)
    assert (usage.pages_available, usage.slots_available) == (2 + 4, 1 + 2)
    assert usage.used_share == pytest.approx(0.8)


def test_high_water_marks_see_what_a_step_takes_before_what_it_gives_back() -> None:
    memory = small_memory(4, 1, 4)
    open_now(memory, (1, 33))
    transaction = memory.transaction()
    assert open_in(transaction, memory, TWO, 1)
    transaction.close(ONE)
    memory.commit(transaction.seal())
    usage = memory.usage()
    assert (usage.pages_held, usage.slots_held, usage.frames_free) == (1, 1, 2)
    assert (usage.pages_held_max, usage.slots_held_max) == (4, 2)


def test_nothing_is_lost_unless_a_reason_says_so() -> None:
    assert Lost().total == 0
    assert (Lost(stored=3) + Lost(salt=2)).total == 5
