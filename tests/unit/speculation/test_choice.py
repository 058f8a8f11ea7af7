"""How many drafts: costs follow measurements, chances follow the text, and the choice is the best of all."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.costs.rows import ROWS, RowCosts
from weft.speculation.choice import GAIN_MIN, Chances, OwnChances, choose, may_pay
from weft.speculation.drafter import Proposal

FLAT = RowCosts({1: 27.0, 16: 30.0})
LINEAR = RowCosts({rows: float(rows) for rows in ROWS})


def test_costs_are_interpolated_and_never_fall() -> None:
    costs = RowCosts({1: 26.8, 2: 27.4, 4: 28.9, 8: 32.2, 16: 40.1})
    assert costs.seconds(4) == pytest.approx(28.9)
    assert costs.seconds(6) == pytest.approx((28.9 + 32.2) / 2)
    values = [costs.seconds(rows) for rows in range(1, 3000)]
    assert values == sorted(values)


def test_measurements_replace_the_guess() -> None:
    costs = RowCosts()
    assert not costs.measured(1)
    for seconds in (2.0, 0.02, 0.021):  # the first one compiles
        costs.note(1, seconds)
    assert costs.measured(1)
    assert costs.seconds(1) == pytest.approx(0.02)
    assert costs.seconds(16) == pytest.approx(0.02 * 1.75)
    for seconds in (0.05, 0.04, 0.06):
        costs.note(16, seconds)
    assert costs.table() == pytest.approx({1: 0.02, 16: 0.04})


def test_a_machine_that_gets_slower_changes_no_ratio() -> None:
    """Though only steps with drafts are measured while it is slow."""
    costs = RowCosts({1: 1.0, 4: 1.1, 16: 2.0})
    for _ in range(200):
        costs.note(4, 3.3)
    assert costs.seconds(4) == pytest.approx(3.3, rel=0.01)
    assert costs.seconds(1) == pytest.approx(3.0, rel=0.01)
    assert costs.seconds(16) == pytest.approx(6.0, rel=0.01)


def test_steps_in_a_row_correct_the_shape_and_outliers_hardly_do() -> None:
    costs, chance = RowCosts({1: 1.0, 4: 1.0}), random.Random(5)
    for step in range(400):
        slow = 40.0 if chance.random() < 0.1 else 1.0
        costs.note(4 if step % 2 else 1, slow * (2.0 if step % 2 else 1.0))
    assert costs.seconds(4) / costs.seconds(1) == pytest.approx(2.0, rel=0.2)
    before = costs.seconds(4) / costs.seconds(1)
    costs.note(1, 500.0)
    assert costs.seconds(4) / costs.seconds(1) == pytest.approx(before, rel=0.04)


def test_a_figure_above_one_of_more_rows_stays_where_it_was_measured() -> None:
    """It is cut in use. A cut figure is no measure of the next step, or it would grow with each."""
    costs = RowCosts({1: 1.0, 2: 3.0, 4: 1.5})
    for _ in range(100):
        costs.note(2, 3.0)
    assert costs.seconds(2) == costs.seconds(4)
    assert costs.table()[2] == pytest.approx(3.0, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0.06, 1.0), max_size=3), min_size=1, max_size=3), st.integers(0, 3))
def test_no_other_number_of_drafts_is_better(chances: list[list[float]], table: int) -> None:
    """Compared with every combination of numbers."""
    costs = (FLAT, LINEAR, RowCosts(), RowCosts({1: 10, 2: 19, 4: 20, 8: 40}))[table]
    survivals = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    survivals = [[value for value in row if value >= 0.05] for row in survivals]
    decodes = len(survivals)

    def rate(counts: tuple[int, ...]) -> float:
        expected = decodes + sum(sum(row[:count]) for row, count in zip(survivals, counts, strict=True))
        drafted = sum(counts)
        return expected / (costs.verify_seconds(decodes, drafted) if drafted else costs.seconds(decodes))

    chosen = tuple(choose(survivals, decodes, costs))
    best = max(map(rate, itertools.product(*(range(len(row) + 1) for row in survivals))))
    nothing = rate((0,) * decodes)
    if best > nothing * GAIN_MIN * 1.000001:
        assert rate(chosen) == pytest.approx(best)
    else:
        assert rate(chosen) >= nothing


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted() -> None:
    assert choose([[0.98, 0.96]] * 4, 4, LINEAR) == [0, 0, 0, 0]
    assert choose([[0.98, 0.96]] * 4, 4, FLAT) == [2, 2, 2, 2]


def test_unlikely_drafts_give_way_to_likely_ones_of_other_sequences() -> None:
    costs = RowCosts({1: 1.0, 2: 1.02, 4: 1.05, 8: 2.5})
    assert choose([[0.9, 0.8], [0.1, 0.05]], 2, costs) == [2, 0]


def score(table: Chances, match: int, right: bool) -> None:
    OwnChances(table, "suffix").score(Proposal((1,), match), [int(right)])


def test_chances_follow_the_text_by_length_of_match() -> None:
    table, chance = Chances(), random.Random(1)
    for _ in range(3000):
        match = chance.choice((3, 20))
        score(table, match, chance.random() < (0.1 if match == 3 else 0.9))
    assert table.chance("suffix", 3) == pytest.approx(0.1, abs=0.06)
    assert table.chance("suffix", 20) == pytest.approx(0.9, abs=0.06)
    assert table.chance("tree", 3) == Chances().chance("tree", 3)
    for _ in range(3000):
        score(table, 3, chance.random() < 0.8)
    assert table.chance("suffix", 3) == pytest.approx(0.8, abs=0.08)


def test_a_sequence_that_differs_from_the_others_has_its_own_factor() -> None:
    table = Chances()
    poor, rich = OwnChances(table, "suffix"), OwnChances(table, "suffix")
    for _ in range(40):
        assert poor.score(Proposal((1, 2), 8), [5]) == 0
        assert rich.score(Proposal((1, 2), 8), [1, 2]) == 2
    proposal = Proposal((1, 2, 3), 8)
    assert sum(poor.survivals(proposal)) < 0.15
    assert rich.survivals(proposal)[0] > 0.8
    assert sorted(rich.survivals(proposal), reverse=True) == rich.survivals(proposal)


def test_where_rows_are_dear_no_draft_may_pay_with_many_sequences() -> None:
    """One more row costs half a step: 2 sequences can gain, 32 cannot, and ``choose`` agrees."""
    costs = RowCosts({rows: 1.0 + 0.5 * rows for rows in ROWS}, {rows: 3.0 + 0.5 * rows for rows in ROWS})
    assert may_pay(2, 30, costs)
    assert not may_pay(32, 60, costs)
    assert sum(choose([[1.0] * 15] * 2, 2, costs)) > 0
    assert sum(choose([[0.98] * 2] * 30 + [[]] * 2, 32, costs)) == 0


def test_windows_of_several_sequences_correct_the_figure_of_one() -> None:
    """A step as dear as estimated changes nothing; dearer ones in turn with plain ones raise the estimate."""
    costs = RowCosts({1: 1.0, 8: 2.0}, {2: 1.5, 4: 1.8, 8: 2.4, 16: 3.6})
    estimate, alone = costs.verify_seconds(8, 8), costs.verify_seconds(1, 8)
    assert estimate == pytest.approx(2.0 + 1.5 * (alone - 1.0))
    costs.note_verify(8, 8, estimate)
    assert costs.verify_seconds(8, 8) == pytest.approx(estimate)
    for _ in range(60):
        costs.note(8, 2.0)
        costs.note_verify(8, 8, 1.5 * estimate)
    assert costs.verify_seconds(8, 8) / costs.seconds(8) == pytest.approx(1.5 * estimate / 2.0, rel=0.1)


def test_the_figures_of_windows_are_their_seconds_at_the_pace_of_the_machine() -> None:
    costs = RowCosts({1: 1.0, 8: 2.0}, {2: 1.5, 4: 1.8, 16: 3.0})
    for steps in range(12):
        costs.note(1, 1.1)
        costs.note_verify(1, 3 + steps, 2.5)
        pace = costs.seconds(1) / costs.figure(1)
        for most in (1, 2, 14, 3, 15, 16, 63):
            assert [pace * figure for figure in costs.verify_figures(most)[:most]] == pytest.approx(
                [costs.verify_seconds(1, drafted) for drafted in range(1, most + 1)]
            )
