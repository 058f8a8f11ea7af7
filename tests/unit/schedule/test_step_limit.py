"""The time that a step leaves to prefill, and what the budget makes of it."""

import math

import pytest

from weft.costs.step import StepCost
from weft.schedule.budget import NO_LIMIT, Budget, StepLimit

MILLISECONDS = StepCost(fixed_s=20e-3, token_s=1e-3, pair_s=1e-6, decode_s=5e-3, context_s=1e-6)


def test_prefill_takes_the_time_that_decodes_leave_and_at_least_as_long_as_they_do() -> None:
    limit = StepLimit(0.25, MILLISECONDS)
    assert limit.prefill_s(4, 0) == pytest.approx(0.25 - 0.04)
    assert limit.prefill_s(40, 0) == pytest.approx(0.22)


def test_a_step_without_decodes_has_no_limit() -> None:
    assert Budget(1024, 0, StepLimit(0.001, MILLISECONDS)).chunk_end(0, 5000) == 1024
    assert math.isinf(StepLimit(0.001, MILLISECONDS).prefill_s(0, 0))


def test_nothing_is_limited_before_a_step_was_measured() -> None:
    free = Budget(1024, 4, NO_LIMIT).chunk_end(0, 5000)
    assert free == Budget(1024, 4, StepLimit(0.001)).chunk_end(0, 5000)


@pytest.mark.parametrize("start", [0, 64, 30_000])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.5])
def test_the_tokens_within_a_time_take_that_time_and_no_more(start: int, seconds: float) -> None:
    limit = StepLimit(1.0, MILLISECONDS)
    tokens = limit.tokens_within(start, seconds)
    assert MILLISECONDS.prefill_s(start, start + tokens) <= seconds * (1 + 1e-9)
    assert MILLISECONDS.prefill_s(start, start + tokens + 2) > seconds


def test_a_chunk_deep_in_a_prompt_is_shorter_because_its_attention_takes_longer() -> None:
    shallow, deep = (
        Budget(4096, 1, StepLimit(0.5, MILLISECONDS)).chunk_end(start, 100_000) - start for start in (0, 64_000)
    )
    assert (shallow, deep) == (384, 64)


def test_one_chunk_is_left_whatever_the_time_and_only_one() -> None:
    budget = Budget(1024, 100, StepLimit(0.001, StepCost(1e-3, 1.0, 0.0, 0.0, 0.0)))
    assert budget.chunk_end(0, 1000) == 64
    assert budget.chunk_end(0, 10) == 10
    budget.spend(0, 10)
    assert budget.chunk_end(0, 54) == 54
    budget.spend(0, 54)
    assert budget.chunk_end(128, 1000) == 128


def test_the_budget_spends_the_time_of_each_prefill() -> None:
    budget = Budget(4096, 1, StepLimit(0.5, MILLISECONDS))
    assert budget.chunk_end(0, 200) == 200
    budget.spend(0, 200)
    assert budget.chunk_end(0, 4096) == 192
