"""What the engine itself costs per step: plan, commit and settle, without any model.

    python benchmarks/step_overhead.py [--running 1 64 256 1024] [--steps 400] [--spread] [--no-cache]

Every sequence decodes; the executor returns at once. Numbers are microseconds of the thread's CPU time a step
(a busy machine disturbs them less): minimum, median and 99th percentile. Each sequence crosses into a new
page every 16 steps, so the percentiles differ: by default all of them cross in the same step, the worst case;
``--spread`` gives them prompts of different lengths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from tests.support.scripted import LateExecutor
from tests.support.workload import small_arena
from weft.config import Sizes
from weft.engine.engine import EngineCore
from weft.engine.stats import PARTS, Part
from weft.memory.frames.plan import ArenaPlan
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.schedule.plan import StepPlan, StepResult

VOCAB_SIZE = 32_000


class InstantExecutor(LateExecutor):
    """Chooses token 1 for every run."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tokens=np.where(plan.samples, 1, -1).astype(np.int32), logprobs={}, prompt_logprobs={})

    def sleep(self, level: int) -> tuple[Part, ...]:
        return PARTS

    def wake(self, part: str) -> None:
        pass

    def close(self) -> None:
        pass


def measure(
    running: int,
    steps: int,
    spread: bool,
    cache: bool,
    arena: ArenaPlan | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, np.ndarray]:
    """Microseconds of each verb by ``clock``, one entry a step. ``arena`` None: a made-up one in which all of
    them fit."""
    length = 64 + 64 * (steps // 64 + 2)
    if arena is None:
        arena = small_arena(pages_per_frame=5, slots_per_frame=12, frame_count=running * (length // 80 + 2) + 8)
    sizes = Sizes(
        max_model_len=length,
        rows_max=running,
        step_tokens_max=running + 4096,
        queue_max=running,
        memory_bytes=arena.arena_bytes,
    )
    core = EngineCore(
        vocab_size=VOCAB_SIZE,
        sizes=sizes,
        memory=Memory(arena, cache=cache),
        executor=InstantExecutor(),
        clock=time.perf_counter,
        seed=0,
        eos_ids=(2,),
    )
    for number in range(running):
        prompt = 20 + (number % 16 if spread else 0)
        core.submit(
            Request(request_id=f"r{number}", prompt_tokens=[5] * prompt, sampling=SamplingParams(temperature=0.0))
        )
    while len(core.scheduler.waiting):
        core.step()
    scheduler = core.scheduler
    seconds: dict[str, list[float]] = {"plan": [], "commit": [], "settle": [], "whole step": []}
    for _ in range(steps):
        at = [clock()]
        plan = scheduler.plan()
        at.append(clock())
        assert plan is not None
        assert plan.decode_count == running
        scheduler.commit(plan)
        at.append(clock())
        result = core.executor.execute(plan)
        at.append(clock())
        scheduler.advance(plan, result.tokens)
        core.settlement.settle(plan, result)
        core.streams.drain()
        at.append(clock())
        for name, first in (("plan", 0), ("commit", 1), ("settle", 3)):
            seconds[name].append(at[first + 1] - at[first])
        seconds["whole step"].append(at[4] - at[3] + at[2] - at[0])
    return {name: np.asarray(values) * 1e6 for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--spread", action="store_true", help="sequences cross pages in different steps")
    parser.add_argument("--no-cache", action="store_true", help="keep no prefixes")
    args = parser.parse_args()
    print(f"{'running':>8}  {'verb':<12}{'least us':>11}{'median us':>11}{'p99 us':>11}")
    for running in args.running:
        for name, values in measure(running, args.steps, args.spread, not args.no_cache).items():
            print(
                f"{running:>8}  {name:<12}{values.min():>11.1f}{np.median(values):>11.1f}"
                f"{np.percentile(values, 99):>11.1f}"
            )


if __name__ == "__main__":
    main()
