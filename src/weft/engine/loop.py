"""The step loop: four verbs, in one of two orders.

    plan      scheduler.plan()           decides; changes nothing
    commit    scheduler.commit(plan)     rows, queues and memory: the only writer
    execute   executor                   the only user of the device
    settle    settlement.settle(...)     tokens become events; sequences end

``PlainLoop`` runs each verb to its end before the next. ``weft.engine.overlap.OverlapLoop`` plans the next
step while the device computes one. Both have the face of ``StepLoop``, and ``EngineCore`` calls either.

``StepParts`` holds what both loops work with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weft.engine.ages import Ages
from weft.engine.executor import Executor
from weft.engine.flush import CacheFlush
from weft.engine.settlement import Settlement
from weft.engine.stats import EngineCounters
from weft.schedule.plan import StepPlan
from weft.schedule.scheduler import Scheduler
from weft.units import SeqId


@dataclass(slots=True)
class StepParts:
    """What a loop works with. ``clock`` returns seconds and never goes back. ``executor`` and ``clock`` may
    be replaced before the first step."""

    scheduler: Scheduler
    executor: Executor
    settlement: Settlement
    flush: CacheFlush
    counters: EngineCounters
    ages: Ages
    clock: Callable[[], float]

    def note_commit(self, plan: StepPlan, now_s: float) -> None:
        """``plan`` was committed at ``now_s``: ages of the cache and queue times."""
        self.ages.note(self.scheduler.memory.version, now_s)
        self.settlement.note_admissions(plan, now_s)

    @property
    def awaits_store(self) -> bool:
        """Whether the scheduler may have work and no plan."""
        return self.scheduler.store is not None and self.scheduler.store.may_stop_plans

    def note_finish(self, plan: StepPlan) -> None:
        """``plan`` is computed."""
        if self.scheduler.store is not None:
            self.scheduler.store.finished(plan)

    def run_alone(self, plan: StepPlan, began_s: float) -> None:
        """Execute and settle ``plan``, which was committed, with no other step in flight."""
        result = self.executor.execute(plan)
        self.note_finish(plan)
        if self.flush.due:
            self.flush.run(in_flight=False)
        self.scheduler.advance(plan, result.tokens, result.windows)
        self.settlement.settle(plan, result)
        self.counters.step(plan, self.clock() - began_s)


class StepLoop(Protocol):
    """One order of the four verbs."""

    @property
    def in_flight(self) -> tuple[SeqId, ...] | None:
        """Sequences of the step in flight between two calls of ``step``; None when no step is."""
        ...

    def step(self) -> bool:
        """One round of the four verbs. The scheduler has work, or a step is in flight. False: every request
        waits for the store, and nothing was done."""
        ...

    def abandon(self) -> None:
        """The engine ends: a step in flight is never settled."""
        ...


class PlainLoop:
    """Each verb waits for the one before it."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    @property
    def in_flight(self) -> tuple[SeqId, ...] | None:
        return None

    def step(self) -> bool:
        parts = self._parts
        began_s = parts.clock()
        plan = parts.scheduler.plan()
        if plan is None:
            assert parts.awaits_store, "with nothing in flight, a scheduler with work has a plan"
            return False

        parts.scheduler.commit(plan)
        parts.note_commit(plan, began_s)

        parts.run_alone(plan, began_s)
        return True

    def abandon(self) -> None:
        """Nothing is in flight between two steps."""
