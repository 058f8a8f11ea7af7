"""An executor for tests and simulations that computes when its result is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from weft.schedule.plan import StepPlan, StepResult


class LateExecutor(ABC):
    """An executor that computes in ``finish``: ``begin`` and ``finish`` by way of ``execute``."""

    def __init__(self) -> None:
        self._begun: deque[StepPlan] = deque()

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...

    def begin(self, plan: StepPlan) -> None:
        self._begun.append(plan)

    def finish(self) -> StepResult:
        return self.execute(self._begun.popleft())

    def transfers_done(self, step: int) -> bool:
        return True
