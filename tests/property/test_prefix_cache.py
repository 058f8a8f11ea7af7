"""The prefix cache beside its dull world: as it is, and broken in known ways, where it must be noticed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.cache_world import COMPRESSION, GEOMETRIES, LONG, ROOMY, SCATTERED, VERBS, World, run_of, walk
from weft.memory import relief as relief_module
from weft.memory import state
from weft.memory.prefix.cache import Freed, PrefixCache
from weft.memory.prefix.compressed_kv import CompressedKv
from weft.memory.prefix.edge import Node
from weft.memory.prefix.eviction import CompressedStates, Recency
from weft.memory.prefix.policies import POLICIES
from weft.memory.prefix.sharing import Sharing
from weft.memory.prefix.tree import PrefixTree
from weft.memory.relief import Compaction, Fixed
from weft.memory.reservation import Lease, Moves, Reservation
from weft.memory.transaction import Transaction
from weft.memory.values import Match
from weft.units import PAGE_TOKENS, PageId

QUICK = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
WALKS = 300

numbers = st.integers(0, 5)
prompts = st.tuples(
    st.lists(st.sampled_from((0, 0, 1)), max_size=4), st.sampled_from((0, 1)), st.sampled_from((0, 0, 1, 5, 15))
).map(lambda p: tuple(token for page in p[0] for token in (page,) * PAGE_TOKENS) + (p[1],) * p[2] or (0,))


class CacheMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        geometry=st.sampled_from(GEOMETRIES + ROOMY + SCATTERED + COMPRESSION + LONG),
        left_out=st.sets(st.sampled_from(sorted(VERBS)), max_size=3),
        compressed_pages=st.sampled_from((0, 1, 2)),
        policy=st.sampled_from(sorted(POLICIES)),
        kv_share=st.sampled_from((0, 0.5, 0.5625)),
    )
    def make(
        self, geometry: tuple[int, int, int], left_out: set[str], compressed_pages: int, policy: str, kv_share: float
    ) -> None:
        self.world = World(
            geometry, left_out, compressed_pages=compressed_pages, policy=policy, compressed_kv_share=kv_share
        )

    @precondition(lambda self: self.world.absent)
    @rule(number=numbers, salt=st.sampled_from(("", "", "a")), tokens=prompts, room=st.sampled_from((0, 16)))
    def open(self, number: int, salt: str, tokens: tuple[int, ...], room: int) -> None:
        self.world.open(self.world.absent[number % len(self.world.absent)], salt, tokens, room)

    @rule(count=st.sampled_from((3, 16, 64, 128)), tap_at=st.sampled_from((0, 1, 2)))
    def run(self, count: int, tap_at: int) -> None:
        for seq in list(self.world.seqs) + list(self.world.plans.opened if self.world.transaction else ()):
            self.world.run(seq, count, tap_at)

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, tokens=st.sampled_from(((0,), (1,), (0,) * 9)))
    def extend(self, number: int, tokens: tuple[int, ...]) -> None:
        self.world.extend(self.world.alive[number % len(self.world.alive)], tokens)

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers)
    def publish(self, number: int) -> None:
        self.world.publish(self.world.alive[number % len(self.world.alive)])

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, keep=st.sampled_from((True, True, False)))
    def close(self, number: int, keep: bool) -> None:
        self.world.close(self.world.alive[number % len(self.world.alive)], keep=keep)

    @rule(
        drop=st.sampled_from((False, False, False, True)),
        flush=st.sampled_from((False,) * 9 + (True,)),
        compact=st.booleans(),
    )
    def settle(self, drop: bool, flush: bool, compact: bool) -> None:
        self.world.settle(drop=drop, flush=flush, compact=compact)

    @invariant()
    def the_world_agrees(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if getattr(self, "world", None) is not None:
            self.world.end()


def walk_all(seeds: range) -> list[World]:
    return [run_of(seed) for seed in seeds]


@functools.cache
def met_in(seed: int) -> Counter[str]:
    """Return what the walk of ``seed`` meets, after it has passed every check. Two tests read it."""
    return run_of(seed).seen


def test_what_is_kept_is_what_was_computed() -> None:
    run_state_machine_as_test(CacheMachine, settings=QUICK)


@pytest.mark.parametrize("third", range(3))
def test_what_is_kept_is_what_was_computed_on_long_walks(third: int) -> None:
    for seed in range(third * WALKS // 3, (third + 1) * WALKS // 3):
        met_in(seed)


def test_the_walks_go_where_it_matters() -> None:
    """What is never met is never checked."""
    seen = Counter[str]()
    for seed in range(150):
        seen.update(met_in(seed))
    assert len(seen) == 23
    for what in seen:
        assert seen[what] >= 10, f"{what} was met {seen[what]} times"


Break = Callable[[pytest.MonkeyPatch], None]


def _sealing(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    seal = Transaction.seal
    patch.setattr(Transaction, "seal", lambda self: replace(seal(self), **changes))


def _with_work(reservation: Reservation, **changes: Any) -> Reservation:
    return replace(reservation, arena_work=replace(reservation.arena_work, **changes))


def _sealing_work(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    seal = Transaction.seal
    patch.setattr(Transaction, "seal", lambda self: _with_work(seal(self), **changes))


def a_state_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    _sealing_work(patch, slot_copies=())


def a_partly_filled_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    _sealing_work(patch, page_copies=())


def a_table_is_not_patched(patch: pytest.MonkeyPatch) -> None:
    _sealing(patch, table_patches=())


def _moving(
    patch: pytest.MonkeyPatch,
    change: Callable[[Reservation], Reservation],
    when: Callable[[Reservation], object] = lambda r: r.moves,
) -> None:
    """Reservations with moves are handed on as ``change`` makes them; memory does what was planned."""
    seal, apply = Transaction.seal, state.apply
    planned: dict[Reservation, Reservation] = {}

    def sealing(self: Transaction) -> Reservation:
        reservation = seal(self)
        changed = change(reservation) if when(reservation) else reservation
        planned[changed] = reservation
        return changed

    patch.setattr(Transaction, "seal", sealing)
    patch.setattr("weft.memory.memory.apply", lambda memory, reservation: apply(memory, planned[reservation]))


def a_compressed_state_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    _sealing_work(patch, state_restores=())


def a_compressed_state_is_restored_in_another_order(patch: pytest.MonkeyPatch) -> None:
    _moving(
        patch,
        lambda r: _with_work(
            r, state_restores=tuple(replace(one, pages=one.pages[::-1]) for one in r.arena_work.state_restores)
        ),
        lambda r: r.arena_work.state_restores,
    )


def a_state_is_not_put_into_its_pages(patch: pytest.MonkeyPatch) -> None:
    _moving(
        patch,
        lambda r: _with_work(r, state_compressions=r.arena_work.state_compressions[:-1]),
        lambda r: r.arena_work.state_compressions,
    )


def pages_of_compressed_states_leak(patch: pytest.MonkeyPatch) -> None:
    leave = CompressedStates.leave

    def leaving(self: CompressedStates, node: Node) -> list[PageId]:
        leave(self, node)
        return []

    patch.setattr(CompressedStates, "leave", leaving)


def the_slot_of_a_compressed_state_leaks(patch: pytest.MonkeyPatch) -> None:
    compress = PrefixCache.compress_state

    def compression(self: PrefixCache, *args: Any) -> Freed:
        compress(self, *args)
        return Freed()

    patch.setattr(PrefixCache, "compress_state", compression)


def compressed_kv_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    _moving(patch, lambda r: _with_work(r, kv_restores=()), lambda r: r.arena_work.kv_restores)


def compressed_kv_is_restored_in_another_order(patch: pytest.MonkeyPatch) -> None:
    _moving(
        patch,
        lambda r: _with_work(
            r, kv_restores=tuple(replace(one, pages=one.pages[::-1]) for one in r.arena_work.kv_restores)
        ),
        lambda r: r.arena_work.kv_restores,
    )


def kv_is_not_put_into_its_pages(patch: pytest.MonkeyPatch) -> None:
    _moving(
        patch,
        lambda r: _with_work(r, kv_compressions=r.arena_work.kv_compressions[:-1]),
        lambda r: r.arena_work.kv_compressions,
    )


def kv_is_compressed_under_who_opens_on_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(relief_module.Relief, "_nodes_in_use", lambda self: set())


def pages_of_compressed_kv_leak(patch: pytest.MonkeyPatch) -> None:
    cut_front = CompressedKv.cut_front

    def cutting(self: CompressedKv, *args: Any) -> list[PageId]:
        cut_front(self, *args)
        return []

    patch.setattr(CompressedKv, "cut_front", cutting)


def what_compressed_kv_leaves_is_taken_for_exact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "inexact", property(lambda self: False, lambda self, inexact: None))


def a_state_behind_compressed_kv_is_taken_for_exact(patch: pytest.MonkeyPatch) -> None:
    save = PrefixCache._save
    patch.setattr(PrefixCache, "_save", lambda *args, inexact: save(*args, inexact=False))


def a_page_that_moves_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    _moving(patch, lambda r: _with_work(r, page_copies=r.arena_work.page_copies[:-1]))


def a_state_that_moves_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    _moving(patch, lambda r: _with_work(r, slot_copies=r.arena_work.slot_copies[:-1]))


def a_reader_of_a_page_that_moves_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _moving(patch, lambda r: replace(r, table_patches=r.table_patches[:-1]))


def a_sequence_is_not_told_where_its_state_is(patch: pytest.MonkeyPatch) -> None:
    _moving(patch, lambda r: replace(r, moves=replace(r.moves, slot_patches=r.moves.slot_patches[:-1])))


def what_is_read_by_others_is_patched_for_one(patch: pytest.MonkeyPatch) -> None:
    readers = Compaction._readers_of
    patch.setattr(Compaction, "_readers_of", lambda self, node: readers(self, node)[:1])


def what_a_transaction_publishes_may_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(relief_module, "Fixed", lambda published, nodes, closed: Fixed((), nodes, closed))


def what_a_transaction_opens_on_may_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(relief_module, "Fixed", lambda published, nodes, closed: Fixed(published, (), closed))


def nothing_is_ever_moved(patch: pytest.MonkeyPatch) -> None:
    """One sequence alone could not have the arena then."""
    patch.setattr(Compaction, "moves", lambda self, pages, slots: Moves())


def a_hit_is_as_far_as_kv_matches(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match

    def matching(self: PrefixCache, *args: Any) -> Match:
        found = match(self, *args)
        return replace(found, cached_tokens=found.kv_tokens)

    patch.setattr(PrefixCache, "match", matching)


def salts_share_a_namespace(patch: pytest.MonkeyPatch) -> None:
    root, find = PrefixTree.root, PrefixTree.find
    patch.setattr(PrefixTree, "root", lambda self, salt: root(self, ""))
    patch.setattr(PrefixTree, "find", lambda self, salt, data: find(self, "", data))


def what_a_lease_reads_can_be_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "bare", property(lambda self: not self.children and self.slot == -1))


def a_lease_never_lets_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixTree, "release", lambda self, node: None)


def twins_of_one_step_do_not_see_each_other(patch: pytest.MonkeyPatch) -> None:
    resolve = Sharing._resolve

    def resolving(self: Sharing, *args: Any) -> Any:
        self._paths.clear()
        return resolve(self, *args)

    patch.setattr(Sharing, "_resolve", resolving)


def pages_that_are_given_up_leak(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixCache.publish

    def publishing(self: PrefixCache, *args: Any) -> Freed:
        return replace(publish(self, *args), pages=[])

    patch.setattr(PrefixCache, "publish", publishing)


def taps_leak_when_their_lease_ends(patch: pytest.MonkeyPatch) -> None:
    release = PrefixCache.release

    def releasing(self: PrefixCache, lease: Lease) -> Freed:
        lease.snapshots.clear()
        return release(self, lease)

    patch.setattr(PrefixCache, "release", releasing)


def nothing_is_filed_for_eviction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recency, "refresh", lambda self, node, newest: None)


def a_tail_outlives_its_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_refile", lambda self, node, freed, newest: self.order.refresh(node, newest=newest))


def a_transaction_evicts_at_once(patch: pytest.MonkeyPatch) -> None:
    reclaim = Transaction.reclaim

    def reclaiming(self: Transaction, **needs: int) -> bool:
        done = reclaim(self, **needs)
        for eviction in self.seal().evicted:
            self._memory.cache.evict(eviction)
        return done

    patch.setattr(Transaction, "reclaim", reclaiming)


def nothing_is_ever_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(relief_module, "choose", lambda *args, **more: [])


def an_eviction_is_not_carried_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "evict", lambda self, eviction: Freed())


def a_snapshot_is_kept_at_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    node_ending = PrefixTree.node_ending
    patch.setattr(
        PrefixTree,
        "node_ending",
        lambda self, node, position: node if node.slot == -1 else node_ending(self, node, position),
    )


BROKEN: list[Break] = [
    a_compressed_state_is_not_restored, a_compressed_state_is_restored_in_another_order,
    a_state_is_not_put_into_its_pages, pages_of_compressed_states_leak, the_slot_of_a_compressed_state_leaks,
    compressed_kv_is_not_restored, compressed_kv_is_restored_in_another_order, kv_is_not_put_into_its_pages,
    kv_is_compressed_under_who_opens_on_it, pages_of_compressed_kv_leak,
    what_compressed_kv_leaves_is_taken_for_exact,
    a_state_behind_compressed_kv_is_taken_for_exact,
    a_state_is_not_copied, a_partly_filled_page_is_not_copied, a_table_is_not_patched,
    a_hit_is_as_far_as_kv_matches, salts_share_a_namespace, what_a_lease_reads_can_be_evicted,
    a_lease_never_lets_go, twins_of_one_step_do_not_see_each_other, pages_that_are_given_up_leak,
    taps_leak_when_their_lease_ends, nothing_is_filed_for_eviction, a_tail_outlives_its_snapshot,
    a_transaction_evicts_at_once, nothing_is_ever_evicted, an_eviction_is_not_carried_out,
    a_page_that_moves_is_not_copied, a_state_that_moves_is_not_copied,
    a_reader_of_a_page_that_moves_is_not_told, a_sequence_is_not_told_where_its_state_is,
    what_is_read_by_others_is_patched_for_one, what_a_transaction_publishes_may_move,
    what_a_transaction_opens_on_may_move, nothing_is_ever_moved,
    a_snapshot_is_kept_at_the_wrong_place,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=[b.__name__ for b in BROKEN])
def test_the_world_notices_when(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        walk_all(range(WALKS))


def test_with_the_cache_off_nothing_is_kept_and_nothing_else_differs() -> None:
    """The same verbs on memory without a cache: reservations without any of its parts."""
    for seed in range(20):
        world = walk(seed, cache=False)
        assert world.seen["hit"] == world.seen["tap"] == world.seen["kv"] == world.seen["state"] == 0
        assert not world.kept
        assert not world.kv


def test_a_reservation_without_caching_says_nothing_about_it() -> None:
    empty = Reservation(version=0, frames=(), pages=(), slots=(), opened=(), extended=(), closed=())
    assert not any(
        (
            empty.saved,
            empty.published,
            empty.evicted,
            empty.arena_work.page_copies,
            empty.arena_work.slot_copies,
            empty.table_patches,
        )
    )
