"""The whole engine in virtual time while everything that lies apart is moved together in every step: the same
answers, over an executor that compares every state and page with what it must hold. And with one word of a
move left out, which it must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.failing import assert_fails
from tests.support.sharing import sharing_scenario
from tests.support.simulator import Simulation
from tests.support.workload import Scenario, scenario_from_seed
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.memory.usage import MoveCounts
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder

SCENARIOS: list[Scenario] = [
    *map(sharing_scenario, (11, 12, 26, 29, 46)),
    *map(scenario_from_seed, (0, 11, 40, 47, 53)),
]
"""Runs whose frames have several items, so that much lies apart."""


@pytest.fixture(autouse=True)
def _every_step_compacts(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Transaction.seal

    def sealing(transaction: Transaction) -> Reservation:
        transaction.compact()
        return seal(transaction)

    monkeypatch.setattr(Transaction, "seal", sealing)


def run(scenario: Scenario) -> MoveCounts:
    simulation = Simulation(scenario)
    simulation.run()
    return simulation.core.memory.usage().moves


def run_all() -> list[MoveCounts]:
    return [run(scenario) for scenario in SCENARIOS]


def test_the_laws_hold_while_everything_moves() -> None:
    counts = run_all()
    assert sum(count.pages for count in counts) > 100
    assert sum(count.slots for count in counts) > 8


def without_page_copies(plan: StepPlan) -> StepPlan:
    work = plan.arena_work
    return (
        replace(plan, arena_work=replace(work, page_copies=work.page_copies[:-1]))
        if plan.reservation.moves.pages
        else plan
    )


def without_slot_copies(plan: StepPlan) -> StepPlan:
    work = plan.arena_work
    return (
        replace(plan, arena_work=replace(work, slot_copies=work.slot_copies[:-1]))
        if plan.reservation.moves.slots
        else plan
    )


def without_table_patches(plan: StepPlan) -> StepPlan:
    told = plan.reservation.moves.table_patches
    return replace(plan, table_patches=plan.table_patches[:, :-1]) if told else plan


def with_the_slots_of_before(plan: StepPlan) -> StepPlan:
    left = {copy.dst: copy.src for copy in plan.reservation.moves.slots}
    return replace(plan, slots=np.asarray([left.get(slot, slot) for slot in plan.slots.tolist()], np.int32))


@pytest.mark.parametrize(
    ("forget", "says"),
    [
        (without_page_copies, "holds other tokens|does not hold position"),
        (without_slot_copies, "does not hold the state|holds no state"),
        (without_table_patches, "was moved away from under a row"),
        (with_the_slots_of_before, "does not hold the state"),
    ],
)
def test_a_move_that_is_made_in_part_is_caught(
    monkeypatch: pytest.MonkeyPatch, says: str, forget: Callable[[StepPlan], StepPlan]
) -> None:
    seal = PlanBuilder.seal
    monkeypatch.setattr(PlanBuilder, "seal", lambda *args: forget(seal(*args)))
    assert_fails(says, run_all)
