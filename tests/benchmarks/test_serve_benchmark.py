"""The load generator counts right, and both sides of the comparison do the same work."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.serve import burst_cpu, gaps
from benchmarks.serve.checkpoints import FAMILIES, Family, make_checkpoint
from benchmarks.serve.compare import Side, alternate, compare, medians, ratios, same_prefix
from benchmarks.serve.gaps import MeasuredServer, rows_of, table
from benchmarks.serve.load import LoadPlan, Summary, percentile, run_load, summarise
from weft.families import read_spec
from weft.text.tokenizer import Tokenizer
from weft_tools.bench.serve import Timing


def test_a_plan_is_a_function_of_its_seed_and_shares_what_it_says() -> None:
    plan = LoadPlan(requests=5, prompt_tokens=40, shared_tokens=30, vocab_size=1000)
    prompts = plan.prompts()
    assert prompts == LoadPlan(requests=5, prompt_tokens=40, shared_tokens=30, vocab_size=1000).prompts()
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 5
    assert {len(prompt) for prompt in prompts} == {40}
    assert all(300 <= token < 1000 for prompt in prompts for token in prompt)
    assert LoadPlan(seed=1).prompts() != LoadPlan(seed=2).prompts()


def test_arrivals_come_at_the_asked_rate_or_at_once() -> None:
    times = LoadPlan(requests=4000, request_rate=50.0).arrivals()
    assert times == sorted(times)
    assert times[-1] == pytest.approx(80, rel=0.1)
    assert set(LoadPlan(requests=3).arrivals()) == {0.0}


def test_the_summary_counts_tokens_not_chunks_and_spreads_a_gap_over_them() -> None:
    quick = Timing(0.0, [(1.0, 1), (1.5, 1), (2.5, 2)])
    slow = Timing(0.0, [(3.0, 1)])
    failed = Timing(0.0, error="500: no")
    summary = summarise([quick, slow, failed], seconds=4.0)
    assert (summary.requests, summary.failed, summary.errors) == (3, 1, ("500: no",))
    assert summary.requests_per_s == 2 / 4
    assert summary.output_tokens_per_s == 5 / 4
    assert summary.first_token_median_s == 2.0
    assert summary.first_token_p99_s == 3.0
    assert summary.between_tokens_median_s == 0.5


def test_percentiles_of_few_and_of_none() -> None:
    assert percentile([], 0.99) is None
    assert percentile([2.0], 0.99) == 2.0
    assert percentile([float(i) for i in range(200)], 0.99) == 198.0


def test_a_ratio_above_one_means_weft_is_better_whatever_is_measured() -> None:
    fast = medians([summarise([Timing(0.0, [(1.0, 1), (1.1, 1)])], seconds=1.0)])
    slow = medians([summarise([Timing(0.0, [(2.0, 1), (2.2, 1)])], seconds=2.0)])
    better = ratios(fast, slow)
    assert all(value == pytest.approx(2.0) for value in better.values())
    assert all(value == pytest.approx(0.5) for value in ratios(slow, fast).values())


def test_limits_are_held_against_transformers_gaps_and_the_throughput_without_a_limit() -> None:
    def burst(gap_s: float, seconds: float) -> list[Summary]:
        return [summarise([Timing(0.0, [(1.0, 1), (1.0 + gap_s, 1)])], seconds=seconds)]

    rows = rows_of(
        {"transformers": burst(0.1, 4.0), "0": burst(0.5, 2.0), "100": burst(0.19, 2.05), "25": burst(0.1, 3.0)},
        cpu_s={"0": [3.0, 9.0, 4.0], "100": [5.0], "25": [8.0]},
    )
    assert [row.limit_ms for row in rows] == [0, 25, 100]
    assert [row.gap_ratio for row in rows] == pytest.approx([5.0, 1.0, 1.9])
    assert [row.throughput_share for row in rows] == pytest.approx([1.0, 2 / 3, 2 / 2.05])
    assert [row.cpu_share for row in rows] == pytest.approx([1.0, 0.5, 0.8])
    assert [row.holds for row in rows] == [False, False, True]
    shown = table(rows, medians(burst(0.1, 4.0))).splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["no", "25", "100", "transformers"]
    assert [line.endswith("holds") for line in shown] == [False, False, False, True, False]


def test_a_run_costs_the_cpu_time_of_the_servers_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loaded(url: str, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        until_s = time.process_time() + plan.output_tokens / 100
        while time.process_time() < until_s:
            pass
        return summarise([], seconds=1.0), []

    monkeypatch.setattr(gaps, "run_load", loaded)
    server = MeasuredServer("http://127.0.0.1:1", psutil.Process())
    for tokens in (30, 10):
        server.run(LoadPlan(output_tokens=tokens))
    assert len(server.cpu_s) == 2
    assert server.cpu_s[0] >= 0.25, server.cpu_s
    assert server.cpu_s[1] >= 0.05, server.cpu_s
    assert sum(server.cpu_s) <= time.process_time(), "a run has the time of earlier ones"


def test_a_burst_in_one_process_is_cut_into_more_steps_by_a_limit(tmp_path: Path) -> None:
    made = make_checkpoint("lfm2", "tiny", "float32", under=tmp_path)
    plan = LoadPlan(requests=6, prompt_tokens=256, output_tokens=4, vocab_size=made.vocab_size)
    results = {limit: [one] for limit, one in burst_cpu.bursts(made, [0, 1], plan, 1)}
    [free], [limited] = results[0], results[1]
    assert free.tokens == limited.tokens == 24
    assert len(free.gaps_s) == 18
    assert len(limited.mixed) > len(free.mixed) > 0
    assert sum(tokens for tokens, _ in limited.mixed) < 6 * 256
    lines = burst_cpu.burst_table(results).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["no", "1"]


def test_a_grid_has_steps_of_decodes_alone_and_beside_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_cpu, "GRID_DECODES", (0, 2))
    monkeypatch.setattr(burst_cpu, "GRID_TOKENS", (64, 320))
    made = make_checkpoint("lfm2", "tiny", "float32", under=tmp_path)
    best = burst_cpu.grid(made, 2)
    assert set(best) == {(0, 64), (0, 320), (2, 0), (2, 64), (2, 320)}
    assert all(0 < seconds < float("inf") for seconds in best.values()), best
    assert len(burst_cpu.grid_table(best).splitlines()) == 3


def test_each_side_begins_a_round_in_turn() -> None:
    order: list[str] = []

    def side(name: str) -> Side:
        def run(plan: LoadPlan) -> tuple[Summary, list[Timing]]:
            order.append(name)
            timings = [Timing(0.0, [(1.0, 1)])]
            return summarise(timings, seconds=1.0), timings

        return run

    results = alternate("burst", LoadPlan(), {name: side(name) for name in "abc"}, 3, lambda line: None)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab", "one run of each that is not counted, then rounds"
    assert [len(each) for each in results.values()] == [3, 3, 3]


def test_same_prefix_stops_at_the_first_difference() -> None:
    one, other = [Timing(0.0, tokens=[1, 2, 3, 4])], [Timing(0.0, tokens=[1, 2, 9, 4])]
    assert same_prefix(one, other) == 0.5
    assert same_prefix(one, one) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_made_checkpoint_is_a_hybrid_whose_every_token_has_a_text(tmp_path: Path, family: Family) -> None:
    made = make_checkpoint(family, "tiny", "float32", under=tmp_path)
    spec = read_spec(json.loads((made.directory / "config.json").read_text()))
    assert spec.attention_layers == (1,)
    assert spec.recurrent_layers == (0, 2)
    tokenizer = Tokenizer.load(made.directory)
    assert tokenizer.decode([made.vocab_size - 1], skip_special_tokens=True).startswith(" w")
    again = make_checkpoint(family, "tiny", "float32", under=tmp_path)
    assert again == made


def test_the_load_keeps_its_bound_counts_failures_and_speaks_the_api() -> None:
    open_now, most, bodies = 0, 0, []

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal open_now, most
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        bodies.append(json.loads(request.content))
        if len(bodies) == 3:
            return httpx.Response(503, json={"error": {"message": "full"}})
        chunks: list[Any] = [
            {"choices": [{"text": "a", "token_ids": [7]}]},
            {"choices": [{"text": "", "token_ids": [8]}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 5}}},
        ]
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return httpx.Response(200, text=lines + "data: [DONE]\n\n")

    plan = LoadPlan(requests=6, prompt_tokens=10, output_tokens=2, concurrency=2, vocab_size=500)
    summary, timings = asyncio.run(run_load("http://x/v1", plan, transport=httpx.MockTransport(answer)))
    assert most == 2
    assert (summary.requests, summary.failed) == (6, 1)
    assert summary.errors[0].startswith("503")
    assert summary.cached_tokens == 25
    assert [timing.tokens for timing in timings if timing.error is None] == [[7, 8]] * 5
    assert sorted(body["prompt"] for body in bodies) == sorted(plan.prompts())


def test_both_sides_make_the_same_tokens_of_the_same_weights(tmp_path: Path) -> None:
    made = make_checkpoint("lfm2", "tiny", "float32", under=tmp_path)
    plan = LoadPlan(requests=3, prompt_tokens=70, output_tokens=8, concurrency=3, vocab_size=made.vocab_size)
    [result] = compare(made, {"burst": plan}, rounds=1, threads=1, say=lambda line: None)
    assert result.same_prefix == 1.0
    assert {side for side, _ in result.rounds} == {"weft", "transformers"}
    # Tokens that come together have no time between them, and so no ratio.
    assert all(value is None or value > 0 for value in result.ratios.values())
    assert None not in (result.ratios["requests_per_s"], result.ratios["first_token_median_s"])
