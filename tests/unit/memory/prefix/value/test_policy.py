"""The value policy in a small memory: what goes first, what it learns, and that it stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from tests.property.cache_world import policy_of, walk
from tests.unit.memory.geometry import small_arena
from weft.errors import ConfigError
from weft.memory.memory import Memory
from weft.memory.prefix.edge import Node
from weft.memory.prefix.policies import POLICIES, check_policy, make_policy
from weft.memory.prefix.policy import Policy, PrefillCost
from weft.memory.prefix.value import policy as policy_module
from weft.memory.prefix.value.policy import ValuePolicy
from weft.memory.values import NodeId
from weft.units import PAGE_TOKENS, SeqId

PAGES_PER_FRAME = 4
ANSWER = 10**6
"""Answers repeat this token plus the number of their request."""


class Bench:
    """A memory of a few frames, four pages or one state each, and a clock that the test sets."""

    def __init__(self, policy: str, frames: int, *, compressed_kv_share: float = 0) -> None:
        arena = small_arena(PAGES_PER_FRAME, 1, frames, compressed_kv_share=compressed_kv_share)
        self.now_s = 0.0
        self.policy = make_policy(policy, arena, PrefillCost(1.0, 1e-4), lambda: self.now_s)
        self.memory = Memory(arena, cache=True, policy=self.policy)
        self.next_seq = 0

    @property
    def value(self) -> ValuePolicy:
        assert isinstance(self.policy, ValuePolicy)
        return self.policy

    @property
    def states(self) -> Mapping[NodeId, Node]:
        """The snapshots in memory, in order of use."""
        return self.memory._state.cache.order.states

    def value_of(self, node: Node) -> float:
        prospects = self.value._prospects
        return prospects.value(self.value._rows[node.id], prospects.rate(node))

    def ends_in_order(self) -> list[int]:
        """The first token of each snapshot, the first one to evict first."""
        firsts = []
        for node in self.policy.order(self.states):
            at = node
            while at.parent is not None and at.parent.parent is not None:
                at = at.parent
            firsts.append(int(np.frombuffer(at.tokens, np.int32)[0]))
        return firsts

    def ask(self, prompt: list[int], answer: int = 0) -> int:
        """One request from beginning to end; returns how many of its tokens were cached."""
        seq, self.next_seq = SeqId(self.next_seq), self.next_seq + 1
        tokens = np.array(prompt, np.int32)
        known = np.append(tokens, np.full(answer, ANSWER + seq, np.int32)).astype(np.int32)
        cached = None
        for _ in range(64):
            transaction = self.memory.transaction()
            match = self.memory.match(tokens, salt="")
            if transaction.open(seq, match, len(known)):
                cached = match.cached_tokens
                self.memory.commit(transaction.seal())
                break
            assert transaction.reclaim(pages=len(known) // PAGE_TOKENS + 1, slots=1), "it does not fit at all"
            self.memory.commit(transaction.seal())
        assert cached is not None
        transaction = self.memory.transaction()
        transaction.close(seq, keep=known)
        self.memory.commit(transaction.seal())
        self.memory.audit()
        if isinstance(self.policy, ValuePolicy):
            self.policy.audit(self.states)
        return cached


def prompt(*parts: tuple[int, int]) -> list[int]:
    return [token for token, count in parts for _ in range(count)]


def hits(policy: str, *, rounds: int = 60) -> int:
    """Requests that share a beginning, each followed by two long ones that are never asked again."""
    bench, hit_count = Bench(policy, 12), 0
    for number in range(rounds):
        bench.now_s += 10
        hit_count += bench.ask(prompt((1, 128), (100 + number, 5))) >= 128
        bench.ask(prompt((2, 128)) if number == 0 else prompt((1, 128)))
        for other in range(2):
            bench.now_s += 1
            bench.ask(prompt((1000 + 2 * number + other, 200)))
    return hit_count


def test_what_is_asked_again_and_again_stays_though_long_prompts_pass_through() -> None:
    assert hits("value") >= 50
    assert hits("lru") < 30


def test_it_learns_which_conversations_continue() -> None:
    """Conversations of short answers continue after 20 seconds, those of long answers never do. A short one
    then outlives a newer long one of the same size."""
    bench = Bench("value", 40)
    for number in range(80):
        continues = number % 2 == 0
        first, seq = prompt((100 + number, 40)), bench.next_seq
        bench.ask(first, answer=4 if continues else 60)
        bench.now_s += 20
        if continues:
            bench.ask([*first, *prompt((ANSWER + seq, 4), (5, 8))], answer=60)
        bench.now_s += 1
    bench.memory.flush()
    bench.ask(prompt((7, 96)), answer=4)
    bench.now_s += 5
    bench.ask(prompt((8, 40)), answer=60)
    bench.ask(prompt((9, 96)), answer=4)
    assert bench.ends_in_order()[0] == 8
    lru = Bench("lru", 40)
    lru.ask(prompt((7, 96)), answer=4)
    lru.ask(prompt((8, 40)), answer=60)
    lru.ask(prompt((9, 96)), answer=4)
    assert lru.ends_in_order()[0] == 7


@pytest.mark.parametrize("rounds", [0, 60])
def test_it_learns_at_which_turn_a_conversation_stops(rounds: int) -> None:
    """The first end of each conversation is asked again and again after its first use, the second one never.
    Both ends have the same number of uses. Without these rounds the policy has no such opinion."""
    bench = Bench("value", 60)

    def turns(token: int) -> tuple[list[int], list[int]]:
        seq, start = bench.next_seq, prompt((token, 64))
        bench.ask(start, answer=8)
        bench.now_s += 5
        first = [*start, *prompt((ANSWER + seq, 8), (5, 56))]
        seq = bench.next_seq
        bench.ask(first, answer=8)
        bench.now_s += 5
        return first, [*first, *prompt((ANSWER + seq, 8), (6, 56))]

    for number in range(rounds):
        first, second = turns(100 + number)
        bench.ask(second, answer=8)
        for again in range(3):
            bench.now_s += 5
            bench.ask([*first[:72], *prompt((50 + again, 16))])
    bench.memory.flush()
    _, second = turns(3)
    bench.ask(second, answer=8)
    bench.now_s += 1
    bench.ask(prompt((4, 16)))
    value = {node.end: bench.value_of(node) for node in bench.states.values()}
    assert (value[72] > 3 * value[136]) == (rounds > 0)


def test_more_uses_are_expected_where_prompts_come_back() -> None:
    """Forty prompts that each go on 20 s later, against as many that never do."""
    expected = []
    for returns in (True, False):
        bench = Bench("value", 60)
        for number in range(40):
            bench.ask(prompt((number, 40)))
            bench.now_s += 20
            bench.ask([*prompt((number if returns else 300 + number, 40)), *prompt((500 + number, 40))])
        bench.ask(prompt((90, 40)))
        newest = list(bench.states)[-1]
        outlook = bench.memory.snapshot_outlook(newest)
        assert outlook is not None
        assert outlook.position == 40
        assert outlook.uses is not None
        expected.append(outlook.uses)
    assert expected[0] > 3 * expected[1] > 0, expected
    assert bench.memory.snapshot_outlook(NodeId(10**9)) is None


@pytest.mark.parametrize(("first", "uses"), [(1, 1), (77, 0)])
def test_a_state_up_to_which_an_earlier_prompt_went_counts_as_used(first: int, uses: int) -> None:
    """Though nothing of it is in memory, and no state was there: two prompts have come as far."""
    bench = Bench("value", 8)
    bench.ask(prompt((1, 96)))
    for number in range(12):
        bench.ask(prompt((50 + number, 150)))
    tokens = np.array(prompt((first, 96), (2, 40)), np.int32)
    transaction, seq = bench.memory.transaction(), SeqId(100)
    assert transaction.reclaim(pages=9, slots=2)
    bench.memory.commit(transaction.seal())
    transaction = bench.memory.transaction()
    assert transaction.open(seq, bench.memory.match(tokens, salt=""), len(tokens))
    transaction.save(seq, 64)
    bench.memory.commit(transaction.seal())
    transaction = bench.memory.transaction()
    transaction.publish(seq, tokens[:64])
    bench.memory.commit(transaction.seal())
    [node] = [node for node in bench.states.values() if node.end == 64]
    assert bench.value._records.uses[bench.value._rows[node.id]] == uses


def test_kv_that_may_be_compressed_makes_a_state_worth_more_for_each_byte() -> None:
    def value(share: float) -> float:
        bench = Bench("value", 12, compressed_kv_share=share)
        bench.ask(prompt((1, 96)))
        [node] = bench.states.values()
        return bench.value_of(node)

    assert 0 < value(0) < value(0.75) < value(0.5) < 2 * value(0)


def test_candidates_are_valued_again_with_each_request() -> None:
    """Values fall with age. An opening values all candidates again; a closing leaves those that it did not
    touch, and that is the control."""
    bench = Bench("value", 40)
    for number in range(6):
        bench.ask(prompt((number, 40)), answer=4)
        bench.now_s += 40

    def error() -> float:
        pairs = list(bench.value.candidates())
        assert {node.id for node, _ in pairs} == set(bench.states)
        return max(abs(value / bench.value_of(node) - 1) for node, value in pairs)

    transaction = bench.memory.transaction()
    tokens = np.array(prompt((7, 40)), np.int32)
    assert transaction.open(SeqId(100), bench.memory.match(tokens, salt=""), 40)
    bench.memory.commit(transaction.seal())
    assert error() < 1e-9
    bench.now_s += 200
    transaction = bench.memory.transaction()
    transaction.close(SeqId(100), keep=tokens)
    bench.memory.commit(transaction.seal())
    assert error() > 1e-3


def test_the_same_run_makes_the_same_choices() -> None:
    runs = []
    for _ in range(2):
        bench = Bench("value", 12)
        runs.append([bench.ask(prompt((number * 7 % 5 // 2, 50), (9, number % 3))) for number in range(60)])
    assert runs[0] == runs[1]
    assert any(runs[0])


def test_what_is_remembered_is_bounded_in_count_in_tokens_and_in_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "GHOSTS_MAX", 20)
    bench = Bench("value", 12)
    for number in range(100):
        bench.ask(prompt((number, 100)))
    assert 10 < len(bench.value._ghosts) <= 20
    assert bench.value._history.token_count < 40 * 100
    assert len(bench.value._records.nodes) < 60, "rows are used again"
    bench.now_s += 10_000
    bench.ask(prompt((7001, 100)))
    bench.ask(prompt((7002, 100)))
    assert len(bench.value._ghosts) <= 2

    monkeypatch.setattr(policy_module, "HISTORY_TOKENS_MIN", 1000)
    monkeypatch.setattr(policy_module, "GHOSTS_MAX", 10**6)
    small, many = Bench("value", 12), 10
    for number in range(many * 12):
        small.ask(prompt((number, 100)))
    assert small.value._history.token_count <= 1000 + 3 * 200 < many * 12 * 100


def test_a_request_is_told_how_far_its_prompt_was_seen_though_it_is_gone() -> None:
    bench = Bench("value", 8)
    bench.ask(prompt((1, 96)))
    for number in range(12):
        bench.ask(prompt((50 + number, 150)))
    asked = np.array(prompt((1, 96), (2, 20)), np.int32)
    match = bench.memory.match(asked, salt="")
    assert match.cached_tokens == match.kv_tokens == 0
    assert match.recall.seen_tokens == 96
    assert match.recall.prompt_tokens == 115
    assert bench.memory.match(asked, salt="other").recall.seen_tokens == 0


def test_asking_what_would_go_changes_nothing_in_the_cache() -> None:
    bench = Bench("value", 12)
    for number in range(20):
        bench.ask(prompt((number, 90)))
    ranked = [[node.id for node in bench.policy.order(bench.states)] for _ in range(3)]
    assert ranked[0] == ranked[1] == ranked[2]
    assert set(ranked[0]) == set(bench.states)


@pytest.mark.parametrize("seed", [seed for seed in range(40) if policy_of(seed) == "value"])
def test_every_state_has_one_record_after_any_walk(seed: int) -> None:
    world = walk(seed)
    cache = world.memory._state.cache
    assert isinstance(cache.policy, ValuePolicy) == bool(world.m)
    if isinstance(cache.policy, ValuePolicy):
        cache.policy.audit(cache.order.states)


def test_the_audit_of_the_policy_sees_a_snapshot_without_a_record() -> None:
    bench = Bench("value", 12)
    bench.ask(prompt((1, 90)))
    bench.value.evicted(next(iter(bench.states.values())))
    with pytest.raises(AssertionError, match="a snapshot has no record"):
        bench.value.audit(bench.states)


def test_the_audit_of_the_policy_sees_two_snapshots_of_one_record() -> None:
    bench = Bench("value", 20)
    for first in (1, 2, 3):
        bench.ask(prompt((first, 90)))
    bench.value.audit(bench.states)
    first, second, third = bench.states
    rows = bench.value._rows
    for copied, to in ((first, second), (third, second), (second, first)):
        right, rows[to] = rows[to], rows[copied]
        with pytest.raises(AssertionError, match="share a record"):
            bench.value.audit(bench.states)
        rows[to] = right


class Liar(Policy):
    """Names nodes without a snapshot, the same twice, and never all."""

    def __init__(self) -> None:
        self._seen: list[Node] = []

    def saved(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        self._seen.append(node)

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        yield from (node for node in self._seen[::-2] for _ in range(2))


def test_a_policy_that_lies_corrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(POLICIES):
        monkeypatch.setitem(POLICIES, name, lambda plan, cost, clock: Liar())
    assert sum(walk(seed).seen["state"] for seed in range(1, 40)) > 20


def test_an_unknown_policy_is_refused_by_name_and_a_model_without_states_needs_none() -> None:
    said = r"debug\.cache_policy is 'best'; it must be one of value, lru, marconi"
    with pytest.raises(ConfigError, match=said):
        check_policy("best")
    check_policy("worth")
    assert isinstance(make_policy("worth", small_arena(4, 1, 8), PrefillCost(), lambda: 0.0), ValuePolicy)
    stateless = make_policy("value", small_arena(4, 0, 8), PrefillCost(), lambda: 0.0)
    assert type(stateless) is Policy


def test_marconi_gives_up_what_is_old_and_cheap_to_compute_first() -> None:
    bench = Bench("marconi", 40)
    bench.ask(prompt((1, 20)))
    bench.now_s += 1
    bench.ask(prompt((2, 400)))
    bench.now_s += 10
    bench.ask(prompt((3, 20)))
    assert [node.end for node in bench.policy.order(bench.states)] == [20, 400, 20]
    oldest = next(bench.policy.order(bench.states)).id
    bench.ask(prompt((1, 20), (4, 9)))
    assert next(bench.policy.order(bench.states)).id != oldest, "what was used is no longer old"
