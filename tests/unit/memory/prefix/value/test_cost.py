"""What a prompt costs, learned from steps: linear + quadratic, in units of the linear term."""

from __future__ import annotations

from random import Random

import pytest

from weft.memory.prefix.policy import PrefillCost
from weft.memory.prefix.value import cost_fit
from weft.memory.prefix.value.cost_fit import FIT_EVERY, PrefillFit

GUESS = PrefillCost(1.0, 1e-5)
FIXED_S, TOKEN_S, PAIR_S, DECODE_S, CONTEXT_S = 5e-3, 4e-6, 8e-11, 1e-4, 2e-9


def feed(fit: PrefillFit, steps: int, *, longest: int, pair_s: float = PAIR_S, noise: float = 0.05,
         slower: float = 1.0) -> int:
    """Steps of prompts up to ``longest`` tokens, of decodes, and of both; how often a fit was due."""
    random, due = Random(7), 0
    for _ in range(steps):
        tokens = random.choice((0, random.randint(1, 4096)))
        start = random.randint(0, max(1, longest - tokens))
        pairs = tokens * start + tokens * tokens // 2
        decodes = random.randint(0, 64)
        context = decodes * random.randint(100, longest)
        seconds = FIXED_S + tokens * TOKEN_S + pairs * pair_s + decodes * DECODE_S + context * CONTEXT_S
        seconds *= slower * random.uniform(1 - noise, 1 + noise)
        due += fit.add(tokens, pairs, decodes, context, seconds)
    return due


@pytest.mark.parametrize("pair_s", [PAIR_S, 10 * PAIR_S])
def test_it_finds_the_ratio_that_made_the_steps(pair_s: float) -> None:
    fit = PrefillFit(GUESS)
    assert feed(fit, 2500, longest=100_000, pair_s=pair_s) == pytest.approx(2500 / 2 / FIT_EVERY, abs=1)
    cost = fit.cost()
    assert cost.linear == 1.0
    assert cost.quadratic == pytest.approx(pair_s / 2 / TOKEN_S, rel=0.1)


def test_a_device_that_is_slower_in_everything_has_the_same_ratio() -> None:
    usual, slow = PrefillFit(GUESS), PrefillFit(GUESS)
    feed(usual, 1500, longest=100_000)
    feed(slow, 1500, longest=100_000, slower=50.0)
    assert slow.cost().quadratic == pytest.approx(usual.cost().quadratic)


@pytest.mark.parametrize(("steps", "longest"), [(0, 100_000), (FIT_EVERY - 1, 100_000), (3000, 300)])
def test_the_guess_stays_while_there_are_few_steps_or_prompts_are_short(steps: int, longest: int) -> None:
    guess = PrefillCost(1.0, 1e-9) if longest < 1000 else GUESS
    fit = PrefillFit(guess)
    feed(fit, steps, longest=longest)
    assert fit.cost() is guess


def test_what_would_be_negative_is_left_out_and_steps_without_time_are_not_steps() -> None:
    fit = PrefillFit(GUESS)
    feed(fit, 2000, longest=100_000, pair_s=0.0, noise=0.2)
    assert 0 <= fit.cost().quadratic < 0.1 * PAIR_S / 2 / TOKEN_S
    assert not fit.add(100, 100, 0, 0, 0.0)


def test_old_steps_count_less_so_a_device_that_has_changed_is_learned_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for remembered in (60, 10**9):
        monkeypatch.setattr(cost_fit, "STEPS_REMEMBERED", remembered)
        fit = PrefillFit(GUESS)
        feed(fit, 2000, longest=100_000)
        feed(fit, 2000, longest=100_000, pair_s=10 * PAIR_S)
        found.append(fit.cost().quadratic / (10 * PAIR_S / 2 / TOKEN_S))
    assert found[0] == pytest.approx(1.0, rel=0.15)
    assert found[1] < 0.7
