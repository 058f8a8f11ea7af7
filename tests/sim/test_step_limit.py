"""``--max-step-ms`` in virtual time: the laws hold with a limit that binds, answers stay the same, and the
gaps between tokens become shorter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from tests.support.simulator import STEP_BASE_S, STEP_TOKEN_S, Simulation
from tests.support.workload import Arrival, Scenario, random_cancels, small_arena
from weft.config import Sizes
from weft.request import Request, SamplingParams
from weft.schedule.plan import StepPlan

LIMIT_S = STEP_BASE_S + 100 * STEP_TOKEN_S


def prompts_among_answers(max_step_s: float | None, seed: int = 3, frames: int = 120) -> Scenario:
    """Four answers flow while ten long prompts arrive, some of which are cancelled if ``frames`` are few."""
    dice, grown = Random(seed), 200 if frames >= 100 else 400
    arena = small_arena(pages_per_frame=5, slots_per_frame=3, frame_count=frames)
    sizes = Sizes(max_model_len=600, rows_max=16, step_tokens_max=512, queue_max=20, memory_bytes=arena.arena_bytes)
    arrivals = [
        Arrival(
            0.0,
            Request(
                request_id=f"a{number}",
                prompt_tokens=[number] * 20,
                sampling=SamplingParams(max_tokens=grown, ignore_eos=True),
            ),
        )
        for number in range(4)
    ]
    arrivals += [
        Arrival(
            0.01 * number,
            Request(
                request_id=f"p{number}",
                prompt_tokens=[5 + number] * dice.randrange(400, 580),
                sampling=SamplingParams(max_tokens=3, ignore_eos=True),
            ),
        )
        for number in range(1, 11)
    ]
    cancels = random_cancels(dice, tuple(arrivals)) if frames < 100 else ()
    return Scenario(
        seed=seed, arena=arena, sizes=sizes, arrivals=tuple(arrivals), cancels=cancels, max_step_s=max_step_s
    )


def mixed_steps(scenario: Scenario) -> list[float]:
    """Seconds of the steps with decodes and prefills."""
    simulation = Simulation(scenario)
    seconds: list[float] = []

    def stepped(plan: StepPlan, step_s: float) -> None:
        if plan.decode_count and plan.prefills:
            seconds.append(step_s)

    simulation.core.on_step.append(stepped)
    simulation.run()
    return seconds


def test_the_laws_hold_where_steps_are_limited_by_time() -> None:
    ended, preemptions, changed = Counter[str](), 0, 0
    for seed in range(4):
        scenario = replace(prompts_among_answers(LIMIT_S, seed, frames=10), overlap=seed % 2 == 1, cache=seed % 4 > 1)
        outcome = Simulation(scenario).run()
        ended.update(outcome.ended)
        preemptions += outcome.preemptions
        changed += outcome.trace_hash != Simulation(replace(scenario, max_step_s=None)).run().trace_hash
        if seed == 3:
            assert Simulation(scenario).run() == outcome
    assert set(ended) >= {"length", "cancelled"}
    assert preemptions >= 3
    assert changed == 4


def test_a_limit_shortens_steps_with_decodes() -> None:
    late, free = mixed_steps(prompts_among_answers(LIMIT_S))[5:], mixed_steps(prompts_among_answers(None))
    assert max(late) < 1.2 * LIMIT_S
    assert max(free) > 3 * LIMIT_S
