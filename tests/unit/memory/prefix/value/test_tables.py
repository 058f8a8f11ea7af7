"""The pure parts of the value policy, as tables: hazard, index, features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.memory.geometry import small_arena
from weft.memory.prefix.policy import PrefillCost, geometric_cost
from weft.memory.prefix.value.hazard import (
    CODE_COUNT,
    EDGES,
    FACTOR_MAX,
    NO_CODE,
    WIDTHS,
    Hazard,
    Kind,
    bin_of,
    bins_of,
    codes_of_new,
    codes_of_used,
    index_table,
    prior_rates,
    seconds_by_bin,
)
from weft.memory.prefix.value.prospects import Prospects, Records

AGES = [0.0, 0.5, 0.999, 1.0, 1.5, 2.0, 3.99, 4.0, 100.0, 511.0, 512.0, 1e6]


@pytest.mark.parametrize(("age_s", "expected"), list(zip(AGES, [0, 0, 0, 1, 1, 2, 2, 3, 7, 9, 10, 10], strict=True)))
def test_an_age_is_in_the_bin_whose_edges_hold_it(age_s: float, expected: int) -> None:
    assert bin_of(age_s) == expected
    assert bins_of(np.array([age_s])).tolist() == [expected]
    assert EDGES[expected] <= age_s < EDGES[expected] + (WIDTHS[expected] if expected < 10 else np.inf)


def test_waiting_is_spread_over_the_bins_that_it_went_through() -> None:
    spent = seconds_by_bin(np.array([0.0, 0.5, 3.0]), np.array([3.0, 0.75, 3.0]))
    assert spent[:, :4].tolist() == [[1.0, 1.0, 1.0, 0.0], [0.25, 0, 0, 0], [0, 0, 0, 0]]
    assert seconds_by_bin(np.array([0.0]), np.array([5000.0])).sum() == 5000.0


def test_what_was_never_seen_has_the_prior_and_a_factor_of_one() -> None:
    hazard = Hazard(2, 8)
    hazard.learn()
    assert np.allclose(hazard.rates, prior_rates())
    assert hazard.factor_of((1, 2, NO_CODE)) == 1.0
    assert np.all(np.diff(prior_rates()) < 0)


def test_a_rate_is_uses_over_seconds_once_there_is_enough_of_both() -> None:
    hazard = Hazard(2, 8)
    rows = 100_000
    ages = np.zeros(rows), np.full(rows, 2.0)
    hazard.waited(np.zeros(rows, np.int64), np.zeros((rows, 3), np.int64), np.ones(rows), *ages)
    for _ in range(30_000):
        hazard.used(0, (NO_CODE,) * 3, 1.5)
    hazard.learn()
    assert hazard.rates[0, 1] == pytest.approx(0.3, rel=0.05)
    assert hazard.rates[0, 0] < prior_rates()[0]
    assert np.allclose(hazard.rates[1], prior_rates()), "another kind learned from it"


def test_a_feature_learns_what_is_more_than_the_others_explain() -> None:
    """A thousand of each; those with code 1 are used ten times as often."""
    hazard = Hazard(1, 8)
    codes = np.array([[1, 0, 0]] * 1000 + [[2, 0, 0]] * 1000)
    for _ in range(20):
        hazard.waited(np.zeros(2000, np.int64), codes, hazard.factors_of(codes), np.zeros(2000), np.full(2000, 1.0))
        for code, uses in ((1, 100), (2, 10)):
            for _ in range(uses):
                hazard.used(0, (code, NO_CODE, NO_CODE), 0.5)
        hazard.learn()
    assert hazard.factors[1] / hazard.factors[2] == pytest.approx(10, rel=0.3)
    assert hazard.factors[NO_CODE] == 1.0


def test_a_bucket_that_was_seen_twice_hardly_moves_and_no_product_goes_beyond_reason() -> None:
    hazard = Hazard(1, 8)
    for _ in range(2):
        hazard.used(0, (3, NO_CODE, NO_CODE), 0.5)
    hazard.learn()
    assert 1 < hazard.factors[3] < 2
    hazard.factors[3] = 1e6
    assert hazard.factor_of((3, 3, NO_CODE)) == FACTOR_MAX
    assert hazard.factors_of(np.array([[3, 3, 0]])).tolist() == [FACTOR_MAX]


def test_one_that_waited_counts_as_in_a_crowd() -> None:
    one, many = Hazard(2, 8), Hazard(2, 8)
    for since_s, until_s in ((0.0, 0.3), (0.3, 7.0), (7.0, 7.0), (700.0, 5000.0)):
        one.one_waited(1, (4, 5, NO_CODE), 2.0, since_s, until_s)
        many.waited(np.array([1]), np.array([[4, 5, 0]]), np.array([2.0]), np.array([since_s]), np.array([until_s]))
    one.learn()
    many.learn()
    assert np.allclose(one.rates, many.rates)
    assert np.allclose(one.factors, many.factors)
    assert not np.allclose(one.rates[1], prior_rates())


def best_bargain(rates: np.ndarray, widths: np.ndarray, first: int) -> float:
    """The index by going through all ends, with sums instead of arrays."""
    best, alive, held, used = 0.0, 1.0, 0.0, 0.0
    for rate, width in zip(rates[first:], widths[first:], strict=True):
        dies = alive * (1 - np.exp(-rate * width))
        used += dies
        held += dies / rate
        alive -= dies
        best = max(best, used / held)
    return best


@pytest.mark.parametrize(
    "rates", [[0.5, 0.1, 0.02], [0.001, 0.3, 0.01], [0.01, 0.001, 0.2], [0.1, 0.1, 0.1], [1e-6, 1e-5, 1e-4]]
)
def test_the_index_is_the_best_bargain_over_all_times_to_give_up(rates: list[float]) -> None:
    widths, factors = np.array([1.0, 4.0, 30.0]), np.array([0.25, 1.0, 16.0])
    table = index_table(np.array(rates), widths, factors)
    for row, factor in zip(table, factors, strict=True):
        wanted = [best_bargain(np.array(rates) * factor, widths, first) for first in range(3)]
        assert row == pytest.approx(wanted)


def test_a_falling_hazard_is_its_own_index_and_a_rising_one_is_worth_waiting_for() -> None:
    widths = np.array([1.0, 4.0, 30.0])
    falling = np.array([0.5, 0.1, 0.02])
    assert index_table(falling, widths, np.ones(1))[0] == pytest.approx(falling)
    [looks_ahead] = index_table(np.array([0.001, 0.3, 0.01]), widths, np.ones(1))
    assert looks_ahead[0] > 100 * 0.001
    assert looks_ahead[1] == pytest.approx(0.3)


def test_every_bucket_has_a_code_of_its_own_kind() -> None:
    seen: dict[tuple[int, int], set[int]] = {}
    for kind in (Kind.END, Kind.LAST, Kind.WAY):
        for prompt in (0, 1, 700, 10**5, 10**9):
            for known in (0, prompt // 2, prompt, 2 * prompt):
                for answer in (None, 0, 30, 10**9):
                    codes = codes_of_new(kind, prompt_tokens=prompt, known_tokens=known, answer_tokens=answer)
                    for place, code in enumerate(codes):
                        seen.setdefault((kind, place), set()).add(code)
    for uses in (1, 2, 3, 4, 7, 8, 1000):
        for gap in (None, 0.0, 1.0, 30.0, 1e9):
            for origin in Kind:
                for turn in (0, 1, 14, 15, 1000):
                    codes = codes_of_used(uses=uses, mean_gap_s=gap, origin=origin, turn=turn)
                    for place, code in enumerate(codes):
                        seen.setdefault((Kind.USED, place), set()).add(code)
    every = [code for found in seen.values() for code in found if code != NO_CODE]
    assert len(every) == len(set(every)), "two features share a code"
    assert max(every) < CODE_COUNT
    for (number, _), found in seen.items():
        assert all(code == NO_CODE or code // 64 == number for code in found)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ({"prompt_tokens": 1000}, {"prompt_tokens": 900}, True),
        ({"prompt_tokens": 1000}, {"prompt_tokens": 1100}, False),
        ({"known_tokens": 0}, {"known_tokens": 100}, True),
        ({"known_tokens": 0}, {"known_tokens": 200}, False),
        ({"answer_tokens": 100}, {"answer_tokens": None}, False),
    ],
)
def test_what_is_alike_shares_its_buckets(left: dict[str, int], right: dict[str, int], same: bool) -> None:
    usual = {"prompt_tokens": 1000, "known_tokens": 0, "answer_tokens": 100}
    found = [codes_of_new(Kind.END, **(usual | one)) for one in (left, right)]
    assert (found[0] == found[1]) == same


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"uses": 5}, True),
        ({"uses": 3}, False),
        ({"mean_gap_s": 20.0}, True),
        ({"mean_gap_s": 200.0}, False),
        ({"origin": Kind.WAY}, False),
        ({"turn": 3}, False),
    ],
)
def test_what_was_used_is_told_by_how_often_how_far_apart_what_it_was_and_its_turn(
    other: dict[str, float], same: bool
) -> None:
    usual = {"uses": 4, "mean_gap_s": 25.0, "origin": Kind.END, "turn": 2}
    assert (codes_of_used(**usual) == codes_of_used(**(usual | other))) == same


def test_a_prompt_costs_the_sum_of_its_parts() -> None:
    cost = PrefillCost(2.0, 0.5)
    assert cost.between(0, 10) == 20 + 50
    assert cost.between(0, 4) + cost.between(4, 10) == cost.between(0, 10)
    sizes = geometric_cost(hidden_size=4096, attention_layers=15, parameters=17e9)
    assert sizes.between(0, 100_000) == pytest.approx(100_000 * (1 + 0.361), rel=0.01)


def test_the_prior_rate_of_a_bin_is_that_of_the_age_in_its_middle() -> None:
    """A fifth of a use for each doubling of the age, beyond a minute."""
    assert prior_rates()[[0, 1, 5]] == pytest.approx([0.2 / 60.5, 0.2 / 61.5, 0.2 / 84.0])


def test_the_mean_gap_of_uses_equally_far_apart_is_that_gap() -> None:
    records, place = Records(), Any
    prospects = Prospects(small_arena(4, 2, 4), PrefillCost(1.0, 1e-4), records, 0.0)
    codes = codes_of_used(uses=1, mean_gap_s=None, origin=Kind.USED, turn=0)
    row = records.add(Kind.USED, codes, 0, place, 0.0)  # type: ignore[arg-type]
    for number in range(1, 5):
        prospects.now_s = 20.0 * number
        prospects.use(row)
    assert records.gaps_s[row] == pytest.approx(20.0)
    prospects.now_s += 60.0
    prospects.use(row)
    assert 20.0 < (records.gaps_s[row] or 0.0) < 60.0


def test_a_record_is_a_ghost_until_its_state_is_in_memory_and_is_listed_until_it_is_removed() -> None:
    records, place = Records(), Any
    first, second = (records.add(Kind.USED, (0,), 0, place, 0.0) for _ in range(2))  # type: ignore[arg-type]
    records.live[second] = True
    assert records.rows(0, records.count).tolist() == [first, second]
    assert records.ghosts(np.array([first, second])).tolist() == [True, False]
    records.remove(first)
    assert records.rows(0, records.count).tolist() == [second]


def test_many_records_are_valued_as_each_alone_and_an_heir_counts_as_its_own() -> None:
    records, place = Records(), Any
    prospects = Prospects(small_arena(4, 2, 4), PrefillCost(1.0, 1e-4), records, 0.0)
    old, new = (
        records.add(kind, codes_of_used(uses=uses, mean_gap_s=5.0, origin=kind, turn=0), 0, place, 0.0)  # type: ignore[arg-type]
        for kind, uses in ((Kind.USED, 1), (Kind.USED, 9))
    )
    for number in range(1, 40):
        prospects.now_s = 2.0 * number
        prospects.use(new)
    prospects.learn()
    rows = np.array([old, new])
    records.rates[rows] = 1.0
    for row in (old, new):
        prospects.weigh(row, Kind.USED, records.codes_of(row))
    alone = [prospects.value(row, 1.0) for row in (old, new)]
    prospects.weigh_rows(rows)
    assert prospects.values(rows).tolist() == pytest.approx(alone)
    uses = [prospects.uses(row) for row in (old, new)]
    assert uses[0] < uses[1]
    records.heirs[old] = new
    assert prospects.uses(old) == uses[1]
    assert prospects.value(old, 1.0) == prospects.values(rows)[0] == pytest.approx(max(alone))
