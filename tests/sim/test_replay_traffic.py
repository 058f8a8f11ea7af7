"""Traces become token streams, steps become seconds, and the same replay is the same report."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.workload import small_arena
from weft.config import Sizes
from weft.costs.fit import fit_steps
from weft.costs.step import StepCost, Work, pairs_of
from weft.errors import ConfigError
from weft.families.architecture import Architecture
from weft.families.mixers.attention import Attention
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.feed_forward import Experts
from weft.planning.roofline import DEVICES, model_load, roofline
from weft.rpc.recording import Fingerprints, header_line, sequence_line
from weft_tools.sim.arms import find_arm
from weft_tools.sim.oracle import infinite_cache
from weft_tools.sim.recording import mooncake_traffic, read_recording, read_trace, resized
from weft_tools.sim.replay import replay, sizes_for
from weft_tools.sim.study import run_study

COST = StepCost(fixed_s=5e-3, token_s=5e-6, pair_s=8e-11, decode_s=1e-5, context_s=1e-9)


def row(at_ms: float, length: int, output: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": ids}


# ---------------------------------------------------------------------- Mooncake's form


def test_equal_ids_are_equal_tokens_and_others_differ() -> None:
    traffic = mooncake_traffic([row(0, 1024, 3, [5, 6]), row(1000, 1024, 3, [5, 9])], linked=False)
    one, two = traffic.tokens(0), traffic.tokens(1)
    assert one.size == two.size == 1027
    assert (one[:512] == two[:512]).all()
    assert not set(one[512:].tolist()) & set(two[512:].tolist())
    assert traffic.requests[1].at_s == 1.0


def test_a_turn_goes_on_with_the_tail_and_the_answer_of_the_one_before() -> None:
    rows = [row(0, 1100, 40, [1, 2, 3]), row(9000, 1400, 7, [1, 2, 4])]
    traffic = mooncake_traffic(rows)
    assert traffic.requests[0].next_turn == 1
    first, second = traffic.tokens(0), traffic.tokens(1)
    assert (second[:1140] == first).all()
    assert infinite_cache(traffic).at_states == 1139  # where the first request's state was left
    apart = mooncake_traffic(rows, linked=False)
    assert infinite_cache(apart).at_states == 1024


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(0, 700, 40, [1, 3]), row(9, 900, 7, [1, 4])], "one shared block is the service's own"),
        ([row(0, 1100, 400, [1, 2, 3]), row(9, 1400, 7, [1, 2, 4])], "too short to hold the answer"),
        ([row(0, 1100, 40, [1, 2, 3]), row(9, 1700, 7, [1, 2, 3, 4])], "it goes on behind the partial block"),
    ],
)
def test_what_is_no_continuation_is_not_linked(rows: list[dict[str, object]], why: str) -> None:
    assert mooncake_traffic(rows).requests[0].next_turn is None, why


@pytest.mark.parametrize(
    "broken",
    [
        {"timestamp": 0, "input_length": 3, "output_length": 1},
        row(0, 513, 1, [1]),
        row(0, 0, 1, []),
        {**row(0, 3, 1, [1]), "input_length": "many"},
    ],
)
def test_a_row_that_is_not_of_the_form_is_named(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the trace, request 2"):
        mooncake_traffic([row(0, 3, 1, [1]), broken])


def test_the_sample_is_a_tenth_of_the_published_trace() -> None:
    traffic, recording = read_trace("sample")
    assert recording is None
    assert (len(traffic), traffic.prompt_tokens) == (431, 5_846_275)
    assert sum(one.next_turn is not None for one in traffic.requests) == 107
    assert infinite_cache(traffic).page_rate == pytest.approx(0.3117, abs=1e-4)


def test_a_trace_is_cut_by_arrival_and_comes_faster(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in [row(3000, 5, 1, [1]), row(0, 6, 1, [2])]))
    traffic, _ = read_trace(str(file), limit=1)
    assert traffic.requests[0].prompt_tokens == 6
    traffic, _ = read_trace(str(file), rate=2.0)
    assert [one.at_s for one in traffic.requests] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no requests"),
        ("{]", "line 1: not JSON"),
        ('{"a": 1}\n[]', "line 2: a JSON object"),
        ('{"weft_recording": 9}', "not a recording of version 1"),
    ],
)
def test_a_file_that_is_no_trace_is_one_sentence(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_trace(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "nothing"))


# ---------------------------------------------------------------------- costs


def test_pairs_are_what_each_token_sees() -> None:
    assert pairs_of(3, 6) == 4 + 5 + 6


def qwen_397b() -> Architecture:
    attention = Attention(heads=32, kv_heads=2, head_dim=256, scale=1.0, rope=None)
    delta = GatedDelta(k_heads=16, v_heads=64, k_dim=128, v_dim=128, conv_kernel=4)
    return Architecture(
        family="qwen3_5",
        vocab_size=248320,
        hidden_size=4096,
        max_positions=262144,
        dtype="bfloat16",
        norm_eps=1e-6,
        tied_embeddings=False,
        mixers=tuple(attention if at % 4 == 3 else delta for at in range(60)),
        feed_forwards=(Experts(512, 10, 1024, True, shared_width=1024),) * 60,
    )


def test_the_roofline_is_that_of_the_published_comparison() -> None:
    """8 GPUs at 40 % of 1,979 TFLOP/s, 17 billion active parameters: 5.37e-6 L + 3.88e-11 L^2 seconds."""
    load = model_load(
        qwen_397b(),
        parameters=397_000_000_000,
        weight_bytes=1,
        eight_bit=True,
        kv_bytes=8 * 15360,
        state_bytes=8 * 24e6,
    )
    assert load.active_params == pytest.approx(17e9, rel=0.02)
    cost = roofline(load, "h100", count=8)
    assert cost.prefill_s(0, 1) == pytest.approx(5.37e-6, rel=0.02)
    assert cost.prefill_s(0, 100_000) == pytest.approx(5.37e-6 * 1e5 + 3.88e-11 * 1e10, rel=0.02)
    assert cost.prefill_s(0, 70_000) + cost.prefill_s(70_000, 100_000) == pytest.approx(cost.prefill_s(0, 100_000))


def test_a_step_costs_the_larger_of_arithmetic_and_traffic() -> None:
    load = model_load(
        qwen_397b(),
        parameters=397_000_000_000,
        weight_bytes=1,
        eight_bit=True,
        kv_bytes=8 * 15360,
        state_bytes=8 * 24e6,
    )
    cost = roofline(load, "H100", count=8)
    full = cost.step_s(Work(8192, pairs_of(0, 8192), 0, 0))
    assert full == pytest.approx(5e-3 + cost.prefill_s(0, 8192))
    bandwidth = 8 * 0.7 * DEVICES["h100"].memory_bytes_s
    one = cost.step_s(Work(0, 0, 1, 1000))
    assert one == pytest.approx(5e-3 + (load.active_params + 1000 * 8 * 15360 + 2 * 8 * 24e6) / bandwidth, rel=1e-3)
    many = cost.step_s(Work(0, 0, 64, 64_000))
    assert 10 * (one - 5e-3) < many - 5e-3 < 64 * (one - 5e-3)  # experts are shared, and not all are used


def test_an_unknown_device_lists_those_that_there_are() -> None:
    load = model_load(qwen_397b(), parameters=1, weight_bytes=1, eight_bit=True, kv_bytes=1, state_bytes=1)
    with pytest.raises(ConfigError, match=r"H100.*--fit"):
        roofline(load, "TPU", count=1)


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    random = np.random.default_rng(0)
    works = [
        Work(
            int(random.integers(0, 4000)),
            int(random.integers(0, 10**7)),
            int(random.integers(0, 60)),
            int(random.integers(0, 10**5)),
        )
        for _ in range(60)
    ]
    fitted = fit_steps([(work, COST.step_s(work)) for work in works])
    assert fitted.error < 1e-9
    for name in ("fixed_s", "token_s", "pair_s", "decode_s", "context_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(COST, name), rel=1e-6)


def test_a_fit_has_no_negative_terms() -> None:
    steps = [(Work(100 * at, 0, at % 3, 1000 * (at % 7)), 1e-3 + 1e-5 * at - 1e-5 * (at % 3)) for at in range(40)]
    fitted = fit_steps(steps)
    assert min(fitted.fixed_s, fitted.token_s, fitted.pair_s, fitted.decode_s, fitted.context_s) >= 0
    assert fitted.decode_s == 0.0
    with pytest.raises(ConfigError, match="8 at least"):
        fit_steps(steps[:5])


# ---------------------------------------------------------------------- replays


def small_traffic() -> list[dict[str, object]]:
    rows = []
    for at in range(24):
        one = at % 6
        rows.append(
            row(
                40.0 * at,
                1030 + 512 * (at // 6),
                20,
                [0, 10 + one, *(100 * one + turn for turn in range(1 + at // 6)), 5000 + at][: 3 + at // 6],
            )
        )
    return rows


def test_the_same_replay_has_the_same_hash_and_another_has_another() -> None:
    traffic = mooncake_traffic(small_traffic())
    arena = small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=80)
    report = replay(traffic, arena, COST, arm="lru")
    assert report.cached_tokens > 0
    assert replay(mooncake_traffic(small_traffic()), arena, COST, arm="lru").digest == report.digest
    assert replay(traffic, replace(arena, frame_count=100), COST, arm="lru").digest != report.digest
    assert replay(traffic, arena, COST, arm="none").digest != report.digest
    slower = msgspec.structs.replace(COST, fixed_s=6e-3)
    assert replay(traffic, arena, slower, arm="lru").digest != report.digest


def test_the_numbers_of_a_report_add_up() -> None:
    traffic = mooncake_traffic(small_traffic())
    arena = small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=80)
    seen: list[tuple[int, int]] = []
    report = replay(traffic, arena, COST, arm="lru", on_progress=lambda ended, of: seen.append((ended, of)))
    uses = asdict(report.mean_bytes)
    assert 0 < uses.pop("seconds") <= report.virtual_s
    assert sum(uses.values()) == pytest.approx(arena.arena_bytes)
    assert min(uses["running_kv"], uses["running_states"], uses["cached_kv"]) > 0
    in_pieces = replay(traffic, arena, COST, arm="lru", sizes=sizes_for(arena, traffic, step_tokens_max=65))
    assert in_pieces.mean_bytes.leased_ahead > uses["leased_ahead"] == 0
    assert report.requests == 24
    assert report.cached_tokens == report.timeline.cached_tokens.sum() == report.cache.hit_tokens
    answers = sum(one.output_tokens - 1 for one in traffic.requests)
    assert report.computed_tokens == traffic.prompt_tokens + answers - report.cached_tokens
    assert report.saved_s == pytest.approx(
        sum(COST.prefill_s(0, count) for count in report.timeline.cached_tokens.tolist())
    )
    assert report.hit_rate <= infinite_cache(traffic).state_rate
    assert (report.timeline.first_s > report.timeline.began_s).all()
    assert seen[-1] == (24, 24)
    assert json.loads(json.dumps(report.to_json()))["hash"] == report.digest


def test_a_cache_that_is_off_finds_nothing_and_everything_fits_when_there_is_room() -> None:
    traffic = mooncake_traffic(small_traffic())
    assert (
        replay(
            traffic, small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=80), COST, arm="none"
        ).cached_tokens
        == 0
    )
    wide = small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=4000)
    report = replay(traffic, wide, COST, arm="every:64")
    assert report.cache.evicted_states == 0
    assert report.cached_tokens > 0.8 * infinite_cache(traffic).at_states


def test_a_request_that_is_longer_than_what_is_served_is_left_out() -> None:
    traffic = mooncake_traffic([row(0, 600, 5, [1, 2]), row(1, 5000, 5, list(range(10, 20)))])
    report = replay(traffic, small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=20), COST)
    assert (report.requests, report.refused) == (1, 1)
    assert np.isnan(report.timeline.began_s[1])


def test_an_unknown_policy_lists_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"lru.*every:N"):
        find_arm("belady")
    with pytest.raises(ConfigError, match="multiple of 64"):
        find_arm("every:100")


# ---------------------------------------------------------------------- fingerprints


def sequence(fingerprints: Fingerprints, tokens: list[int], output: int, salt: str = "") -> dict[str, object]:
    return sequence_line(
        fingerprints.of(tokens, salt, computed=len(tokens) - 1),
        at_s=0.0,
        salt=fingerprints.salt(salt),
        input_length=len(tokens) - output,
        output_length=output,
    )


def recorded(lines: list[dict[str, object]]) -> list[list[int]]:
    header = header_line(
        model="m",
        arena=small_arena(pages_per_frame=1, slots_per_frame=1, frame_count=9),
        snapshots="auto",
        sizes=Sizes(max_model_len=64, rows_max=1, step_tokens_max=64, queue_max=1, memory_bytes=1),
    )
    timed = [{**line, "at_s": float(at)} for at, line in enumerate(lines)]
    traffic = read_recording([header, *timed]).traffic
    return [traffic.tokens(index).tolist() for index in range(len(traffic))]


def common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


def test_recorded_sequences_share_pages_as_the_real_ones_did() -> None:
    real = [list(range(100)), [*range(50), *range(900, 950)], [*range(48), *range(700, 710)], [5] * 40]
    replayed = recorded([sequence(Fingerprints(bytes(32)), one, 10) for one in real])
    for left in range(4):
        for right in range(4):
            assert common(replayed[left], replayed[right]) // 16 == common(real[left], real[right]) // 16


def test_the_place_inside_a_page_where_a_request_ended_is_found_by_whoever_goes_on_from_it() -> None:
    fingerprints = Fingerprints(bytes(32))
    first = list(range(38))  # in memory up to 37 when it ended
    real = [first, [*first[:37], *range(500, 560)], [*first[:35], *range(600, 660)], [*first[:37], 9, 9]]
    replayed = recorded([sequence(fingerprints, one, 4) for one in real])
    assert common(replayed[0], replayed[1]) >= 37
    assert common(replayed[0], replayed[3]) >= 37
    assert 32 <= common(replayed[0], replayed[2]) <= 35


def test_no_hash_tells_a_token_without_the_key_and_salts_have_nothing_in_common() -> None:
    tokens = list(range(64))
    known = Fingerprints(bytes(32)).of(tokens, "", computed=64).blocks
    assert Fingerprints(bytes(32)).of(tokens, "", computed=64).blocks == known
    assert Fingerprints(secrets.token_bytes(32)).of(tokens, "", computed=64).blocks != known
    salted = Fingerprints(bytes(32)).of(tokens, "tenant", computed=64).blocks
    assert not {known[at : at + 8] for at in range(0, 32, 8)} & {salted[at : at + 8] for at in range(0, 32, 8)}
    assert "tenant" not in Fingerprints(bytes(32)).salt("tenant")


def test_a_recorded_arena_is_cut_anew_for_another_memory() -> None:
    arena = small_arena(pages_per_frame=5, slots_per_frame=2, frame_count=40)
    assert resized(arena, arena.arena_bytes).frame_bytes % arena.page_bytes == 0
    assert resized(arena, 2 * arena.arena_bytes).arena_bytes == pytest.approx(2 * arena.arena_bytes, rel=0.1)


def test_nothing_beats_the_oracle_and_the_oracle_not_the_bound() -> None:
    traffic = mooncake_traffic(small_traffic())
    plans = [small_arena(pages_per_frame=8, slots_per_frame=1, frame_count=count) for count in (40, 80, 160)]
    study = run_study(traffic, plans, COST, [find_arm("lru"), find_arm("every:256")])
    for size in study.sizes:
        assert size.oracle is not None
        assert max(report.hit_rate for report in size.reports) <= size.oracle.hit_rate
        assert size.oracle.hit_rate <= study.bound.state_rate
    assert study.sizes[0].oracle.hit_rate < study.sizes[2].oracle.hit_rate
    assert run_study(traffic, plans[:1], COST, [find_arm("lru")], oracle=False).sizes[0].oracle is None
