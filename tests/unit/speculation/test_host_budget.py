"""What speculation may cost while it brings nothing: sources sleep, the head is off, prompts are unread."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.speculation.texts import int32s, prose
from weft.costs.rows import ROWS, RowCosts
from weft.speculation.choice import BARREN_STEPS, CROWD_SHARE, REST_STEPS, SHARE, HostBudget
from weft.speculation.drafter import DraftRow
from weft.speculation.mtp import PROBE_LENGTH, PROBE_STEPS, HeadPlan
from weft.speculation.speculator import Speculator

FLAT = RowCosts({1: 27.0, 16: 30.0})
LINEAR = RowCosts({rows: float(rows) for rows in ROWS})


@pytest.mark.parametrize("share", [0.0, 0.005, 0.05, 0.5])
def test_barren_steps_take_at_most_their_share(share: float) -> None:
    """``share``: host time of an awake step over the step."""
    budget, spent, awake = HostBudget(), 0.0, 0
    for _ in range(10_000):
        if budget.awake:
            budget.spend(share)
            spent += share
            awake += 1
        budget.step(1.0, drafted=False)
    assert spent <= 1.1 * SHARE * 10_000
    assert (awake == 10_000) == (share <= SHARE)


def test_many_sequences_may_cost_half_as_much() -> None:
    """Two steps that ask 32 sequences end a stretch."""
    budget, spent, awake = HostBudget(), 0.0, 0
    for _ in range(10_000):
        if budget.awake:
            budget.spend(0.5)
            spent += 0.5
            awake += 1
        budget.step(1.0, drafted=False, sequences=32)
    assert spent <= 1.1 * CROWD_SHARE * 10_000
    assert awake % 2 == 0


def test_a_crowd_that_no_draft_repays_is_not_even_begun() -> None:
    clock = itertools.count()
    drafter = Speculator(("suffix",), costs=LINEAR, clock=lambda: float(next(clock)))
    assert drafter.head_drafts(2, prompts=True) is None
    assert drafter.awake
    assert drafter.head_drafts(32, prompts=True) is None
    assert not drafter.awake
    drafter.sleep_through(REST_STEPS, 1e9, 32, None)
    assert not drafter.awake
    drafter.sleep_through(REST_STEPS - 1, 1e9, 2, None)
    assert not drafter.awake
    drafter.sleep_through(1, 1e9, 2, None)
    assert drafter.awake


def test_a_draft_ends_a_stretch_and_a_wake_ends_a_sleep() -> None:
    budget = HostBudget()
    for step in range(100):
        budget.spend(1.0)
        budget.step(1.0, drafted=step % BARREN_STEPS == 0)
    assert budget.awake
    for _ in range(BARREN_STEPS):
        budget.spend(1.0)
        budget.step(1.0, drafted=False)
    assert not budget.awake
    budget.wake()
    assert budget.awake


def test_a_sequence_that_slept_is_drafted_for_only_once_its_text_is_known() -> None:
    clock = itertools.count()
    drafter = Speculator(("suffix",), costs=FLAT, clock=lambda: float(next(clock)))
    text = prose(1, 60) * 3
    drafter.begin(1, int32s(text[:60]), prompt_length=50, salt=None, prediction=None)
    for _ in range(BARREN_STEPS):  # a text that follows nothing known
        assert drafter.draft([DraftRow(1, 0)]) == {}
        drafter.observe(1, 0, 1e-6)
    assert not drafter.awake
    assert drafter.draft([DraftRow(1, 8)]) == {}
    drafter.wake()
    assert drafter.draft([DraftRow(1, 8)]) == {}  # stale: the tokens since then are missing
    drafter.settle(1, text[60:90], drafted=0, accepted=0)
    assert drafter.draft([DraftRow(1, 8)])[1] == tuple(text[90:98])


def test_windows_and_plain_steps_have_figures_of_their_own() -> None:
    costs = RowCosts({1: 1.0}, {2: 2.0, 16: 3.0})
    assert (costs.seconds(1), costs.verify_seconds(1, 1)) == (1.0, 2.0)
    for _ in range(3):
        costs.note(16, 4.0)
    assert costs.seconds(16) == 4.0
    assert costs.verify_seconds(1, 15) == 3.0
    assert costs.verify_seconds(16, 1) == pytest.approx(4.0 + 1.5 * (2.0 - 1.0))


def test_a_head_that_could_not_pay_with_right_drafts_is_off_and_reads_no_prompt() -> None:
    assert HeadPlan({}, 3, prompt_share=0.1).drafts(1, FLAT) == 3
    head = HeadPlan({}, 3, prompt_share=0.1)
    assert head.drafts(8, LINEAR) is None
    assert head.hopeless(8, LINEAR)
    assert not head.reads_prompts(8, LINEAR)
    assert head.drafts(40, FLAT) is None  # more rows than verify runs may have


def test_an_idle_head_is_probed_and_ever_more_rarely() -> None:
    head, probes = HeadPlan({}, 3), []
    for _ in range(30):  # its drafts are wrong
        head.chances.of("")._place_right = [0.0] * 3
    for step in range(8 * PROBE_STEPS):
        drafts = head.drafts(1, FLAT)
        head.stepped(27.0, FLAT, drafted=False)
        if drafts:
            probes.append(step)
            head.stepped(0.0, FLAT, drafted=True)
    begins = [step for step in probes if step - 1 not in probes]
    assert len(probes) == PROBE_LENGTH * len(begins)
    assert [later - step for step, later in itertools.pairwise(begins)] == sorted(
        later - step for step, later in itertools.pairwise(begins)
    )
    assert 2 <= len(begins) <= 4


def test_a_named_head_goes_on_while_its_drafts_are_right() -> None:
    """A draft takes a third of a step, as on a model of a few MB."""
    costs = RowCosts({1: 1.0}, {2: 1.7, 4: 1.8})
    measured = {drafts: 0.33 * drafts for drafts in (1, 2, 3)}
    thrifty, named = HeadPlan(measured, 3, prompt_share=0.1), HeadPlan(measured, 3)
    for head in (thrifty, named):
        head.chances.of("")._place_right = [0.7 * tried for tried in head.chances.of("")._place_tried]
    assert thrifty.drafts(1, costs) is None
    assert named.drafts(1, costs)
    named.chances.of("")._place_right = [0.3 * tried for tried in named.chances.of("")._place_tried]
    assert named.drafts(1, costs) is None


def test_prompts_are_read_on_credit_or_where_the_head_was_named() -> None:
    thrifty, named = HeadPlan({}, 3, prompt_share=0.1), HeadPlan({}, 3)
    for head in (thrifty, named):
        assert head.reads_prompts(1, FLAT)
        for _ in range(40):
            head.pay_prompts(27.0, 27.0, FLAT)
    assert named.reads_prompts(1, FLAT)
    assert not thrifty.reads_prompts(1, FLAT)
    thrifty.earn(27.0 * 50, FLAT)
    assert thrifty.reads_prompts(1, FLAT)


def test_a_rest_lasts_for_its_steps_and_for_what_is_owed() -> None:
    budget = HostBudget()
    budget.rest()
    budget.sleep_through(REST_STEPS - 1, 1.0)
    assert not budget.awake
    budget.step(1.0, drafted=False)
    assert budget.awake

    budget.spend(1.0)
    budget.rest()
    budget.sleep_through(REST_STEPS, 0.5 / SHARE)
    assert not budget.awake
    budget.sleep_through(1, 0.5 / SHARE)
    assert budget.awake
