"""The policy ``worth`` in a small memory: what goes first, what it learns, and that it stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from tests.property.cache_world import policy_of, walk
from tests.unit.memory.geometry import small_arena
from weft.errors import ConfigError
from weft.memory.memory import Memory
from weft.memory.prefix.policies import POLICIES, check_policy, make_policy
from weft.memory.prefix.policy import LeastRecentlyUsed, PrefillCost
from weft.memory.prefix.tree import Node
from weft.memory.prefix.value import policy as worth_module
from weft.memory.prefix.value.features import Kind
from weft.memory.prefix.value.policy import ValuePolicy
from weft.memory.values import NodeId
from weft.units import PAGE_TOKENS, SeqId

PAGES_PER_FRAME = 4


class Bench:
    """A memory of a few frames, four pages or one state each, and a clock that is set by hand."""

    def __init__(self, policy: str, frames: int) -> None:
        arena = small_arena(PAGES_PER_FRAME, 1, frames)
        self.now_s = 0.0
        made = make_policy(policy, arena, PrefillCost(1.0, 1e-4), lambda: self.now_s)
        self.worth = made
        self.memory = Memory(arena, cache=True, policy=made)
        self._next = 0

    def ask(self, prompt: list[int], answer: int = 0) -> int:
        """One request from beginning to end; returns how many of its tokens were cached."""
        seq, self._next = SeqId(self._next), self._next + 1
        tokens = np.array(prompt, np.int32)
        known = np.append(tokens, np.full(answer, 10**6 + seq, np.int32)).astype(np.int32)
        cached = None
        for _ in range(64):
            draft = self.memory.draft()
            match = self.memory.match(tokens, salt="")
            if draft.open(seq, match, len(known)):
                cached = match.cached_tokens
                self.memory.commit(draft.seal())
                break
            assert draft.reclaim(pages=len(known) // PAGE_TOKENS + 1, slots=1), "it does not fit at all"
            self.memory.commit(draft.seal())
        assert cached is not None
        draft = self.memory.draft()
        draft.close(seq, keep=known)
        self.memory.commit(draft.seal())
        self.memory.audit()
        return cached


def prompt(*parts: tuple[int, int]) -> list[int]:
    return [token for token, count in parts for _ in range(count)]


def hits(policy: str, *, rounds: int = 60) -> int:
    """Requests that share a beginning, each followed by two long ones that nobody asks again."""
    bench, found = Bench(policy, 12), 0
    for number in range(rounds):
        bench.now_s += 10
        found += bench.ask(prompt((1, 128), (100 + number, 5))) >= 128
        bench.ask(prompt((2, 128)) if number == 0 else prompt((1, 128)))
        for other in range(2):
            bench.now_s += 1
            bench.ask(prompt((1000 + 2 * number + other, 200)))
    return found


def test_what_is_asked_again_and_again_stays_though_long_prompts_pass_through() -> None:
    assert hits("worth") >= 50
    assert hits("lru") < 30


def test_it_learns_who_comes_back_and_when() -> None:
    """Conversations of short answers go on after 20 seconds, those of long answers never do."""
    bench = Bench("worth", 40)
    assert isinstance(bench.worth, ValuePolicy)
    for number in range(80):
        goes_on = number % 2 == 0
        first = prompt((100 + number, 40))
        seq = bench._next
        bench.ask(first, answer=4 if goes_on else 60)
        bench.now_s += 20
        if goes_on:
            bench.ask([*first, *prompt((10**6 + seq, 4), (5, 8))], answer=60)
        bench.now_s += 1
    hazard, rates = bench.worth._hazard, bench.worth._hazard.rates[Kind.END]
    hazard.learn()
    short, long = (hazard.factors[int(Kind.END) * 64 + 40 + size.bit_length()] for size in (4, 60))
    assert short > 3 * long
    assert rates[5] > 3 * rates[2], "16 to 32 seconds, and 2 to 4"


def test_a_state_knows_what_it_was_and_how_many_answers_were_gone_on_from_before_it() -> None:
    bench = Bench("worth", 40)
    assert isinstance(bench.worth, ValuePolicy)
    said = prompt((1, 40))
    for turn in range(3):
        seq = bench._next
        bench.ask(said, answer=8)
        bench.now_s += 5
        said = [*said, *prompt((10**6 + seq, 8), (10 + turn, 8))]
    bench.ask(prompt((2, 40)), answer=8)
    records = bench.worth._records
    ends = [row for row in range(records.count) if records.origins[row] is Kind.END]
    assert [records.turns[row] for row in ends] == [0, 1, 2, 0]
    assert [Kind(records.kinds[row]) for row in ends] == [Kind.USED, Kind.USED, Kind.END, Kind.END]


def test_candidates_are_valued_as_they_are_now_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two sweeps everything grows older; where that is not looked at, a stale order stays."""
    wrong = []
    for refresh in (ValuePolicy._refresh, lambda self: None):
        monkeypatch.setattr(ValuePolicy, "_refresh", refresh)
        monkeypatch.setattr(worth_module, "POOL_LOW", 0)
        bench = Bench("worth", 40)
        assert isinstance(bench.worth, ValuePolicy)
        for number in range(6):
            bench.ask(prompt((number, 40)), answer=4)
            bench.now_s += 40
        bench.ask(prompt((7, 40)), answer=4)
        pool = bench.worth._pool
        values = dict(zip(pool._rows, pool._values, strict=True))
        assert set(values) == set(bench.worth._rows.values())
        now = {row: bench.worth._value(row, float(bench.worth._records.rates[row])) for row in values}
        wrong.append(max(abs(values[row] / now[row] - 1) for row in values))
    assert wrong[0] < 1e-9 < wrong[1]


