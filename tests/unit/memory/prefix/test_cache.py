"""The prefix cache through the facade: what is kept, read in place, copied, given up and evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.memory.geometry import close_now, open_now, picture, small_memory
from weft.memory.arena_work import PageCopy, SlotCopy
from weft.memory.memory import Memory
from weft.memory.prefix.eviction import Demand, choose
from weft.memory.reservation import Reservation, TablePatch
from weft.memory.transaction import Transaction
from weft.memory.values import Lost, Match
from weft.units import SeqId

ONE, TWO, THREE = SeqId(1), SeqId(2), SeqId(3)


def tokens_of(*letters: int, rest: int = 0) -> np.ndarray:
    """A page of each letter, and ``rest`` tokens more."""
    return np.asarray([letter for letter in letters for _ in range(16)] + [9] * rest, dtype=np.int32)


def roomy(pages_per_frame: int = 4, slots_per_frame: int = 2, frames: int = 16) -> Memory:
    return small_memory(pages_per_frame, slots_per_frame, frames, cache=True)


def in_one(memory: Memory, *verbs: Callable[[Transaction], object]) -> Reservation:
    transaction = memory.transaction()
    for verb in verbs:
        verb(transaction)
    reservation = transaction.seal()
    memory.commit(reservation)
    memory.audit()
    return reservation


def opening(memory: Memory, seq: SeqId, tokens: np.ndarray, salt: str = "") -> Callable[[Transaction], object]:
    def verb(transaction: Transaction) -> None:
        assert transaction.open(seq, memory.match(tokens, salt=salt), len(tokens))

    return verb


def remember(memory: Memory, tokens: np.ndarray, *taps: int, salt: str = "") -> None:
    """A request computes ``tokens``, with states kept at ``taps``, and ends."""

    def saving(transaction: Transaction) -> None:
        for tap in taps:
            assert transaction.save(ONE, tap) is not None

    in_one(memory, opening(memory, ONE, tokens, salt), saving)
    in_one(memory, lambda one: one.close(ONE, keep=tokens))


def hit(memory: Memory, tokens: np.ndarray, salt: str = "") -> int:
    return memory.match(tokens, salt=salt).cached_tokens


def test_a_cached_front_is_read_in_place() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2, 3))
    [front] = [node for node in memory._state.cache.tree.nodes() if node.pages]
    longer = tokens_of(1, 2, 3, 4, rest=3)
    reservation = in_one(memory, opening(memory, TWO, longer))
    lease = memory.lease(TWO)
    assert lease.pages[:3] == front.pages
    assert len(reservation.pages) == 2, "only what is new is taken"
    assert (lease.cached_tokens, lease.shared_tokens) == (48, 48)
    assert reservation.arena_work.slot_copies == (SlotCopy(front.slot, lease.slot),)
    assert reservation.arena_work.page_copies == ()
    close_now(memory, TWO)
    assert hit(memory, longer) == 48, "and is still there when its reader has left"


def test_a_partly_filled_page_is_copied_before_it_is_extended() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, rest=5))
    tail = next(node for node in memory._state.cache.tree.nodes() if node.is_tail)
    longer = np.concatenate([tokens_of(1, rest=5), tokens_of(4)])
    reservation = in_one(memory, opening(memory, TWO, longer))
    pages = memory.lease(TWO).pages
    assert memory.lease(TWO).cached_tokens == 21
    assert memory.lease(TWO).shared_tokens == 16
    assert tail.pages[0] not in pages
    assert reservation.arena_work.page_copies == (PageCopy(tail.pages[0], pages[1]),)
    assert reservation.arena_work.slot_copies == (SlotCopy(tail.slot, memory.lease(TWO).slot),)


def test_a_prompt_of_twenty_tokens_hits() -> None:
    """Engines that match in blocks the size of a state need 528 tokens, or 2096, before anything hits."""
    memory = roomy()
    remember(memory, tokens_of(1, rest=4))
    assert hit(memory, tokens_of(1, rest=5)) == 20


def test_the_last_token_is_always_left_to_compute() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2), 16)
    assert hit(memory, tokens_of(1, 2)) == 16
    assert hit(memory, tokens_of(1, 2, rest=1)) == 32
    assert hit(memory, tokens_of(1)[:1]) == hit(memory, tokens_of()) == 0


def test_the_running_slot_is_donated_and_nothing_is_copied() -> None:
    memory = roomy()
    in_one(memory, opening(memory, ONE, tokens_of(1, 2)))
    slot, pages = memory.lease(ONE).slot, list(memory.lease(ONE).pages)
    reservation = in_one(memory, lambda one: one.close(ONE, keep=tokens_of(1, 2)))
    [node] = [node for node in memory._state.cache.tree.nodes() if node.pages]
    assert (node.slot, node.pages) == (slot, pages)
    assert (reservation.slots, reservation.pages, reservation.arena_work.slot_copies) == ((), (), ())


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    memory = roomy()
    known = tokens_of(1, 2, 3, rest=7)
    in_one(memory, opening(memory, ONE, known))
    in_one(memory, lambda one: one.close(ONE, keep=known[:39]))
    assert hit(memory, known) == 39


def test_closing_without_keeping_keeps_nothing() -> None:
    memory = roomy()
    in_one(memory, opening(memory, ONE, tokens_of(1, 2)), lambda one: one.save(ONE, 16))
    in_one(memory, lambda one: one.close(ONE))
    assert hit(memory, tokens_of(1, 2, 3)) == 0
    assert memory.usage().free_bytes == memory.usage().arena_bytes


def test_a_snapshot_that_is_there_already_costs_no_second_slot() -> None:
    memory = roomy()
    for tokens in (tokens_of(1, 2), tokens_of(1, 2), tokens_of(1, rest=3), tokens_of(1, rest=3)):
        remember(memory, tokens)
    usage = memory.usage()
    assert (usage.slots_held, usage.slots_cached, usage.pages_held) == (2, 2, 3)


def test_states_saved_on_the_way_serve_prompts_that_part_there() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2, 3, 4, 5), 16, 48)
    assert hit(memory, tokens_of(1, 2, 3, 7)) == 48
    assert hit(memory, tokens_of(1, 2, 7)) == 16
    assert hit(memory, tokens_of(1, 2, 3, 4, 5, rest=1)) == 80


def test_a_publication_serves_others_while_its_sequence_runs() -> None:
    memory = roomy()
    in_one(memory, opening(memory, ONE, tokens_of(1, 2, 3)), lambda one: one.save(ONE, 32))
    pages = list(memory.lease(ONE).pages)
    reservation = in_one(memory, lambda one: one.publish(ONE, tokens_of(1, 2)))
    assert hit(memory, tokens_of(1, 2, 5)) == 32
    lease = memory.lease(ONE)
    assert (lease.pages, lease.shared_tokens, lease.snapshots) == (pages, 32, [])
    assert reservation.table_patches == (), "its table stays as it is"


@pytest.mark.parametrize("together", [True, False])
def test_twins_end_up_on_the_same_pages(together: bool) -> None:
    """Whether they publish in one step or in two: the second one's pages are given up for the first one's."""
    memory = roomy()
    twins = (ONE, TWO)
    in_one(memory, *(opening(memory, seq, tokens_of(1, 2, 3)) for seq in twins))
    own = {seq: list(memory.lease(seq).pages) for seq in twins}
    verbs = [lambda transaction, seq=seq: transaction.publish(seq, tokens_of(1, 2)) for seq in twins]
    if together:
        reservation = in_one(memory, *verbs)
    else:
        in_one(memory, verbs[0])
        reservation = in_one(memory, verbs[1])
    assert reservation.table_patches == (TablePatch(TWO, 0, tuple(own[ONE][:2])),)
    assert memory.lease(TWO).pages == [*own[ONE][:2], own[TWO][2]]
    assert memory.usage().pages_held == 4
    assert memory.usage().pages_shared == 2


def test_of_several_that_publish_in_one_step_the_longest_front_is_shared() -> None:
    memory = roomy()
    prompts = {ONE: tokens_of(1, 2, 3), TWO: tokens_of(1, 9), THREE: tokens_of(1, 2, 3, 4)}
    in_one(memory, *(opening(memory, seq, prompt) for seq, prompt in prompts.items()))
    in_one(memory, *(lambda transaction, seq=seq: transaction.publish(seq, prompts[seq]) for seq in prompts))
    assert memory.lease(THREE).pages[:3] == memory.lease(ONE).pages
    assert memory.lease(TWO).pages[:1] == memory.lease(ONE).pages[:1]
    assert memory.usage().pages_held == 5


def test_the_same_tokens_after_different_fronts_are_not_the_same() -> None:
    memory = roomy()
    remember(memory, tokens_of(1))
    remember(memory, tokens_of(2))
    in_one(memory, opening(memory, ONE, tokens_of(1, 5, 6)), opening(memory, TWO, tokens_of(2, 5, 6)))
    in_one(memory, lambda one: one.publish(ONE, tokens_of(1, 5)), lambda one: one.publish(TWO, tokens_of(2, 5)))
    assert not set(memory.lease(ONE).pages) & set(memory.lease(TWO).pages)


def test_what_is_given_up_is_free_from_the_next_transaction_on() -> None:
    memory = roomy(4, 2, 4)
    in_one(memory, *(opening(memory, seq, tokens_of(1, 2, 3)) for seq in (ONE, TWO)))
    free = memory.usage().pages_available
    given_up = memory.lease(TWO).pages[:2]
    reservation = in_one(
        memory,
        lambda one: one.publish(ONE, tokens_of(1, 2)),
        lambda one: one.publish(TWO, tokens_of(1, 2)),
        lambda one: one.extend(ONE, 16 * (3 + free)),
    )
    assert len(reservation.pages) == free, "all there is"
    assert not set(given_up) & set(reservation.pages)
    assert memory.usage().pages_available == 2


def test_salts_never_see_each_other() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2), salt="a")
    assert hit(memory, tokens_of(1, 2, 3), salt="a") == 32
    for salt in ("", "b"):
        match = memory.match(tokens_of(1, 2, 3), salt=salt)
        assert (match.cached_tokens, match.kv_tokens, match.lost_tokens) == (0, 0, 0)


def test_a_model_without_states_hits_at_every_page() -> None:
    memory = roomy(4, 0, 8)
    remember(memory, tokens_of(1, 2, 3, rest=5))
    assert hit(memory, tokens_of(1, 2, 3, 4)) == 48
    assert hit(memory, tokens_of(1, 2, 3)) == 32
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, 7)))
    assert memory.lease(TWO).shared_tokens == 32
    assert memory.usage().pages_shared == 2, "the page that it does not read can go"


def test_a_model_without_attention_hits_at_its_snapshots() -> None:
    memory = roomy(0, 2, 8)
    remember(memory, tokens_of(1, 2, rest=3), 16)
    assert hit(memory, tokens_of(1, 2, rest=4)) == 35
    assert hit(memory, tokens_of(1, 7)) == 16
    memory.flush()
    assert memory.usage().cache_nodes == 0


def test_a_lost_hit_is_told_from_no_shared_prefix() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2, 3, 4), 16)
    assert memory.match(tokens_of(7, 8), salt="").lost == Lost()
    match = memory.match(tokens_of(1, 2, 3, 9), salt="")
    assert (match.cached_tokens, match.kv_tokens, match.lost) == (16, 48, Lost(no_checkpoint=32))
    evict(memory, states=2)
    match = memory.match(tokens_of(1, 2, 3, 4, 5), salt="")
    assert (match.cached_tokens, match.lost) == (0, Lost(evicted_state=64))
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3, 4, 5)))
    assert memory.usage().cache.lost.evicted_state == 64


def test_what_is_needed_is_evicted_and_there_for_the_next_transaction() -> None:
    memory = roomy(4, 1, 4)
    remember(memory, tokens_of(*range(10, 18)))
    new = tokens_of(*range(30, 42))
    transaction = memory.transaction()
    assert not transaction.open(TWO, memory.match(new, salt=""), len(new))
    assert transaction.reclaim(pages=len(new) // 16, slots=1)
    memory.commit(transaction.seal())
    memory.audit()
    in_one(memory, opening(memory, TWO, new))
    assert memory.usage().cache.evicted_pages > 0


def evict(memory: Memory, *, pages: int = 0, states: int = 0) -> None:
    demand = Demand(0, 1, 1, pages, states)
    memory.commit(replace(memory.transaction().seal(), evicted=tuple(choose(memory._state.cache.order, demand))))
    memory.audit()


def touched_by_opening(memory: Memory) -> None:
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, rest=4)))
    close_now(memory, TWO)


@pytest.mark.parametrize(
    ("old", "use"),
    [
        (tokens_of(1, 2), touched_by_opening),
        (tokens_of(1, 2, rest=3), touched_by_opening),
        (tokens_of(1, 2), lambda memory: remember(memory, tokens_of(1, 2))),
        (tokens_of(1, 2, rest=3), lambda memory: remember(memory, tokens_of(1, 2, rest=3))),
    ],
    ids=["read", "read from a tail", "computed again", "a tail computed again"],
)
def test_the_least_recently_used_snapshot_goes_first(old: np.ndarray, use: Callable[[Memory], None]) -> None:
    memory = roomy()
    remember(memory, old)
    remember(memory, tokens_of(5, 6))
    use(memory)
    evict(memory, states=1)
    assert hit(memory, np.append(old, 7)) == len(old)
    assert hit(memory, tokens_of(5, 6, 7)) == 0


def test_a_front_whose_branches_are_gone_goes_before_what_was_left_later() -> None:
    memory = roomy(4, 0, 8)
    for tokens in (tokens_of(1, 2, 3), tokens_of(1, 2, 4), tokens_of(6)):
        remember(memory, tokens)
    for _ in range(3):
        evict(memory, pages=1)
    assert hit(memory, tokens_of(1, 2, 3)) == 16
    assert hit(memory, tokens_of(6, 7)) == 16


def test_nothing_can_be_reclaimed_where_nothing_is_cached() -> None:
    memory = roomy(4, 2, 2)
    in_one(memory, opening(memory, ONE, tokens_of(1, 2, 3, 4)))
    transaction = memory.transaction()
    assert not transaction.extend(ONE, 65)
    assert not transaction.reclaim(pages=1), "although a slot is free, and its bytes are more than a page's"


def test_what_two_sequences_need_is_reclaimed_together() -> None:
    memory = roomy(4, 0, 4)
    remember(memory, tokens_of(*range(10, 22)))
    in_one(memory, opening(memory, ONE, tokens_of(1)), opening(memory, TWO, tokens_of(2)))
    assert memory.usage().pages_available == 2
    transaction = memory.transaction()
    for seq in (ONE, TWO):
        assert not transaction.extend(seq, 16 * 4)
        assert transaction.reclaim(pages=3)
    memory.commit(transaction.seal())
    in_one(memory, *(lambda transaction, seq=seq: transaction.extend(seq, 16 * 4) for seq in (ONE, TWO)))
    assert [len(memory.lease(seq).pages) for seq in (ONE, TWO)] == [4, 4]


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    memory = roomy(4, 1, 6)
    remember(memory, tokens_of(1, 2))
    in_one(memory, opening(memory, TWO, tokens_of(*range(10, 18))))
    transaction = memory.transaction()
    assert not transaction.open(THREE, memory.match(tokens_of(50), salt=""), 16 * 16)
    assert not transaction.reclaim(pages=16, slots=1), "what runs must end before it fits"
    assert transaction.seal().evicted == ()


def test_what_a_sequence_reads_is_never_evicted_but_its_snapshot_can_be() -> None:
    memory = roomy(4, 1, 5)
    remember(memory, tokens_of(1, 2, 3))
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3, 4)))
    memory.flush()
    memory.audit()
    assert memory.lease(TWO).pages[:3] == [page for node in memory._state.cache.tree.nodes() for page in node.pages]
    assert memory.usage().slots_cached == 0
    assert memory.usage().pages_shared == 3


def test_what_a_transaction_opens_on_is_not_evicted_by_it() -> None:
    memory = roomy(4, 1, 6)
    remember(memory, tokens_of(1, 2))
    remember(memory, tokens_of(5, 6))
    reservation = in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3)), lambda one: one.flush())
    assert hit(memory, tokens_of(5, 6, 7)) == 0
    assert hit(memory, tokens_of(1, 2, 7)) == 32
    assert len(reservation.evicted) == 2


def test_a_page_for_each_sequence_is_kept_free_ahead_of_need() -> None:
    memory = roomy(4, 0, 2)
    remember(memory, tokens_of(*range(10, 16)))
    reservation = in_one(memory, *(opening(memory, seq, tokens_of(seq)) for seq in (ONE, TWO)))
    assert len(reservation.evicted) == 1
    for _ in range(3):
        assert memory.usage().pages_available == 2
        in_one(memory)
    assert memory.usage().pages_available == 2, "and no more than that"


def test_a_slot_is_kept_free_ahead_of_need() -> None:
    memory = roomy(4, 1, 3)
    remember(memory, tokens_of(1))
    in_one(memory, opening(memory, TWO, tokens_of(1, rest=1)))
    assert memory.usage().slots_available == 0
    in_one(memory)
    assert memory.usage().slots_available == 1


def test_a_step_that_closes_evicts_nothing_ahead() -> None:
    memory = roomy(4, 1, 3)
    remember(memory, tokens_of(1))
    in_one(memory, opening(memory, TWO, tokens_of(1, rest=1)))
    assert in_one(memory, lambda one: one.close(TWO)).evicted == ()
    assert hit(memory, tokens_of(1, 2)) == 16


def test_a_snapshot_is_not_saved_when_that_could_cost_another() -> None:
    memory = roomy(4, 1, 3)
    in_one(memory, opening(memory, ONE, tokens_of(1, 2)))
    transaction = memory.transaction()
    assert transaction.save(ONE, 16) is None, "the last slot is left for whoever comes next"
    assert transaction.seal().slots == ()
    full = roomy(4, 2, 3)
    in_one(full, *(opening(full, seq, tokens_of(1, 2)) for seq in (ONE, TWO)))
    assert (full.usage().slots_available, full.usage().pages_available) == (2, 4)
    assert full.transaction().save(ONE, 16) is None, "its frame is left for the pages that come next"
    wide = roomy(4, 3, 3)
    in_one(wide, opening(wide, ONE, tokens_of(1, 2)))
    transaction = wide.transaction()
    spare = wide.usage().slots_available - 1
    assert transaction.save(ONE, 16, spare=spare + 1) is None, "so many slots are not to be had besides"
    assert transaction.save(ONE, 16, spare=spare) is not None


def test_states_running_out_while_kv_is_left_is_a_wait() -> None:
    memory = roomy(4, 1, 4)
    in_one(memory, *(opening(memory, seq, tokens_of(1)) for seq in (ONE, TWO, THREE)))
    transaction = memory.transaction()
    assert not transaction.open(SeqId(4), memory.match(tokens_of(1), salt=""), 16)
    assert not transaction.reclaim(pages=1, slots=1)
    assert transaction.extend(ONE, 17)


def test_misuse_is_caught() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2))
    old = memory.match(tokens_of(1, 2, 3), salt="")
    in_one(memory, opening(memory, TWO, tokens_of(5, 6)))
    transaction = memory.transaction()
    with pytest.raises(AssertionError, match="a match of version 2 was used on version 3"):
        transaction.open(THREE, old, 48)
    with pytest.raises(AssertionError, match="a snapshot at 20 is inside a page"):
        transaction.save(TWO, 20)
    transaction.publish(TWO, tokens_of(5))
    with pytest.raises(AssertionError, match="sequence 2 published in this transaction"):
        transaction.publish(TWO, tokens_of(5, 6))
    assert transaction.open(SeqId(4), memory.match(tokens_of(8), salt=""), 16)
    with pytest.raises(AssertionError, match="sequence 4 was opened in this transaction"):
        transaction.publish(SeqId(4), tokens_of(8))


def test_a_dropped_transaction_changes_nothing_of_the_cache() -> None:
    memory = roomy(4, 2, 6)
    remember(memory, tokens_of(1, 2), 16)
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3)))
    before = picture(memory)
    verbs: list[Callable[[Transaction], object]] = [
        opening(memory, THREE, tokens_of(1, 5)),
        lambda one: one.save(TWO, 48),
        lambda one: one.publish(TWO, tokens_of(1, 2, 3)),
        lambda one: one.close(TWO, keep=tokens_of(1, 2, 3)),
        lambda one: one.flush(),
    ]
    for verb in verbs:
        transaction = memory.transaction()
        verb(transaction)
        transaction.seal()
        assert picture(memory) == before
        in_one(memory, verb)
        after = picture(memory)
        assert after["tree"] != before["tree"] or after["leases"] != before["leases"], "and it can be seen"
        memory = roomy(4, 2, 6)
        remember(memory, tokens_of(1, 2), 16)
        in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3)))


def test_usage_tells_running_from_cached() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2), 16)
    in_one(memory, opening(memory, TWO, tokens_of(1, 2, 3)))
    usage = memory.usage()
    assert (usage.pages_held, usage.pages_cached, usage.pages_shared) == (3, 2, 2)
    assert (usage.slots_held, usage.slots_cached) == (3, 2)
    assert usage.cached_bytes == 2 * memory.plan.page_bytes + 2 * memory.plan.slot_stride_bytes
    assert usage.evictable_bytes == 2 * memory.plan.slot_stride_bytes
    assert (usage.cache.opened, usage.cache.hits, usage.cache.hit_tokens) == (2, 1, 32)


def test_with_the_cache_off_nothing_is_kept() -> None:
    memory = small_memory(4, 2, 16)
    open_now(memory, (1, 32))
    in_one(memory, lambda one: one.save(ONE, 16))
    in_one(memory, lambda one: one.publish(ONE, tokens_of(1)))
    in_one(memory, lambda one: one.close(ONE, keep=tokens_of(1, 2)))
    match = memory.match(tokens_of(1, 2, 3), salt="a")
    assert match == Match(salt="a", version=4)
    assert memory.usage().free_bytes == memory.usage().arena_bytes
