"""python -m benchmarks.serve.gaps: the gaps between tokens against the throughput, for several --max-step-ms.

    --max-step-ms 0 250 500 1000   --family lfm2|granite|qwen   --size 350m|small|tiny   --rounds 3

    round 1    weft 0, weft 250, ... weft 1000, transformers    the same burst for each
    round 2    weft 250, ... weft 1000, transformers, weft 0    the next one begins
    table      medians of the rounds: p99 over transformers' p99, tokens a second over those of 0, and
               tokens a CPU second of the server's processes over those of 0

0 is no limit, and always among the limits as the measure of the others. All servers are started before the
first round and sleep while another one works. A limit *holds* if its p99 is at most GAP_MOST times that of
transformers. It must also keep THROUGHPUT_LEAST of the tokens a second that weft gives without a limit.
The share by CPU time counts no waiting, and other load on the machine changes it little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.serve.__main__ import KEEP, WORKLOADS, machine_now, say
from benchmarks.serve.checkpoints import FAMILIES, SIZES, Checkpoint, make_checkpoint
from benchmarks.serve.compare import Side, alternate, medians
from benchmarks.serve.load import LoadPlan, Summary, run_load
from benchmarks.serve.peer import Peer
from weft.cli.remote import own_server
from weft.config import EngineConfig
from weft.host import usable_cores
from weft_tools.bench.serve import Timing

PEER = "transformers"
LIMITS = (0, 250, 500, 1000)
GAP_MOST = 2.0
THROUGHPUT_LEAST = 0.95
_MEMORY = "1GB"
"""Of each server: 32 answers of 320 tokens, of any of these checkpoints, take less."""


@dataclass(frozen=True, slots=True)
class LimitRow:
    """Medians of one limit. ``gap_ratio``: over transformers' p99. ``throughput_share``: of no limit, and
    ``cpu_share`` likewise by tokens a CPU second."""

    limit_ms: int
    output_tokens_per_s: float
    between_tokens_median_s: float
    between_tokens_p99_s: float
    first_token_p99_s: float
    gap_ratio: float
    throughput_share: float
    cpu_share: float

    @property
    def holds(self) -> bool:
        return self.gap_ratio <= GAP_MOST and self.throughput_share >= THROUGHPUT_LEAST


@dataclass(slots=True)
class MeasuredServer:
    """The server at ``url``, the CPU seconds of its processes counted for each run."""

    url: str
    process: psutil.Process
    cpu_s: list[float] = field(default_factory=list)

    def run(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        before_s = self._now_s()
        result = asyncio.run(run_load(self.url, plan))
        self.cpu_s.append(self._now_s() - before_s)
        return result

    def _now_s(self) -> float:
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


@contextmanager
def measured_server(config: EngineConfig) -> Iterator[MeasuredServer]:
    before = {child.pid for child in psutil.Process().children()}
    with own_server(config) as url:
        [process] = [child for child in psutil.Process().children() if child.pid not in before]
        yield MeasuredServer(url, process)


def rows_of(results: dict[str, list[Summary]], cpu_s: dict[str, list[float]]) -> list[LimitRow]:
    """By limit. ``results``: the rounds of transformers under its name, of weft under the limit as text;
    ``cpu_s``: of weft's rounds."""
    figures = {side: medians(summaries) for side, summaries in results.items()}
    peer_p99 = figures[PEER]["between_tokens_p99_s"] or 0.0
    unlimited = figures["0"]["output_tokens_per_s"] or 0.0
    rows = []
    for limit in sorted(int(side) for side in figures if side != PEER):
        own = {measure: value or 0.0 for measure, value in figures[str(limit)].items()}
        rows.append(
            LimitRow(
                limit,
                own["output_tokens_per_s"],
                own["between_tokens_median_s"],
                own["between_tokens_p99_s"],
                own["first_token_p99_s"],
                own["between_tokens_p99_s"] / peer_p99,
                own["output_tokens_per_s"] / unlimited,
                statistics.median(cpu_s["0"]) / statistics.median(cpu_s[str(limit)]),
            )
        )
    return rows


