"""Rounds of both sides in turn, medians of the rounds, and their ratios.

    round 1   weft, transformers        each workload is run by one side and then the other; who goes first
    round 2   transformers, weft        alternates, so that a machine that slows down or warms up
    round 3   weft, transformers        favours neither

Both sides are loaded before the first round and sleep while the other works. Each does one small run first,
which is not counted: pages are touched, threads started.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from benchmarks.serve.checkpoints import Checkpoint
from benchmarks.serve.load import LoadPlan, Summary, run_load
from benchmarks.serve.peer import Peer
from weft.cli.remote import own_server
from weft.config import EngineConfig
from weft_tools.bench.serve import Timing

Side = Callable[[LoadPlan], tuple[Summary, list[Timing]]]
Say = Callable[[str], None]

MEASURES = (
    "requests_per_s",
    "output_tokens_per_s",
    "first_token_median_s",
    "first_token_p99_s",
    "between_tokens_median_s",
    "between_tokens_p99_s",
)
HIGHER_IS_BETTER = {"requests_per_s", "output_tokens_per_s"}
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload on one checkpoint: medians over the rounds for each side.

    ``ratios`` say how many times better weft is (above 1) or worse (below). ``same_prefix`` is the share of
    output tokens before the two sides first differ, a mean over requests: in bfloat16 it may be below 1
    without anything being wrong, because near ties fall either way.
    """

    workload: str
    plan: LoadPlan
    weft: dict[str, float | None]
    transformers: dict[str, float | None]
    ratios: dict[str, float | None]
    same_prefix: float
    rounds: tuple[tuple[str, Summary], ...]


def compare(
    checkpoint: Checkpoint, workloads: dict[str, LoadPlan], *, rounds: int, threads: int, say: Say
) -> list[Comparison]:
    """Run every workload ``rounds`` times on both sides."""
    # Rounds repeat their prompts, and the other side keeps nothing.
    config = EngineConfig(model=str(checkpoint.directory), dtype=checkpoint.dtype, threads=threads, prefix_cache=False)
    say(f"{checkpoint.name}: starting both sides")
    with Peer(checkpoint.directory, checkpoint.dtype, threads) as peer, own_server(config) as url:
        sides: dict[str, Side] = {"weft": lambda plan: asyncio.run(run_load(url, plan)), "transformers": peer.run}
        return [_compare_one(name, plan, sides, rounds, say) for name, plan in workloads.items()]


def alternate(
    name: str, plan: LoadPlan, sides: dict[str, Side], rounds: int, say: Say
) -> dict[str, list[tuple[Summary, list[Timing]]]]:
    """The rounds of each side, behind a small run of each that is not counted. With each round the next side
    begins."""
    for run in sides.values():
        run(replace(plan, output_tokens=WARM_UP_TOKENS, seed=plan.seed + 1000))
    results: dict[str, list[tuple[Summary, list[Timing]]]] = {side: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in [*list(sides)[first:], *list(sides)[:first]]:
            summary, timings = sides[side](plan)
            assert summary.failed == 0, f"{side}: {summary.failed} requests failed: {summary.errors}"
            results[side].append((summary, timings))
            say(
                f"{name}, round {number + 1} of {rounds}: {side} {summary.seconds:.1f} s, "
                f"{summary.output_tokens_per_s:.1f} tokens/s"
            )
    return results


def _compare_one(name: str, plan: LoadPlan, sides: dict[str, Side], rounds: int, say: Say) -> Comparison:
    results = alternate(name, plan, sides, rounds, say)
    log = [(side, each[number][0]) for number in range(rounds) for side, each in results.items()]
    weft, transformers = (medians([summary for summary, _ in results[side]]) for side in sides)
    return Comparison(
        name,
        plan,
        weft,
        transformers,
        ratios(weft, transformers),
        same_prefix(results["weft"][0][1], results["transformers"][0][1]),
        tuple(log),
    )


def medians(summaries: list[Summary]) -> dict[str, float | None]:
    """Median over rounds, measure by measure; None where a round has none."""
    found: dict[str, float | None] = {}
    for measure in MEASURES:
        values = [getattr(summary, measure) for summary in summaries]
        found[measure] = None if None in values else statistics.median(values)
    return found


def ratios(weft: dict[str, float | None], other: dict[str, float | None]) -> dict[str, float | None]:
    """How many times better weft is, measure by measure."""
    found: dict[str, float | None] = {}
    for measure in MEASURES:
        own, theirs = weft[measure], other[measure]
        if not own or not theirs:
            found[measure] = None
        else:
            found[measure] = own / theirs if measure in HIGHER_IS_BETTER else theirs / own
    return found


def same_prefix(one: list[Timing], other: list[Timing]) -> float:
    """Mean share of tokens before two lists of answers first differ."""
    shares = []
    for a, b in zip(one, other, strict=True):
        equal = list(takewhile(lambda pair: pair[0] == pair[1], zip(a.tokens, b.tokens, strict=False)))
        shares.append(len(equal) / max(1, len(b.tokens)))
    return statistics.fmean(shares)
