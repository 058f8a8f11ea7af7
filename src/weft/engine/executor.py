"""``Executor``, the interface between the engine and the device: it takes a plan and returns tokens.

Implementations: ``weft.runner.torch_executor`` (the model), ``tests.support.scripted`` (tokens by a pure
function of the sequence, for tests) and the simulator's (a cost model on a virtual clock). The engine code is
the same under all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.stats import Part
from weft.schedule.plan import StepPlan, StepResult


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes and zeroing, compute every run, sample. The same as ``begin`` and then
        ``finish``; no step may be in flight. An exception here is a bug or a broken device: it ends the
        engine."""

    def begin(self, plan: StepPlan) -> None:
        """Start to execute ``plan`` after all plans begun before it, and do not wait for it. A decode whose
        token is PAD is fed the token that its row chose last. No step is in flight when a plan that ``decides_next``
        begins, and none begins before it has finished."""

    def finish(self) -> StepResult:
        """Wait for the oldest step that was begun and not finished. An exception belongs to that step; steps
        begun after it are not computed."""

    def transfers_done(self, step: int) -> bool:
        """Return whether all loads and stores of steps up to ``step``, which is finished, have ended. Never
        waits."""

    def sleep(self, level: int) -> tuple[Part, ...]:
        """Free the arena, and the weights on the device: level 1 keeps a copy on the host, level 2 keeps none. Returns
        the parts that ``wake`` must bring back. On a CPU, level 1 leaves the weights in place.

        Call it with no step in flight and no row in use; no step follows before every part is back. A part that was
        freed before stays free."""

    def read_from(self, directory: str) -> None:
        """Set the directory from which dropped weights are read when they wake."""

    def wake(self, part: Part) -> None:
        """Allocate or read a part again. Raises a WeftError on failure, and may be called again."""

    def close(self) -> None:
        """Free device memory, once no step is computed any more. Idempotent."""


class ProcessWatch(Protocol):
    """Processes that an executor needs, for an engine that waits for its next command."""

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors to wait for: one becomes readable when a process ends or fails, and for no other reason
        while the engine is idle.
        """

    def check(self) -> None:
        """Raise the WeftError that names the process that ended or failed."""