def measure(
    checkpoint: Checkpoint, plan: LoadPlan, limits: Sequence[int], *, rounds: int, threads: int
) -> tuple[dict[str, list[Summary]], dict[str, list[float]]]:
    """The rounds of each side, and the CPU seconds of weft's."""
    say(f"{checkpoint.name}: starting {len(limits)} servers, and transformers")
    with ExitStack() as started:
        servers = {
            str(limit): started.enter_context(
                measured_server(
                    EngineConfig(
                        model=str(checkpoint.directory),
                        dtype=checkpoint.dtype,
                        threads=threads,
                        prefix_cache=False,
                        memory=_MEMORY,
                        max_step_ms=limit,
                    )
                )
            )
            for limit in limits
        }
        sides: dict[str, Side] = {limit: server.run for limit, server in servers.items()}
        sides[PEER] = started.enter_context(Peer(checkpoint.directory, checkpoint.dtype, threads)).run
        runs = alternate("burst", plan, sides, rounds, say)
        cpu_s = {limit: server.cpu_s[-rounds:] for limit, server in servers.items()}
    return {side: [summary for summary, _ in runs[side]] for side in sides}, cpu_s


def table(rows: Sequence[LimitRow], peer: dict[str, float | None]) -> str:
    lines = [
        f"{'--max-step-ms':>14}{'tokens/s':>10}{'of no limit':>13}{'by CPU':>8}{'gap ms':>8}"
        f"{'p99 ms':>9}{'of ' + PEER:>17}{'first token p99 ms':>20}"
    ]
    for row in rows:
        lines.append(
            f"{row.limit_ms or 'no limit':>14}{row.output_tokens_per_s:>10.1f}"
            f"{row.throughput_share:>13.2f}{row.cpu_share:>8.2f}"
            f"{row.between_tokens_median_s * 1e3:>8.0f}"
            f"{row.between_tokens_p99_s * 1e3:>9.0f}{row.gap_ratio:>17.2f}"
            f"{row.first_token_p99_s * 1e3:>20,.0f}{'  holds' if row.holds else ''}"
        )
    figures = {name: value or 0.0 for name, value in peer.items()}
    lines.append(
        f"{PEER:>14}{figures['output_tokens_per_s']:>10.1f}{'':>21}"
        f"{figures['between_tokens_median_s'] * 1e3:>8.0f}"
        f"{figures['between_tokens_p99_s'] * 1e3:>9.0f}{1:>17.2f}"
        f"{figures['first_token_p99_s'] * 1e3:>20,.0f}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.gaps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-step-ms", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--family", choices=FAMILIES, default="lfm2")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=WORKLOADS["burst"].requests)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--keep", type=Path, default=KEEP, help="folder that keeps the checkpoints")
    parser.add_argument("--json", type=Path, default=KEEP / "gaps.json")
    asked = parser.parse_args(argv)
    limits, threads = sorted({0, *asked.max_step_ms}), asked.threads or usable_cores()
    machine = machine_now(threads, asked.dtype)
    checkpoint = make_checkpoint(asked.family, asked.size, asked.dtype, under=asked.keep)
    burst = WORKLOADS["burst"]
    plan = LoadPlan(
        requests=asked.requests,
        prompt_tokens=burst.prompt_tokens,
        output_tokens=burst.output_tokens,
        concurrency=asked.requests,
        vocab_size=checkpoint.vocab_size,
    )
    results, cpu_s = measure(checkpoint, plan, limits, rounds=asked.rounds, threads=threads)
    rows = rows_of(results, cpu_s)
    print(
        f"{machine['cpu']['model']}, {threads} threads, load {machine['load_average'][0]:.1f} at start; "
        f"{checkpoint.name}: {plan.requests} x {plan.prompt_tokens} -> {plan.output_tokens} tokens, "
        f"medians of {asked.rounds} rounds"
    )
    print(table(rows, medians(results[PEER])))
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(
        json.dumps(
            {
                "machine": machine,
                "rows": [asdict(row) for row in rows],
                "cpu_s": cpu_s,
                "rounds": {side: [asdict(one) for one in each] for side, each in results.items()},
            },
            indent=2,
        )
    )
    print(f"\n{os.path.relpath(asked.json)} has every round.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
