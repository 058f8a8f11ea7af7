"""python -m benchmarks.serve.burst_cpu: what --max-step-ms costs a burst, in CPU time of one thread.

    --max-step-ms 0 500 1000 2000   --family lfm2|granite|qwen   --requests 16   --rounds 2   --grid

    burst     an engine for each limit, in turn; its clock is the CPU time of this thread
    --grid    one engine: steps of some decodes beside some prompt tokens, the fastest of ``--rounds``

``gaps`` measures what a user sees, and wants a quiet machine. The clock here stands still while another
process has the core, for the table and for the limit alike. So ratios hold beside other load. One thread
takes about twice as long as two: compare a limit of 2,000 ms here with 1,000 ms on two cores. What two
threads lose to waiting for one another is not in these figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random

from benchmarks.serve.__main__ import KEEP
from benchmarks.serve.checkpoints import FAMILIES, SIZES, Checkpoint, make_checkpoint
from benchmarks.serve.load import LoadPlan, percentile
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.host import cpu_name_and_flags
from weft.request import Request, SamplingParams
from weft.schedule.plan import StepPlan

LIMITS = (0, 500, 1000, 2000)
GRID_DECODES = (0, 4, 8, 15)
GRID_TOKENS = (64, 128, 320, 960)
PROMPT_TOKENS = 256
CLOCK = time.thread_time


@dataclass(slots=True)
class BurstTimes:
    """Of one burst, in CPU seconds. ``mixed``: prompt tokens and seconds of each step with decodes and
    prompts."""

    seconds: float
    tokens: int
    gaps_s: list[float]
    first_token_s: float
    mixed: list[tuple[int, float]] = field(default_factory=list)


def engine_of(checkpoint: Checkpoint, max_step_ms: int, *, step_tokens: int | None = None) -> EngineCore:
    """One thread, and a clock that counts its CPU time."""
    core = assemble(
        EngineConfig.of(
            model=str(checkpoint.directory),
            dtype=checkpoint.dtype,
            threads=1,
            prefix_cache=False,
            memory="1GB",
            max_step_ms=max_step_ms,
            max_num_batched_tokens=step_tokens,
            speculate="off",
        )
    ).core
    core.parts.clock = CLOCK
    return core


def submit(core: EngineCore, name: str, prompt: list[int], answer_tokens: int) -> None:
    core.submit(
        Request(
            request_id=name,
            prompt_tokens=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True),
        )
    )


def burst(core: EngineCore, plan: LoadPlan, name: str) -> BurstTimes:
    mixed: list[tuple[int, float]] = []

    def stepped(step: StepPlan, seconds: float) -> None:
        if step.decode_count and step.prefills:
            mixed.append((step.token_count - step.decode_count, seconds))

    core.on_step.append(stepped)
    begin, times = CLOCK(), defaultdict[str, list[float]](list)
    for number, prompt in enumerate(plan.prompts()):
        submit(core, f"{name}-{number}", prompt, plan.output_tokens)
    while core.has_work:
        events = core.step()
        now_s = CLOCK() - begin
        for event in events:
            times[event.request_id] += [now_s] * len(event.tokens)
    core.on_step.remove(stepped)
    assert core.failure is None, core.failure
    gaps = [later - earlier for each in times.values() for earlier, later in pairwise(each)]
    return BurstTimes(
        CLOCK() - begin, sum(map(len, times.values())), gaps, max(each[0] for each in times.values()), mixed
    )


def bursts(
    checkpoint: Checkpoint, limits: Sequence[int], plan: LoadPlan, rounds: int
) -> Iterator[tuple[int, BurstTimes]]:
    """Each limit's, in turn; each round begins with the next one. A first burst of each is not counted."""
    cores = {limit: engine_of(checkpoint, limit) for limit in limits}
    for core in cores.values():
        burst(
            core,
            LoadPlan(requests=2, prompt_tokens=PROMPT_TOKENS, output_tokens=4, vocab_size=plan.vocab_size),
            "first",
        )
    for number in range(rounds):
        first = number % len(limits)
        for limit in [*limits[first:], *limits[:first]]:
            yield limit, burst(cores[limit], plan, f"round{number}")