def test_the_same_run_makes_the_same_choices() -> None:
    runs = []
    for _ in range(2):
        bench = Bench("worth", 12)
        runs.append([bench.ask(prompt((number * 7 % 5 // 2, 50), (9, number % 3))) for number in range(60)])
    assert runs[0] == runs[1]
    assert any(runs[0])


def test_what_is_remembered_is_bounded_in_count_in_tokens_and_in_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth_module, "GHOSTS_MAX", 20)
    bench = Bench("worth", 12)
    assert isinstance(bench.worth, ValuePolicy)
    for number in range(100):
        bench.ask(prompt((number, 100)))
    assert 10 < len(bench.worth._ghosts) <= 20
    assert bench.worth._history.token_count < 40 * 100
    assert len(bench.worth._records.nodes) < 60, "rows are used again"
    bench.worth._history_tokens_max = 1000
    bench.ask(prompt((7000, 100)))
    assert bench.worth._history.token_count <= 1000 + 3 * 200
    bench.now_s += 10_000
    bench.ask(prompt((7001, 100)))
    assert len(bench.worth._ghosts) <= 2


def test_a_request_is_told_how_far_its_prompt_was_seen_though_it_is_gone() -> None:
    bench = Bench("worth", 8)
    bench.ask(prompt((1, 96)))
    for number in range(12):
        bench.ask(prompt((50 + number, 150)))
    asked = np.array(prompt((1, 96), (2, 20)), np.int32)
    match = bench.memory.match(asked, salt="")
    assert match.cached_tokens == match.kv_tokens == 0
    assert match.recall.seen_tokens == 96
    assert match.recall.prompt_tokens == 115
    assert bench.memory.match(asked, salt="other").recall.seen_tokens == 0


def test_asking_what_would_go_changes_nothing_that_is_kept() -> None:
    bench = Bench("worth", 12)
    for number in range(20):
        bench.ask(prompt((number, 90)))
    states = bench.memory._books.cache.order.states
    ranked = [[node.id for node in bench.worth.order(states)] for _ in range(3)]
    assert ranked[0] == ranked[1] == ranked[2]
    assert set(ranked[0]) == set(states)


@pytest.mark.parametrize("seed", [seed for seed in range(40) if policy_of(seed) == "worth"])
def test_every_state_has_one_record_after_any_walk(seed: int) -> None:
    world = walk(seed)
    cache = world.memory._books.cache
    assert isinstance(cache.policy, ValuePolicy) == bool(world.m)
    if not isinstance(cache.policy, ValuePolicy):
        return
    worth, states = cache.policy, cache.order.states
    assert set(worth._rows) == set(states)
    live = [row for row, node in enumerate(worth._records.nodes) if node is not None]
    assert sorted(worth._rows.values()) == live == np.flatnonzero(worth._records.live).tolist()
    assert not set(worth._ghosts) & set(live)
    for row in (*live, *worth._ghosts):
        place = worth._records.places[row]
        assert place is not None
        assert place.slot == row


class Liar(LeastRecentlyUsed):
    """Names what is not there, the same twice, and never all."""

    def __init__(self) -> None:
        self._seen: list[Node] = []

    def kept(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        self._seen.append(node)

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        yield from (node for node in self._seen[::-2] for _ in range(2))


def test_a_policy_that_lies_corrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(POLICIES):
        monkeypatch.setitem(POLICIES, name, lambda plan, cost, clock: Liar())
    assert sum(walk(seed).seen["state"] for seed in range(1, 40)) > 20


def test_an_unknown_policy_is_refused_by_name_and_a_model_without_states_needs_none() -> None:
    with pytest.raises(ConfigError, match="--cache-policy is 'best'; it must be one of worth, lru, marconi"):
        check_policy("best")
    stateless = make_policy("worth", small_arena(4, 0, 8), PrefillCost(), lambda: 0.0)
    assert isinstance(stateless, LeastRecentlyUsed)


def test_marconi_gives_up_what_is_old_and_cheap_to_compute_first() -> None:
    bench = Bench("marconi", 40)
    bench.ask(prompt((1, 20)))
    bench.now_s += 1
    bench.ask(prompt((2, 400)))
    bench.now_s += 10
    bench.ask(prompt((3, 20)))
    states = bench.memory._books.cache.order.states
    assert [node.end for node in bench.worth.order(states)] == [20, 400, 20]
    oldest = next(bench.worth.order(states)).id
    bench.ask(prompt((1, 20), (4, 9)))
    assert next(bench.worth.order(states)).id != oldest, "what was used is no longer old"
