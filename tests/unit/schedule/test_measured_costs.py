"""What an engine measures of its steps, for a router."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.schedule.measured_costs import FADE_STEPS, STEPS_MIN, MeasuredCosts
from weft.schedule.work import work_of
from weft.work_costs import WorkCosts

TRUE = WorkCosts(fixed_s=0.01, token_s=2e-5, pair_s=1e-9, decode_s=1e-4, context_s=1e-8)


def plan(random: Random, number: int) -> Any:
    """Some decodes, and a chunk of a prompt."""
    decodes = random.randrange(8)
    starts = [random.randrange(50, 3000) for _ in range(decodes)] + [64 * random.randrange(40)]
    lengths = [1] * decodes + [64 * random.randrange(1, 9)]
    return SimpleNamespace(step=number, decode_count=decodes, run_count=decodes + 1, window_count=0,
                           prefills=range(decodes, decodes + 1), starts=np.asarray(starts),
                           lengths=np.asarray(lengths))


def seconds_of(step: Any, slower: float = 1.0) -> float:
    work = work_of(step)
    return slower * (TRUE.fixed_s + work.prefill_tokens * TRUE.token_s + work.pairs * TRUE.pair_s
                     + work.decodes * TRUE.decode_s + work.context * TRUE.context_s)


def run(costs: MeasuredCosts, steps: int, slower: float = 1.0) -> None:
    random = Random(steps)
    for number in range(steps):
        one = plan(random, number)
        costs.stepped(one, seconds_of(one, slower))


def test_the_seconds_of_a_prefill_are_measured() -> None:
    costs = MeasuredCosts()
    run(costs, STEPS_MIN - 1)
    assert costs.costs() is None
    run(costs, 200)
    measured = costs.costs()
    assert measured is not None
    for start, end in ((0, 500), (2000, 6000)):
        assert measured.prefill_s(start, end) == pytest.approx(TRUE.prefill_s(start, end), rel=0.02)
    assert measured.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.05)


def test_an_engine_that_becomes_slow_reports_it() -> None:
    costs = MeasuredCosts()
    run(costs, 500)
    run(costs, 4 * FADE_STEPS, slower=5.0)
    measured = costs.costs()
    assert measured is not None
    assert measured.prefill_s(0, 2000) > 3 * TRUE.prefill_s(0, 2000)


def test_steps_that_verify_drafts_do_not_count() -> None:
    costs = MeasuredCosts()
    for number in range(100):
        one = plan(Random(number), number)
        one.window_count = 1
        costs.stepped(one, 1.0)
    assert costs.costs() is None
