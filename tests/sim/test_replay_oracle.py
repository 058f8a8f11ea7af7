"""Bounds and hindsight: against a search through every choice, on instances that are small enough for one."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from tests.support.synthetic import document_traffic
from tests.support.workload import small_arena
from weft.costs.step import StepCost
from weft.schedule.snapshots import AUTO, insurance_tokens, wanted_positions
from weft.units import PAGE_TOKENS
from weft_tools.sim.arms import find_arm
from weft_tools.sim.oracle import Forest, OracleMemory, Span, computed_tokens, infinite_cache, oracle
from weft_tools.sim.study import run_study
from weft_tools.sim.traffic import Traffic, TrafficRequest

BLOCK = 64
COST = StepCost(fixed_s=0, token_s=1e-3, pair_s=1e-7, decode_s=0, context_s=0)
STATE_BYTES = 40.0


def tiny_traffic(random: Random) -> tuple[Traffic, list[Span | None]]:
    """A few requests over two documents: the document, a part of it, or it and something more."""
    documents = [(0, 1, 2), (0, 3)]
    requests: list[TrafficRequest] = []
    spans: list[Span | None] = []
    free, at_s = 10, 0.0
    for _ in range(random.choice([3, 4, 5])):
        at_s += random.choice([1, 2, 3])
        document = random.choice(documents)
        own = random.choice([0, 1, 1])
        blocks = (*document[: random.choice([1, 2, 3])], *range(free, free + own))
        free += own
        prompt = len(blocks) * BLOCK - random.choice([0, 0, 20])
        requests.append(TrafficRequest(at_s, prompt, random.choice([1, 30]), blocks))
        spans.append(Span(at_s, at_s + 0.5, at_s + random.choice([0.7, 1.5])))
    return Traffic(requests, block_tokens=BLOCK), spans


class Search:
    """Every choice of where each request begins, checked moment by moment with sets of prefixes."""

    def __init__(self, traffic: Traffic, spans: list[Span | None], memory: OracleMemory, foresight: bool) -> None:
        self.memory = memory
        self.spans = [span for span in spans if span is not None]
        self.tokens = [tuple(traffic.tokens(index).tolist()) for index in range(len(traffic))]
        self.prompts = [one.prompt_tokens for one in traffic.requests]
        self.ends = [computed_tokens(traffic, index) for index in range(len(traffic))]
        self.moments = sorted({moment for span in self.spans for moment in (span.began_s, span.prompt_s, span.ended_s)})
        first = insurance_tokens(int(memory.state_bytes), int(16 * memory.kv_token_bytes))
        self.left: list[set[int]] = []
        parted: list[tuple[int, int]] = []
        for index, prompt in enumerate(self.prompts):
            common = max((self._common(index, other) for other in range(index)), default=0)
            self.left.append(
                set(wanted_positions(AUTO, known_tokens=prompt, start=0, kv_tokens=common, insurance_first=first))
            )
            fork = min(common, prompt - 1) // 64 * 64
            for other in range(len(self.tokens)) if foresight else ():
                if self.tokens[other][:fork] == self.tokens[index][:fork]:
                    parted.append((other, fork))
        for other, fork in parted:
            self.left[other].add(fork)
            self.left[other].discard(0)

    def _common(self, index: int, other: int) -> int:
        length = min(self.ends[index], self.ends[other])
        return next((at for at in range(length) if self.tokens[index][at] != self.tokens[other][at]), length)

    def options(self, index: int) -> list[tuple[int, int, float] | None]:
        """(position, source, when it is there), or nothing."""
        found: list[tuple[int, int, float] | None] = [None]
        for other in range(len(self.tokens)):
            common = self._common(index, other)
            for position in self.left[other] | {self.ends[other]}:
                early = position < min(self.prompts[other], self.ends[other])
                there_s = self.spans[other].prompt_s if early else self.spans[other].ended_s
                if (
                    other != index
                    and position <= common
                    and position < self.prompts[index]
                    and there_s <= self.spans[index].began_s
                ):
                    found.append((position, other, there_s))
        return found

    def feasible(self, choice: tuple[tuple[int, int, float] | None, ...]) -> bool:
        for hold in choice:
            if hold is not None and choice[hold[1]] is not None and choice[hold[1]][0] > hold[0]:
                return False  # the source starts behind the place, and never computes through it
        for moment in self.moments:
            prefixes: set[tuple[int, ...]] = set()
            states: set[tuple[int, ...]] = set()
            running = held = 0
            for index, span in enumerate(self.spans):
                if span.began_s <= moment < span.ended_s:
                    running += 1
                    prefixes.update(self._prefixes(index, self.ends[index]))
                hold = choice[index]
                if hold is not None and hold[2] <= moment < span.began_s:
                    held += 1
                    prefixes.update(self._prefixes(index, hold[0]))
                    states.add(self.tokens[index][: hold[0]])
            used = len(prefixes) * self.memory.kv_token_bytes + (running + len(states)) * self.memory.state_bytes
            if held and used > self.memory.memory_bytes:
                return False
        return True

    def _prefixes(self, index: int, length: int) -> set[tuple[int, int]]:
        """Each token of the prefix by what is in front of it; equal prefixes have equal members."""
        chain, members = 0, set()
        for at, token in enumerate(self.tokens[index][:length]):
            chain = hash((chain, token))
            members.add((at, chain))
        return members

    def best(self) -> tuple[float, set[tuple[int, ...]]]:
        """The most seconds saved, and every way to begin that some choice of sources makes possible."""
        best, possible = 0.0, set()
        for choice in product(*(self.options(index) for index in range(len(self.tokens)))):
            cached = tuple(0 if hold is None else hold[0] for hold in choice)
            saved = sum(COST.prefill_s(0, position) for position in cached)
            if (saved > best or cached not in possible) and self.feasible(choice):
                best = max(best, saved)
                possible.add(cached)
        return best, possible


@pytest.mark.parametrize("foresight", [False, True])
def test_the_oracle_is_possible_and_seldom_worse_than_the_best_of_all_choices(foresight: bool) -> None:
    shares = []
    tight = 0
    for seed in range(80):
        random = Random(seed)
        traffic, spans = tiny_traffic(random)
        memory = OracleMemory(random.choice([250.0, 300.0, 350.0, 420.0, 500.0]), 1.0, STATE_BYTES)
        best, possible = Search(traffic, spans, memory, foresight).best()
        most, _ = Search(traffic, spans, OracleMemory(1e9, 1.0, STATE_BYTES), foresight).best()
        found = oracle(traffic, spans, memory, COST, foresight=foresight)
        assert found.cached_tokens in possible, f"seed {seed}: {found.cached_tokens} is not possible"
        assert found.saved_s <= best + 1e-9
        tight += best < most - 1e-9
        if best:
            shares.append(found.saved_s / best)
    assert tight > 8, "memory was hardly ever short"
    assert sum(share > 1 - 1e-9 for share in shares) >= 0.95 * len(shares)
    assert min(shares) > 0.5


def chain(count: int, *, gap_s: float = 10.0) -> tuple[Traffic, list[Span | None]]:
    """Pairs of equal prompts: each second one comes ``gap_s`` after the first."""
    requests = [
        TrafficRequest(float(at + (gap_s if again else 0)), 129, 1, (3 * at, 3 * at + 1, 3 * at + 2))
        for again in (False, True)
        for at in range(count)
    ]
    requests.sort(key=lambda one: one.at_s)
    spans: list[Span | None] = [Span(one.at_s, one.at_s + 0.1, one.at_s + 0.2) for one in requests]
    return Traffic(requests, block_tokens=BLOCK), spans


@pytest.mark.parametrize("held", [0, 1, 3, 8])
def test_of_equals_the_oracle_holds_as_many_as_fit(held: int) -> None:
    """Eight prompts whose gaps all overlap, and memory for some beside the one that runs."""
    traffic, spans = chain(8)
    memory = OracleMemory((129 + STATE_BYTES) + held * (128 + STATE_BYTES), 1.0, STATE_BYTES)
    assert sum(count > 0 for count in oracle(traffic, spans, memory, COST).cached_tokens) == held


def test_a_request_that_did_not_run_is_neither_counted_nor_used() -> None:
    traffic, spans = chain(1)
    assert oracle(traffic, spans, OracleMemory(1e9, 1.0, STATE_BYTES), COST).cached_tokens == (0, 128)
    found = oracle(traffic, [None, spans[1]], OracleMemory(1e9, 1.0, STATE_BYTES), COST)
    assert found.cached_tokens == (0,)
    assert found.prompt_tokens == 129


def test_without_states_the_oracle_resumes_where_prompts_part() -> None:
    requests = [TrafficRequest(0.0, 150, 1, (0, 1, 2)), TrafficRequest(5.0, 190, 1, (0, 1, 3))]
    spans: list[Span | None] = [Span(one.at_s, one.at_s + 1, one.at_s + 2) for one in requests]
    found = oracle(Traffic(requests, block_tokens=BLOCK), spans, OracleMemory(1e9, 1.0, 0.0), COST)
    assert found.cached_tokens == (0, 128)


# ---------------------------------------------------------------------- the forest and the bound


def by_comparison(traffic: Traffic, index: int) -> int:
    """The longest prefix that any earlier request had, token by token."""
    mine = traffic.tokens(index)[: computed_tokens(traffic, index)].tolist()
    longest = 0
    for other in range(index):
        theirs = traffic.tokens(other)[: computed_tokens(traffic, other)].tolist()
        same = next(
            (at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(theirs)),
        )
        if traffic.requests[other].salt == traffic.requests[index].salt:
            longest = max(longest, same)
    return longest


def test_the_forest_knows_what_every_request_shares() -> None:
    for seed in range(20):
        traffic, _ = tiny_traffic(Random(seed))
        forest = Forest(traffic)
        for index in range(len(traffic)):
            length = computed_tokens(traffic, index)
            common, place = forest.add(index, length)
            assert common == by_comparison(traffic, index)
            assert place.end == length
        for index in range(len(traffic)):
            path = forest.path(index)
            assert [place.start for place in path] == [0, *(place.end for place in path[:-1])]
            assert path[-1].end == computed_tokens(traffic, index)


def test_the_bound_is_the_longest_shared_prefix_on_each_grid() -> None:
    for seed in range(20):
        traffic, _ = tiny_traffic(Random(seed))
        pages = states = 0
        for index, one in enumerate(traffic.requests):
            common = min(by_comparison(traffic, index), one.prompt_tokens - 1)
            tokens = traffic.tokens(index)
            ends = [
                end
                for other in range(index)
                if (end := computed_tokens(traffic, other)) <= common
                and (traffic.tokens(other)[:end] == tokens[:end]).all()
            ]
            pages += common // 16 * 16
            states += max([common // 64 * 64, *ends])
        bound = infinite_cache(traffic)
        assert (bound.at_pages, bound.at_states) == (pages, states)
        assert bound.prompt_tokens == traffic.prompt_tokens


def test_salts_share_nothing() -> None:
    requests = [TrafficRequest(float(at), 100, 1, (0, 1), salt=salt) for at, salt in enumerate("aab")]
    bound = infinite_cache(Traffic(requests, block_tokens=BLOCK))
    assert bound.at_pages == 96


def test_a_finer_grid_has_a_finer_bound_and_oracle() -> None:
    """A replay on a grid of 16 tokens exceeds the bound on 64, and never its own."""
    traffic = document_traffic(3, 60)
    study = run_study(
        traffic,
        [small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=6000)],
        COST,
        [find_arm("lru")],
        grid_tokens=PAGE_TOKENS,
    )
    [size] = study.sizes
    assert size.oracle is not None
    best = max(size.reports[0].hit_rate, size.oracle.hit_rate)
    assert infinite_cache(traffic).state_rate < best <= study.bound.state_rate