def burst_table(results: dict[int, list[BurstTimes]]) -> str:
    rates = {limit: statistics.median(one.tokens / one.seconds for one in each) for limit, each in results.items()}
    lines = [
        f"{'--max-step-ms':>14}{'tokens/cpu s':>14}{'of no limit':>13}{'gap p99 ms':>12}"
        f"{'last first token s':>20}{'mixed steps':>13}{'their tokens':>14}{'their ms':>10}"
    ]
    for limit, each in sorted(results.items()):
        gaps = [percentile(one.gaps_s, 0.99) or 0.0 for one in each]
        mixed = [step for one in each for step in one.mixed]
        lines.append(
            f"{limit or 'no limit':>14}{rates[limit]:>14.1f}{rates[limit] / rates[0]:>13.2f}"
            f"{statistics.median(gaps) * 1e3:>12.0f}"
            f"{statistics.median(one.first_token_s for one in each):>20.1f}"
            f"{len(mixed) / len(each):>13.1f}{statistics.mean(tokens for tokens, _ in mixed):>14.0f}"
            f"{statistics.mean(seconds for _, seconds in mixed) * 1e3:>10.0f}"
        )
    return "\n".join(lines)


def grid(checkpoint: Checkpoint, rounds: int) -> dict[tuple[int, int], float]:
    """Seconds of the fastest step by (decodes, prompt tokens); 0 prompt tokens: of decodes alone."""
    core = engine_of(checkpoint, 0, step_tokens=max(GRID_TOKENS) + 64)
    steps: list[float] = []
    core.on_step.append(lambda plan, seconds: steps.append(seconds))
    dice, best = Random(0), defaultdict[tuple[int, int], float](lambda: float("inf"))
    names = count()

    def prompts(tokens: int, answer_tokens: int) -> None:
        for first in range(0, tokens, PROMPT_TOKENS):
            length = min(PROMPT_TOKENS, tokens - first)
            prompt = [dice.randrange(300, checkpoint.vocab_size) for _ in range(length)]
            submit(core, str(next(names)), prompt, answer_tokens)

    running = 0
    for decodes in GRID_DECODES:
        while running < decodes:
            prompts(PROMPT_TOKENS, 4000)
            running += 1
            core.step()
        for _ in range(rounds):
            for tokens in GRID_TOKENS:
                prompts(tokens, 1)
                core.step()
                best[decodes, tokens] = min(best[decodes, tokens], steps[-1])
                core.step()  # the prompts leave
                if decodes:
                    core.step()
                    best[decodes, 0] = min(best[decodes, 0], steps[-1])
    core.cancel_all("the grid is done")
    core.step()
    return dict(best)


def grid_table(best: dict[tuple[int, int], float]) -> str:
    lines = [f"{'decodes':>8}{'alone':>8}" + "".join(f"{tokens:>8}" for tokens in GRID_TOKENS) + "   prompt tokens; ms"]
    for decodes in GRID_DECODES:
        alone = f"{best[decodes, 0] * 1e3:.0f}" if decodes else "-"
        lines.append(
            f"{decodes:>8}{alone:>8}" + "".join(f"{best[decodes, tokens] * 1e3:>8.0f}" for tokens in GRID_TOKENS)
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.burst_cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--max-step-ms", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--family", choices=FAMILIES, default="lfm2")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--keep", type=Path, default=KEEP, help="folder that keeps the checkpoints")
    asked = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    checkpoint = make_checkpoint(asked.family, asked.size, asked.dtype, under=asked.keep)
    print(f"{cpu_name_and_flags()[0]}, one thread, CPU time; {checkpoint.name}")
    if asked.grid:
        print(grid_table(grid(checkpoint, asked.rounds)))
        return 0
    plan = LoadPlan(
        requests=asked.requests,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=asked.output_tokens,
        vocab_size=checkpoint.vocab_size,
    )
    results = defaultdict[int, list[BurstTimes]](list)
    for limit, one in bursts(checkpoint, sorted({0, *asked.max_step_ms}), plan, asked.rounds):
        results[limit].append(one)
    print(burst_table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
