"""What an engine measures of its steps: for routers, the limit of a step, and the cache's currency."""

from __future__ import annotations

from random import Random

import pytest

from weft.costs import fit
from weft.costs.fit import FADE_STEPS, FIT_EVERY, STEPS_MIN, StepMeter
from weft.costs.step import StepCost, Work, mean_cost, pairs_of

TRUE = StepCost(fixed_s=0.01, token_s=2e-5, pair_s=1e-9, decode_s=1e-4, context_s=1e-8)
SLOW_CORES = StepCost(fixed_s=8e-3, token_s=4e-4, pair_s=2e-7, decode_s=9e-4, context_s=1e-7)
GUESS = 1e-5
LONG = StepCost(fixed_s=5e-3, token_s=4e-6, pair_s=8e-11, decode_s=1e-4, context_s=2e-9)


def work(random: Random) -> Work:
    """Some decodes, and a chunk of a prompt."""
    decodes = random.randrange(8)
    context = sum(random.randrange(50, 3000) for _ in range(decodes)) + decodes
    start, length = 64 * random.randrange(40), 64 * random.randrange(1, 9)
    return Work(length, pairs_of(start, start + length), decodes, context)


def run(meter: StepMeter, steps: int, slower: float = 1.0) -> None:
    random = Random(steps)
    for number in range(steps):
        one = work(random)
        meter.stepped(number, one, slower * TRUE.step_s(one))


def feed(
    meter: StepMeter, steps: int, *, longest: int, pair_s: float = LONG.pair_s, noise: float = 0.05, slower: float = 1.0
) -> int:
    """Steps of prompts up to ``longest`` tokens, of decodes, and of both; how often a quadratic was due."""
    random, due = Random(7), 0
    for _ in range(steps):
        tokens = random.choice((0, random.randint(1, 4096)))
        start = random.randint(0, max(1, longest - tokens))
        decodes = random.randint(0, 64)
        one = Work(tokens, tokens * start + tokens * tokens // 2, decodes, decodes * random.randint(100, longest))
        seconds = LONG.step_s(one) + one.pairs * (pair_s - LONG.pair_s)
        meter.stepped(0, one, seconds * slower * random.uniform(1 - noise, 1 + noise))
        due += tokens > 0 and meter.quadratic_is_due
    return due


# ---------------------------------------------------------------------- the recent steps


@pytest.mark.parametrize("pair_tokens", [None, 1e-4])
def test_the_seconds_of_a_prefill_are_measured(pair_tokens: float | None) -> None:
    meter = StepMeter(pair_tokens)
    run(meter, STEPS_MIN - 1)
    assert meter.cost() is None
    run(meter, 200)
    measured = meter.cost()
    assert measured is not None
    for start, end in ((0, 500), (2000, 6000)):
        assert measured.prefill_s(start, end) == pytest.approx(TRUE.prefill_s(start, end), rel=0.02)
    assert measured.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.05)


def test_an_engine_that_becomes_slow_reports_it() -> None:
    meter = StepMeter()
    run(meter, 500)
    run(meter, 4 * FADE_STEPS, slower=5.0)
    measured = meter.cost()
    assert measured is not None
    assert measured.prefill_s(0, 2000) > 3 * TRUE.prefill_s(0, 2000)


def test_a_mean_of_replicas_is_one_of_each_term_and_a_guess_without_any() -> None:
    one, other = StepCost(1.0, 2.0, 3.0, 4.0, 5.0), StepCost(3.0, 6.0, 9.0, 12.0, 15.0)
    assert mean_cost([one, other]) == StepCost(2.0, 4.0, 6.0, 8.0, 10.0)
    assert mean_cost([]).steps == 0


# ---------------------------------------------------------------------- the next step

WORKS = [
    Work(1024, pairs_of(0, 1024), 0, 0),
    Work(256, 8 * pairs_of(0, 64), 4, 1000),
    Work(0, 0, 8, 2500),
    Work(192, pairs_of(64, 256), 8, 2600),
    Work(0, 0, 32, 9000),
]


def expected_s(meter: StepMeter, one: Work) -> float:
    cost = meter.cost_now()
    assert cost is not None
    return cost.step_s(one)


