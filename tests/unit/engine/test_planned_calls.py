"""A plan of many decodes takes the calls of a plan of few: its rows are arrays."""

from __future__ import annotations

import sys
from types import FrameType

from tests.unit.engine.rig import Rig


def calls_of_a_plan(running: int) -> int:
    """Calls that Python makes while a step of ``running`` decodes is planned."""
    rig = Rig(rows_max=running, frame_count=running + 40, queue_max=running, step_tokens_max=64 * running)
    for number in range(running):
        rig.submit(f"r{number:04}", 20, max_tokens=30)
    for _ in range(4):
        rig.core.step()
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    plan = rig.core.scheduler.plan

    def counted(*args: object, **more: object) -> object:
        sys.setprofile(count)
        try:
            return plan(*args, **more)   # type: ignore[arg-type]
        finally:
            sys.setprofile(None)

    rig.core.scheduler.plan = counted   # type: ignore[method-assign, assignment]
    rig.core.step()
    return calls


def test_a_plan_of_many_decodes_takes_the_calls_of_a_plan_of_few() -> None:
    few, many = calls_of_a_plan(8), calls_of_a_plan(256)
    assert 20 < few <= many < few + 30
