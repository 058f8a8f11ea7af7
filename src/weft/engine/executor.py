"""The seam between the pure half and whatever computes: a plan goes in, tokens come out.

Implementations: ``weft.runner.torch_executor`` (the model), ``weft.engine.scripted`` (tokens by a
pure function of the sequence, for tests) and the simulator's (a cost model on a virtual clock). The
engine code is the same under all three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

from weft.engine.sleep_state import Part
from weft.schedule.plan import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes and zeroing, compute every run, sample. An exception here is a
        bug or a broken device: the engine reports it and ends, it does not guess. The same as ``begin`` and
        then ``finish``; no step may be in flight."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """``execute`` this after all that was begun before it, and do not wait for it. A decode whose token
        is PAD is fed the token that its row chose last."""
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest step that was begun and not finished. An exception is that step's; what was
        begun after it is not computed."""
        ...

    def sleep(self, level: int) -> None:
        """Let go of the arena, and of the weights on the device: level 1 keeps them on the host, level 2
        nowhere. No step is in flight, no row is taken, and none follows before everything is back. What is
        gone already is left alone."""
        ...

    def wake(self, part: Part) -> None:
        """Take hold of a part again. Raises a WeftError where that cannot be, and may be called again."""
        ...

    def close(self) -> None:
        """Free device memory, once nothing is computed any more. Idempotent."""
        ...


class LateExecutor(ABC):
    """One that computes when the result is asked for: ``begin`` and ``finish`` out of ``execute``."""

    def __init__(self) -> None:
        self._begun: deque[StepPlan] = deque()

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...

    def begin(self, plan: StepPlan) -> None:
        self._begun.append(plan)

    def finish(self) -> StepResult:
        return self.execute(self._begun.popleft())
