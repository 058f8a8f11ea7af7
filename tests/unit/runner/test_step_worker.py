"""The thread that computes steps: in order, nothing after a failure, nothing left running after ``close``."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from tests.unit.runner import plans
from weft.runner.launched import Launched, StepWorker
from weft.schedule.plan import StepPlan, StepResult

WAIT_S = 60
"""Only a broken worker waits so long."""


@dataclass
class OnItsWay:
    device: Device
    plan: StepPlan

    def result(self) -> StepResult:
        assert self.device.home.wait(WAIT_S)
        if self.plan.step == self.device.lost:
            raise OSError("it never came home")
        return StepResult(self.plan.tokens + 100 * self.plan.step, {}, {})


class Device:
    """Launches a step when ``go`` is set; notes which ones, and on which thread. They are home when ``home``
    is set."""

    def __init__(self, *, fails: int | None = None, lost: int | None = None) -> None:
        self.go, self.home = threading.Event(), threading.Event()
        self.home.set()
        self.lost = lost
        self.computed: list[int] = []
        self.threads: set[str] = set()
        self.worker = StepWorker(self.launch, prepare=lambda: self.threads.add("prepared"))
        self._fails = fails

    def launch(self, plan: StepPlan) -> Launched:
        assert self.go.wait(WAIT_S)
        self.threads.add(threading.current_thread().name)
        self.computed.append(plan.step)
        if plan.step == self._fails:
            raise OSError("the device is gone")
        return OnItsWay(self, plan)


def step(number: int) -> StepPlan:
    made = plans.plan([(0, number, [number], 0, True)])
    object.__setattr__(made, "step", number)
    return made


def test_begin_does_not_wait_and_results_come_in_the_order_of_begin() -> None:
    device = Device()
    for number in range(3):
        device.worker.begin(step(number))
    assert device.computed == []
    assert device.worker.in_flight == 3
    device.go.set()
    assert [device.worker.finish().tokens.tolist() for _ in range(3)] == [[0], [101], [202]]
    assert device.computed == [0, 1, 2]
    assert device.worker.in_flight == 0
    assert device.threads == {"prepared", "steps_0"}
    device.worker.close()


def test_after_a_step_that_failed_nothing_is_computed() -> None:
    device = Device(fails=1)
    device.go.set()
    for number in range(3):
        device.worker.begin(step(number))
    device.worker.finish()
    with pytest.raises(OSError, match="the device is gone"):
        device.worker.finish()
    with pytest.raises(RuntimeError, match="step 2 was not computed"):
        device.worker.finish()
    assert device.computed == [0, 1]
    device.worker.close()


def test_a_step_is_launched_before_the_one_before_it_is_home() -> None:
    device = Device()
    device.go.set()
    device.home.clear()
    device.worker.begin(step(0))
    device.worker.begin(step(1))
    device.worker._flights[1].result(WAIT_S)  # comes although nobody brings step 0 home
    assert device.computed == [0, 1]
    device.home.set()
    assert [device.worker.finish().tokens.tolist() for _ in range(2)] == [[0], [101]]
    device.worker.close()


def test_after_a_step_that_never_came_home_nothing_is_launched() -> None:
    device = Device(lost=0)
    device.go.set()
    device.worker.begin(step(0))
    with pytest.raises(OSError, match="never came home"):
        device.worker.finish()
    device.worker.begin(step(1))
    with pytest.raises(RuntimeError, match="step 1 was not computed"):
        device.worker.finish()
    assert device.computed == [0]
    device.worker.close()


def test_close_waits_for_the_step_that_is_computed_and_drops_the_others() -> None:
    device = Device()
    device.worker.begin(step(0))
    device.worker.begin(step(1))
    device.go.set()
    device.worker.close()
    computed = list(device.computed)
    assert computed in ([], [0], [0, 1])
    assert device.worker.in_flight == 0
    device.worker.close()
    assert device.computed == computed


def test_a_worker_that_was_never_used_closes() -> None:
    device = Device()
    device.worker.close()
    assert device.computed == []
    assert device.worker.in_flight == 0
