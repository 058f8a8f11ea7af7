"""Rank 1 launches a step while the device computes the one before it, as rank 0 does."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.unit.runner.plans import plan
from weft.assemble import rank_process
from weft.ranks.messages import RankCall, RankClose
from weft.schedule.plan import StepPlan


class Device:
    """An executor that notes what it is told. ``failing``: a step whose result is an error."""

    def __init__(self, failing: int | None = None) -> None:
        self.log: list[str] = []
        self._failing = failing

    def execute(self, plan: StepPlan) -> None:
        self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Any:
        self.log.append(f"launch {plan.step}")
        return Step(self, plan.step, failing=plan.step == self._failing, continues=plan.mtp_drafts is not None)

    def read_from(self, directory: str) -> None:
        self.log.append("directory")


class Step:
    def __init__(self, device: Device, number: int, *, failing: bool, continues: bool) -> None:
        self._device, self._number, self._failing, self.continues = device, number, failing, continues

    def result(self) -> None:
        self._device.log.append(f"wait {self._number}")
        if self._failing:
            raise RuntimeError("an illegal memory access")


def followed(device: Device, *messages: object) -> list[str]:
    own, theirs = multiprocessing.Pipe()
    for message in messages:
        own.send(message)
    rank_process.follow(cast(Any, device), cast(Any, theirs), cast(Any, None))
    return device.log


PLANS = [replace(plan(), step=step) for step in range(3)]


def test_a_rank_launches_the_next_step_before_it_waits_for_the_last() -> None:
    log = followed(Device(), *PLANS, RankCall("read_from", ("elsewhere",)), RankClose())
    assert log[:5] == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1"]
    assert log[5:] == ["wait 2", "directory"], "nothing is under way when a rank does something else"


def test_a_rank_launches_the_rest_of_a_step_at_once_because_rank_0_needs_its_part() -> None:
    log = followed(Device(), PLANS[0], replace(PLANS[1], mtp_drafts=2), PLANS[2], RankClose())
    assert log == ["launch 0", "launch 1", "wait 0", "wait 1", "launch 2", "wait 2"]


def test_an_error_of_the_last_step_is_said_without_another_message() -> None:
    device = Device(failing=2)
    own, theirs = multiprocessing.Pipe()
    for step in PLANS:
        own.send(step)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rank_process.follow(cast(Any, device), cast(Any, theirs), cast(Any, None))
    assert device.log[-1] == "wait 2"
