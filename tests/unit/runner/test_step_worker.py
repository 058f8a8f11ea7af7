"""The thread that computes steps: in order, nothing after a failure, nothing left running after ``close``."""

from __future__ import annotations

import threading

import pytest

from tests.unit.runner import plans
from weft.runner.step_worker import StepWorker
from weft.schedule.plan import StepPlan, StepResult

WAIT_S = 60
"""Only a broken worker waits so long."""


class Device:
    """Computes a step when ``go`` is set; notes which ones, and on which thread."""

    def __init__(self, *, fails: int | None = None) -> None:
        self.go = threading.Event()
        self.computed: list[int] = []
        self.threads: set[str] = set()
        self.worker = StepWorker(self.compute, prepare=lambda: self.threads.add("prepared"))
        self._fails = fails

    def compute(self, plan: StepPlan) -> StepResult:
        assert self.go.wait(WAIT_S)
        self.threads.add(threading.current_thread().name)
        self.computed.append(plan.step)
        if plan.step == self._fails:
            raise OSError("the device is gone")
        return StepResult(plan.tokens + 100 * plan.step, {}, {})


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
    Device().worker.close()
