"""The seam between the pure half and whatever computes: one method that turns a plan into tokens.

Implementations: ``weft.runner.torch_executor`` (the model), ``weft.engine.scripted`` (tokens by a
pure function of the sequence, for tests) and the simulator's (a cost model on a virtual clock). The
engine code is the same under all three.
"""

from __future__ import annotations

from typing import Protocol

from weft.schedule.plan import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes and zeroing, compute every run, sample. An exception here is a
        bug or a broken device: the engine reports it and ends, it does not guess."""
        ...

    def close(self) -> None:
        """Free device memory. Idempotent."""
        ...