def served(steps: int) -> StepMeter:
    meter = StepMeter(1e-4)
    for number in range(steps):
        one = WORKS[number % len(WORKS)]
        meter.stepped(number, one, SLOW_CORES.step_s(one))
    return meter


def test_measured_steps_correct_the_guess_within_some_tens_of_steps() -> None:
    assert StepMeter(1e-4).cost_now() is None
    meter = served(60)
    for one in WORKS:
        assert expected_s(meter, one) == pytest.approx(SLOW_CORES.step_s(one), rel=0.1)


def test_what_no_step_had_yet_is_expected_as_the_guess_has_it() -> None:
    """A first prefill says nothing of decodes; without a guess they would cost nothing."""
    meter = served(1)
    assert 0 < expected_s(meter, Work(0, 0, 8, 2500)) < expected_s(meter, WORKS[0])


def test_one_stalled_step_is_not_believed_for_long() -> None:
    meter, one = served(100), WORKS[3]
    usual_s = SLOW_CORES.step_s(one)
    meter.stepped(100, one, 100.0)
    assert expected_s(meter, one) < 4 * usual_s
    for number in range(101, 107):
        meter.stepped(number, one, usual_s)
    assert expected_s(meter, one) == pytest.approx(usual_s, rel=0.1)


def test_a_machine_that_becomes_slow_is_expected_to_be_slow_within_ten_steps() -> None:
    meter = served(200)
    for number in range(200, 210):
        one = WORKS[number % len(WORKS)]
        meter.stepped(number, one, 3 * SLOW_CORES.step_s(one))
    for one in WORKS:
        assert expected_s(meter, one) == pytest.approx(3 * SLOW_CORES.step_s(one), rel=0.2)


# ---------------------------------------------------------------------- the currency of the cache


@pytest.mark.parametrize("pair_s", [LONG.pair_s, 10 * LONG.pair_s])
def test_it_finds_the_ratio_that_made_the_steps(pair_s: float) -> None:
    meter = StepMeter()
    assert feed(meter, 2500, longest=100_000, pair_s=pair_s) == pytest.approx(2500 / 2 / FIT_EVERY, abs=1)
    assert meter.quadratic(GUESS) == pytest.approx(pair_s / 2 / LONG.token_s, rel=0.1)


def test_a_device_that_is_slower_in_everything_has_the_same_ratio() -> None:
    usual, slow = StepMeter(), StepMeter()
    feed(usual, 1500, longest=100_000)
    feed(slow, 1500, longest=100_000, slower=50.0)
    assert slow.quadratic(GUESS) == pytest.approx(usual.quadratic(GUESS))


@pytest.mark.parametrize(("steps", "longest"), [(0, 100_000), (FIT_EVERY - 1, 100_000), (3000, 300)])
def test_the_guess_stays_while_there_are_few_steps_or_prompts_are_short(steps: int, longest: int) -> None:
    guess = 1e-9 if longest < 1000 else GUESS
    meter = StepMeter()
    feed(meter, steps, longest=longest)
    assert meter.quadratic(guess) == guess


def test_what_would_be_negative_is_left_out_and_steps_without_time_are_not_steps() -> None:
    meter = StepMeter()
    feed(meter, 2000, longest=100_000, pair_s=0.0, noise=0.2)
    assert 0 <= meter.quadratic(GUESS) < 0.1 * LONG.pair_s / 2 / LONG.token_s
    before = meter.prefill_steps
    meter.stepped(0, Work(100, 100, 0, 0), 0.0)
    assert meter.prefill_steps == before


def test_old_steps_count_less_so_a_device_that_has_changed_is_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for remembered in (60, 10**9):
        monkeypatch.setattr(fit, "STEPS_REMEMBERED", remembered)
        meter = StepMeter()
        feed(meter, 2000, longest=100_000)
        feed(meter, 2000, longest=100_000, pair_s=10 * LONG.pair_s)
        found.append(meter.quadratic(GUESS) / (10 * LONG.pair_s / 2 / LONG.token_s))
    assert found[0] == pytest.approx(1.0, rel=0.15)
    assert found[1] < 0.7
