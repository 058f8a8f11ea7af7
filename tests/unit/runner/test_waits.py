"""Waits for the device end: by its event, or by the deadline."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.far_memory import far_memory
from weft.runner.readback import PendingReadback
from weft.runner.staging import Staging
from weft.tensor import device
from weft.tensor.device import DeviceTimeoutError, wait_for


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


class Arrives:
    """An event that comes ``at_s``."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock = clock
        self._at_s = at_s

    def query(self) -> bool:
        return self._clock.now_s >= self._at_s

    def synchronize(self) -> None:
        raise AssertionError("this has no deadline")


@pytest.mark.parametrize("at_s", [0.0, 1e-5, 0.003, 0.05, 2.0])
def test_a_wait_is_as_long_as_the_device_takes(at_s: float) -> None:
    clock = Clock()
    wait_for(Arrives(clock, at_s), clock=clock, sleep=clock.sleep)
    assert at_s <= clock.now_s <= 1.03 * at_s + 2e-5
    assert bool(clock.sleeps) == (at_s > 0)


def test_what_never_comes_ends_with_a_reason() -> None:
    clock = Clock()
    with pytest.raises(DeviceTimeoutError, match="not finished its work in 20 s"):
        wait_for(Arrives(clock, float("inf")), deadline_s=20, clock=clock, sleep=clock.sleep)
    assert 20 <= clock.now_s < 20.1


def test_the_waits_of_a_step_have_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging and readback, with a device that never finishes."""
    never = Arrives(Clock(), float("inf"))
    monkeypatch.setattr(wait_for, "__kwdefaults__", {**(wait_for.__kwdefaults__ or {}), "deadline_s": 0.01})
    with pytest.raises(DeviceTimeoutError):
        PendingReadback([((1,), False)], torch.zeros(1, dtype=torch.int64).numpy(), never).open()
    with far_memory():
        staging = Staging(torch.device("cpu"))
    staging._events = [never, never]
    with pytest.raises(DeviceTimeoutError):
        staging.begin()
    assert device.WAIT_MAX_S > 60, "a step that compiles or pages is no hang"
