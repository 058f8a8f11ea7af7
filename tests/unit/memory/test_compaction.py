"""Frames are emptied by moving what is in them: what moves, who is told, how much, and when not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.unit.memory.geometry import close_now, open_in, open_now, small_memory
from tests.unit.memory.prefix.test_cache import hit, in_one, opening, remember, tokens_of
from weft.memory import relief as compaction
from weft.memory.memory import Memory
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.units import SeqId

ONE, TWO, THREE, FOUR, FIVE = map(SeqId, (1, 2, 3, 4, 5))


def compacted(memory: Memory, *verbs: Callable[[Transaction], object]) -> Reservation:
    return in_one(memory, *verbs, lambda transaction: transaction.compact())


def interleaved(frames: int = 6) -> Memory:
    """Frames of 4 pages or 1 slot. Sequence 1 has every second page of four frames, of 8 pages; the others
    are holes. No frame is free: 3 has a slot."""
    memory = small_memory(4, 1, frames)
    open_now(memory, (1, 16), (2, 16))
    for pages in range(2, 9):
        for seq in (ONE, TWO):
            in_one(memory, lambda transaction, seq=seq, pages=pages: transaction.extend(seq, 16 * pages))
    close_now(memory, 2)
    open_now(memory, (3, 0))
    assert memory.usage().frames_free == frames - 6
    return memory


def make_room(memory: Memory, seq: int, tokens: int, steps_max: int) -> list[Reservation]:
    """Commits until ``seq`` was opened."""
    made: list[Reservation] = []
    while len(made) <= steps_max:
        transaction = memory.transaction()
        done = open_in(transaction, memory, seq, tokens)
        assert done or transaction.reclaim(pages=-(-tokens // 16), slots=1), "nothing helps"
        made.append(transaction.seal())
        memory.commit(made[-1])
        memory.audit()
        if done:
            return made
        assert made[-1].moves or made[-1].evicted, "a step that changes nothing"
    raise AssertionError(f"no room after {steps_max} steps")


def test_pages_that_lie_apart_make_a_frame_for_a_slot() -> None:
    memory = interleaved()
    before = list(memory.lease(ONE).pages)
    moved, opened = make_room(memory, 4, 16, steps_max=1)
    assert len(moved.moves.pages) == 2, "the emptiest frame has no more"
    after = memory.lease(ONE).pages
    assert {(before[at], after[at]) for at in range(8) if before[at] != after[at]} == {
        (copy.src, copy.dst) for copy in moved.moves.pages
    }
    assert moved.arena_work.page_copies == moved.moves.pages, "the executor is told"
    patched = {patch.first_index + at: page for patch in moved.table_patches for at, page in enumerate(patch.pages)}
    assert patched == {at: after[at] for at in range(8) if before[at] != after[at]}
    [patch] = moved.table_patches
    assert (patch.seq, len(patch.pages)) == (ONE, 2), "neighbours are one patch"
    [frame] = opened.arena_work.zero_frames
    assert {copy.src // 4 for copy in moved.moves.pages} == {frame}
    usage = memory.usage()
    assert (usage.moves.pages, usage.moves.slots, usage.moves.frames_converted) == (2, 0, 1)
    assert usage.moves.bytes == 2 * memory.plan.page_bytes


def test_slots_that_lie_apart_make_a_frame_for_pages() -> None:
    memory = small_memory(4, 4, 4)
    open_now(memory, *((seq, 16) for seq in range(8)))
    close_now(memory, 2, 3, 6, 7)
    slots = {seq: memory.lease(SeqId(seq)).slot for seq in (0, 1, 4, 5)}
    transaction = memory.transaction()
    assert not transaction.extend(SeqId(0), 16 * 6)
    assert transaction.reclaim(pages=5)
    moved = transaction.seal()
    memory.commit(moved)
    memory.audit()
    left = {copy.src: copy.dst for copy in moved.moves.slots}
    assert len(left) == 2
    assert {patch.seq: patch.slot for patch in moved.moves.slot_patches} == {
        seq: left[slot] for seq, slot in slots.items() if slot in left
    }
    assert all(memory.lease(SeqId(seq)).slot == left.get(slot, slot) for seq, slot in slots.items())
    in_one(memory, lambda transaction: transaction.extend(SeqId(0), 16 * 6))
    assert len(memory.lease(SeqId(0)).pages) == 6


def test_a_slot_that_moved_has_another_epoch() -> None:
    """Its old claim is stale, as any that outlived its owner."""
    memory = small_memory(4, 4, 4)
    open_now(memory, *((seq, 16) for seq in range(8)))
    close_now(memory, 2, 3, 6, 7)
    claims = {seq: (memory.lease(SeqId(seq)).slot, memory.lease(SeqId(seq)).epoch) for seq in (0, 1, 4, 5)}
    moved = [patch.seq for patch in compacted(memory).moves.slot_patches]
    assert moved
    for seq in moved:
        with pytest.raises(AssertionError, match="stale claim"):
            memory._state.slots.check(*claims[seq])
        lease = memory.lease(seq)
        memory._state.slots.check(lease.slot, lease.epoch)


def read_by_two() -> Memory:
    """Frames of 2. A cached page lies alone with a hole; sequences 2 and 3 read it and two more."""
    memory = small_memory(2, 2, 16, cache=True)
    open_now(memory, (1, 16))  # 1 .
    in_one(memory, opening(memory, FIVE, tokens_of(1, 2, 3)))  # 1 a   b c
    in_one(memory, lambda transaction: transaction.close(FIVE, keep=tokens_of(1, 2, 3)))
    in_one(memory, *(opening(memory, seq, tokens_of(1, 2, 3, seq)) for seq in (TWO, THREE)))
    open_now(memory, (4, 16))  # 1 a   b c   2 3   4 .
    close_now(memory, 1)  # . a   b c   2 3   4 .
    return memory


def test_every_reader_of_a_page_that_moves_is_told() -> None:
    memory = read_by_two()
    before = memory.lease(TWO).pages[0]
    reservation = compacted(memory)
    [copy] = reservation.moves.pages
    assert copy.src == before
    assert {(patch.seq, patch.first_index, patch.pages) for patch in reservation.table_patches} == {
        (TWO, 0, (copy.dst,)),
        (THREE, 0, (copy.dst,)),
    }
    assert memory.lease(TWO).pages[0] == memory.lease(THREE).pages[0] == copy.dst
    assert hit(memory, tokens_of(1, 2, 3, 4)) == 48, "and the cache finds it where it is now"


def test_what_the_transaction_opens_on_or_publishes_stays_where_it_is() -> None:
    memory = read_by_two()
    more = tokens_of(1, 2, 3, 9)
    assert compacted(memory, opening(memory, ONE, more)).moves.pages == ()
    close_now(memory, 1)
    memory = read_by_two()
    moved = compacted(memory, lambda transaction: transaction.publish(TWO, tokens_of(1, 2, 3, 2)))
    assert not {copy.src for copy in moved.moves.pages} & set(memory.lease(TWO).pages[3:])


def test_one_that_ends_in_the_same_step_is_neither_moved_nor_told() -> None:
    memory = read_by_two()
    reservation = compacted(memory, lambda transaction: transaction.close(TWO))
    assert [patch.seq for patch in reservation.table_patches] == [THREE]
    memory = interleaved()
    assert not compacted(memory, lambda transaction: transaction.close(ONE)).moves


def test_tails_snapshots_and_taps_move_too() -> None:
    memory = small_memory(3, 3, 12, cache=True)
    open_now(memory, (1, 16), (2, 16))
    in_one(memory, opening(memory, THREE, tokens_of(7, 7)), lambda transaction: transaction.save(THREE, 16))
    remember_beside(memory, FOUR, tokens_of(1, rest=3))
    open_now(memory, (5, 16))
    close_now(memory, 1, 2)
    held = memory.usage()
    total = 0
    for _ in range(6):
        moves = compacted(memory).moves
        total += len(moves.pages) + len(moves.slots)
    assert total > 0
    assert hit(memory, tokens_of(1, rest=4)) == 19
    in_one(memory, lambda transaction: transaction.publish(THREE, tokens_of(7)))
    assert hit(memory, tokens_of(7, 8)) == 16
    usage = memory.usage()
    assert (usage.pages_held, usage.slots_held) == (held.pages_held, held.slots_held)


def remember_beside(memory: Memory, seq: SeqId, tokens: object) -> None:
    in_one(memory, opening(memory, seq, tokens))  # type: ignore[arg-type]
    in_one(memory, lambda transaction: transaction.close(seq, keep=tokens))  # type: ignore[arg-type]


def test_what_a_step_copies_is_bounded_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOVE_BYTES_PER_STEP", 1)
    steps = make_room(interleaved(), 4, 16, steps_max=2)
    assert [len(step.moves.pages) for step in steps] == [1, 1, 0]
    monkeypatch.undo()
    monkeypatch.setattr(compaction, "MOVES_PER_STEP", 1)
    assert len(make_room(interleaved(), 4, 16, steps_max=2)) == 3
    monkeypatch.undo()
    monkeypatch.setattr(compaction, "PATCHES_PER_STEP", 0)
    assert len(make_room(interleaved(), 4, 16, steps_max=2)) == 3


def test_nothing_moves_where_there_is_room() -> None:
    memory = interleaved(frames=7)
    assert not open_now(memory, (4, 16)).moves
    assert not in_one(memory).moves
    assert memory.usage().moves.bytes == 0


def test_nothing_moves_for_what_cannot_fit() -> None:
    memory = interleaved()
    transaction = memory.transaction()
    assert not open_in(transaction, memory, 4, 16 * 6)
    assert not transaction.reclaim(pages=6, slots=1), "8 holes are a frame and 4 pages"
    assert not transaction.seal().moves
    assert open_in(transaction, memory, 4, 0) is False
    assert transaction.reclaim(pages=4, slots=1)
    assert transaction.seal().moves


def test_a_flush_moves_nothing() -> None:
    """It is a commit between steps: nobody would make the copies."""
    memory = read_by_two()
    assert not compacted(memory, lambda transaction: transaction.flush()).moves


@pytest.mark.parametrize("geometry", [(4, 1, 30), (5, 12, 20), (3, 4, 24), (7, 0, 12), (0, 5, 12)])
@pytest.mark.parametrize("seed", range(3))
def test_moving_comes_to_an_end(geometry: tuple[int, int, int], seed: int) -> None:
    """And what is left then lies in as few frames as can be."""
    memory, random = small_memory(*geometry), Random(seed)
    fill(memory, random, range(1000), (1, 40))
    seqs = list(memory._state.leases)
    close_now(memory, *random.sample(seqs, len(seqs) * 2 // 3))
    for _ in range(100):
        if not compacted(memory).moves:
            break
    else:
        raise AssertionError("it moves for ever")
    usage, plan = memory.usage(), memory.plan
    assert usage.frames_of_pages == -(-usage.pages_held // (plan.pages_per_frame or 1))
    assert usage.frames_of_slots == -(-usage.slots_held // (plan.slots_per_frame or 1))


def fill(memory: Memory, random: Random, seqs: range, lengths: tuple[int, int]) -> list[int]:
    """Open sequences until nothing makes room for the next one; returns those that are open."""
    opened = []
    for seq in seqs:
        tokens = random.randint(*lengths)
        for _ in range(200):
            transaction = memory.transaction()
            done = open_in(transaction, memory, seq, tokens)
            if not done and not transaction.reclaim(pages=memory.plan.pages_for(tokens), slots=1):
                return opened
            reservation = transaction.seal()
            assert done or reservation.moves, "a step that changes nothing"
            memory.commit(reservation)
            if done:
                opened.append(seq)
                break
        else:
            raise AssertionError("it moves for ever and makes no room")
    raise AssertionError("the arena is never full")


@pytest.mark.parametrize("geometry", [(4, 1, 30), (5, 12, 20), (3, 4, 24), (40, 1, 12), (6, 2, 25)])
def test_neither_kind_keeps_frames_from_the_other(geometry: tuple[int, int, int]) -> None:
    """Sequences that are mostly slots and sequences that are mostly pages come and go. Whenever the next one
    has to wait, it is because it would not fit however things lay."""
    memory, random = small_memory(*geometry), Random(7)
    plan = memory.plan
    seqs: list[int] = []
    for turn in range(12):
        leaving = random.sample(seqs, len(seqs) // 2)
        close_now(memory, *leaving)
        seqs = [seq for seq in seqs if seq not in leaving]
        longest = 16 * (2 if turn % 2 else plan.pages_per_frame * 2)
        seqs += fill(memory, random, range(1000 * turn, 1000 * turn + 1000), (longest, longest))
        memory.audit()
        usage = memory.usage()
        pages = usage.pages_held + longest // 16
        needed = -(-pages // plan.pages_per_frame) + -(-(usage.slots_held + 1) // plan.slots_per_frame)
        assert needed > plan.frame_count, "it would have fitted"
    assert memory.usage().moves.frames_converted >= 3


def test_where_states_share_a_frame_the_newest_chain_outlives_the_pages_that_others_need() -> None:
    """Twelve states to a frame: the oldest alone free no page. What was kept last, as a preempted request's
    tokens are, is there when it comes back."""
    memory = small_memory(5, 12, 12, cache=True)
    trunk = tokens_of(*range(20, 30))
    remember(memory, trunk, *range(16, 160, 16))
    for letter in range(40, 52):
        remember(memory, tokens_of(letter, letter, letter))
    preempted = tokens_of(*range(60, 63))
    remember(memory, preempted)
    in_one(memory, opening(memory, TWO, tokens_of(99)))
    for pages in range(2, 22):
        for _ in range(4):
            transaction = memory.transaction()
            if transaction.extend(TWO, 16 * pages):
                memory.commit(transaction.seal())
                break
            assert transaction.reclaim(pages=1)
            memory.commit(transaction.seal())
            memory.audit()
        else:
            raise AssertionError("one page does not come free")
    assert memory.usage().cache.evicted_pages > 0
    assert hit(memory, tokens_of(*range(60, 64))) == 48
    assert hit(memory, tokens_of(51, 51, 51, 51)) == 48, "nor are all states gone"


def test_what_is_asked_for_twice_is_evicted_once() -> None:
    """Each step that waits asks again; what the last one gave up counts."""
    memory = small_memory(4, 1, 6, cache=True)
    remember(memory, tokens_of(*range(10, 24)))
    usage = memory.usage()
    assert -(-(usage.pages_held + 4) // 4) + usage.slots_held + 1 == 7, "a frame too many"
    *waiting, _ = make_room(memory, 2, 16 * 4, steps_max=3)
    assert [bool(step.evicted) for step in waiting].count(True) == 1
    assert [eviction.what for eviction in waiting[0].evicted].count("state") == 1


def test_what_ends_in_the_same_step_is_not_evicted_for() -> None:
    memory = small_memory(4, 1, 6, cache=True)
    remember(memory, tokens_of(1, 2, 3, 4))
    in_one(memory, opening(memory, TWO, tokens_of(*range(10, 22))))
    transaction = memory.transaction()
    transaction.close(TWO)
    assert not open_in(transaction, memory, 3, 16 * 8)
    assert transaction.reclaim(pages=8, slots=1)
    reservation = transaction.seal()
    assert reservation.evicted == ()
    memory.commit(reservation)
    open_now(memory, (3, 16 * 8))
