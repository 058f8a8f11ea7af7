"""Policies side by side on small made traffic: deterministic numbers, no timings."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.support.synthetic import Library, document_traffic, with_one_shots, with_scans
from weft.costs.step import StepCost
from weft.memory import state
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.spec import ModelSpec, attention, gated_delta
from weft_tools.sim.arms import ARMS, Arm, find_arm, prefill_cost
from weft_tools.sim.oracle import infinite_cache
from weft_tools.sim.replay import replay
from weft_tools.sim.report import Report
from weft_tools.sim.traffic import Traffic, TrafficRequest

COST = StepCost(fixed_s=5e-3, token_s=5e-6, pair_s=8e-11, decode_s=1e-4, context_s=1e-9)
LIBRARY = Library(
    documents=16,
    lifetime_s=200.0,
    front_tokens=256,
    part_tokens=512,
    depth=3,
    question_tokens=64,
    answer_tokens=32,
    requests_per_s=2.0,
    thinks_s=15.0,
)
REQUESTS = 300
REFERENCES = ("lru", "every:512", "prompt")


@cache
def traffic_called(name: str) -> Traffic:
    documents = document_traffic(11, REQUESTS, LIBRARY)
    if name == "one-shots":
        return with_one_shots(documents, 3, share=0.15, tokens=6000)
    if name == "scans":
        return with_scans(documents, 5, every_s=60.0, prompts=20, tokens=2500, instruction_tokens=256)
    return documents


def arena(megabytes: int) -> ArenaPlan:
    layers = tuple(attention(1, 64) if at % 4 == 3 else gated_delta(1, 2, 64, 64, 4) for at in range(8))
    return plan_arena(ModelSpec("qwen3_5", 1000, 256, 65536, "bfloat16", layers), megabytes * 10**6, compress=True)


@cache
def found(name: str, megabytes: int, arm: str) -> Report:
    return replay(traffic_called(name), arena(megabytes), COST, arm=arm)


@pytest.mark.parametrize(("name", "megabytes"), [("documents", 8), ("one-shots", 24), ("scans", 8)])
def test_the_value_policy_finds_and_saves_more_than_any_reference_at_equal_bytes(name: str, megabytes: int) -> None:
    value = found(name, megabytes, "value")
    for arm in REFERENCES:
        other = found(name, megabytes, arm)
        assert value.cached_tokens > other.cached_tokens, arm
        assert value.saved_s > other.saved_s, arm
        assert value.prompt_tokens == other.prompt_tokens


def test_what_is_compressed_in_fewer_bits_leaves_room_to_find_more() -> None:
    rates = [found("documents", 8, arm).hit_rate for arm in ("value", "value+compressed", "value+compressed4")]
    assert rates == sorted(rates)
    assert rates[2] > rates[1] + 0.01 > rates[0] + 0.02
    compressed, nibbles = (found("documents", 8, arm) for arm in ("value+compressed", "value+compressed4"))
    assert compressed.cache.compressed_pages
    assert nibbles.cache.restored_pages
    assert not found("documents", 8, "value").cache.compressed_pages


def test_in_memory_without_end_every_policy_finds_the_same_and_no_more_than_there_is() -> None:
    bound = infinite_cache(traffic_called("documents"))
    reports = [found("documents", 1000, arm) for arm in ("value", "lru")]
    assert len({report.cached_tokens for report in reports}) == 1
    assert all(report.cache.evicted_states == 0 for report in reports)
    assert 0.8 * bound.at_states < reports[0].cached_tokens <= bound.at_states


def test_the_same_replay_makes_the_same_choices_with_steps_left_out_or_not() -> None:
    traffic = document_traffic(2, 100, LIBRARY)
    digests = {
        replay(traffic, arena(8), COST, arm="value", jump=jump).timeline.cached_tokens.tobytes()
        for jump in (True, False)
    }
    assert len(digests) == 1
    assert replay(traffic, arena(8), COST, arm="lru").timeline.cached_tokens.tobytes() not in digests


def test_every_arm_is_found_by_its_name_and_costs_are_what_the_model_says() -> None:
    for name in ("value", "marconi", "lru"):
        assert isinstance(find_arm(name), Arm)
        assert name in ARMS
    cost = prefill_cost(COST)
    for start, end in ((0, 1000), (5000, 90_000)):
        assert cost.between(start, end) == pytest.approx(COST.prefill_s(start, end), rel=1e-3)


# ---------------------------------------------------------------------- made traffic


def test_made_traffic_is_a_function_of_its_seed() -> None:
    one, same, other = (document_traffic(seed, 60, LIBRARY) for seed in (1, 1, 2))
    assert one.requests == same.requests
    assert one.requests != other.requests
    times = [request.at_s for request in one.requests]
    assert times == sorted(times)
    assert len(one) == 60


def test_documents_are_shared_and_branch_and_some_readers_go_on_with_the_answer() -> None:
    traffic = document_traffic(4, 120, LIBRARY)
    fronts = [request.blocks[0] for request in traffic.requests]
    most = max(set(fronts), key=fronts.count)
    ways = {request.blocks[:60] for request in traffic.requests if request.blocks[0] == most}
    assert fronts.count(most) > 10
    assert len(ways) > 5
    whole = [traffic.tokens(at) for at in range(len(traffic))]
    goes_on = sum(
        any(later.size > first.size and (later[: first.size] == first).all() for later in whole) for first in whole
    )
    assert 20 < goes_on < 70


@pytest.mark.parametrize(
    "mixed",
    [
        lambda traffic: with_one_shots(traffic, 3, share=0.2, tokens=4000),
        lambda traffic: with_scans(traffic, 3, every_s=20.0, prompts=8, tokens=2000, instruction_tokens=256),
    ],
    ids=["one-shots", "scans"],
)
def test_what_is_mixed_in_shares_nothing_with_what_was_there(mixed: object) -> None:
    assert callable(mixed)
    base = document_traffic(4, 100, LIBRARY)
    both: Traffic = mixed(base)
    assert len(both) > len(base) + 10
    there = {request.blocks for request in base.requests}
    old = [at for at, request in enumerate(both.requests) if request.blocks in there]
    new = [at for at, request in enumerate(both.requests) if request.blocks not in there]
    assert len(old) == len(base)
    taken = set(np.concatenate([both.tokens(at) for at in old]).tolist())
    assert not taken & set(np.concatenate([both.tokens(at) for at in new]).tolist())
    assert [both.tokens(at).tolist() for at in old] == [base.tokens(at).tolist() for at in range(len(base))]


def test_turns_stay_linked_when_something_is_mixed_in() -> None:
    from weft_tools.sim.recording import mooncake_traffic

    rows = [
        {"timestamp": at, "input_length": length, "output_length": 40, "hash_ids": ids}
        for at, length, ids in ((0, 1100, [1, 2, 3]), (9000, 1400, [1, 2, 4]), (9500, 700, [1, 8]))
    ]
    traffic = with_one_shots(mooncake_traffic(rows), 1, share=2.0, tokens=900)
    [first] = [at for at, request in enumerate(traffic.requests) if request.next_turn is not None]
    later = traffic.requests[first].next_turn
    assert later is not None
    assert (traffic.tokens(later)[:1140] == traffic.tokens(first)).all()


def forks(prompts: int, each: int) -> Traffic:
    """``prompts`` texts of 1,024 tokens in turns, ``each`` times, always with 128 other tokens at their end."""
    block, shared = 128, 8
    own = iter(range(prompts * shared, prompts * (shared + each)))
    requests = [
        TrafficRequest(
            at_s=float(number),
            prompt_tokens=(shared + 1) * block,
            output_tokens=8,
            blocks=(*range(number % prompts * shared, (number % prompts + 1) * shared), next(own)),
        )
        for number in range(prompts * each)
    ]
    return Traffic(requests, block_tokens=block)


def test_a_prompt_with_many_ends_is_found_again_in_full_memory_of_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request wants a state where they part before the second one has come, and by then memory is full."""
    small = arena(6)
    assert small.slot_count <= 64
    found = replay(forks(6, 12), small, COST, arm="value")
    assert found.cache.evicted_states
    assert found.hit_rate > 0.7
    monkeypatch.setattr(state, "slots_ahead", lambda slot_count: 1)
    assert replay(forks(6, 12), small, COST, arm="value").hit_rate < 0.1
