"""The step loop: four verbs, in one of two orders.

    plan      scheduler.plan()           decides; changes nothing
    commit    scheduler.commit(plan)     rows, queues and memory: the only writer
    execute   executor                   the only user of the device
    settle    settlement.settle(...)     tokens become events; sequences end

``PlainLoop`` runs each verb to its end before the next. ``weft.engine.overlap.OverlapLoop`` plans the next
step while the device computes one. Both have the same methods, and ``EngineCore`` calls either.

``StepParts`` holds the parts that both loops work with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.engine.executor import Executor
from weft.engine.settlement import Settlement
from weft.engine.stats import EngineCounters
from weft.memory.memory import Memory
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.units import SeqId

SAMPLES_MAX = 4096
SAMPLE_EVERY_S = 1.0


class Ages:
    """A clock of memory versions: seconds since a commit. Memory counts commits and knows no clock, so the clock is
    sampled.

        version   0   90   180   ...        noted at most once a second, the last SAMPLES_MAX of them (L11)
        seconds   0    1     2

    A version between two samples is as old as the sample before it. A version before the oldest sample is at
    least that old.
    """

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    def note(self, version: int, now_s: float) -> None:
        """Note that memory is at ``version`` now."""
        samples = self._samples
        if not samples or now_s - samples[-1][1] >= SAMPLE_EVERY_S:
            samples.append((version, now_s))

    def seconds_since(self, version: int, now_s: float) -> float:
        samples = self._samples
        if not samples:
            return 0.0
        index = bisect_right(samples, version, key=lambda sample: sample[0]) - 1
        return max(0.0, now_s - samples[max(index, 0)][1])


class CacheFlush:
    """A flush of the prefix cache that waits until it is safe; ``due``: requested and not complete.

    A step in flight may read the pages that a flush evicts, so a flush waits for its settling. A sequence
    that has ended gives its pages to the cache in the next plan. A flush that finds closing sequences
    therefore runs once more after that plan.
    """

    def __init__(self, memory: Memory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self.due = False
        self.clears_store = False
        """Whether the next flush forgets stored prefixes too."""

    def run(self, *, in_flight: bool) -> None:
        """Flush now, or as soon as nothing is in flight."""
        if in_flight:
            self.due = True
            return
        self._memory.flush()
        self.due = self._scheduler.has_closing
        if self.clears_store and self._scheduler.store is not None:
            self._scheduler.store.clear()
        self.clears_store = self.clears_store and self.due


@dataclass(slots=True)
class StepParts:
    """The parts that a loop works with. ``clock`` returns seconds and never goes back. ``executor`` and ``clock`` may
    be replaced before the first step."""

    scheduler: Scheduler
    executor: Executor
    settlement: Settlement
    flush: CacheFlush
    counters: EngineCounters
    ages: Ages
    clock: Callable[[], float]
    transfers: deque[StepPlan] = field(default_factory=deque)
    """Plans that are computed while their loads and stores may be under way, in order."""

    def note_commit(self, plan: StepPlan, now_s: float) -> None:
        """Note ages of the cache and queue times for ``plan``, committed at ``now_s``."""
        self.ages.note(self.scheduler.memory.version, now_s)
        self.settlement.note_admissions(plan, now_s)

    @property
    def may_have_no_plan(self) -> bool:
        """Whether the scheduler may have work and no plan."""
        return self.scheduler.may_stop_plans

    def note_finish(self, plan: StepPlan) -> None:
        """Note that ``plan`` is computed."""
        if self.scheduler.store is not None:
            self.transfers.append(plan)
            self.note_transfers()

    def note_transfers(self) -> None:
        """Tell the store of transfers that have arrived. Waits for nothing."""
        store = self.scheduler.store
        while store is not None and self.transfers and self.executor.transfers_done(self.transfers[0].step):
            store.finished(self.transfers.popleft())

    def settle(self, plan: StepPlan, result: StepResult, began_s: float, *, in_flight: bool) -> None:
        """Settle ``plan``, over which the scheduler has advanced. Its seconds count from ``began_s``. ``in_flight``:
        whether the next step is."""
        self.note_finish(plan)
        if self.flush.due:
            self.flush.run(in_flight=in_flight)
        self.settlement.settle(plan, result)
        self.counters.step(plan, self.clock() - began_s)


class PlainLoop:
    """The loop in which each verb waits for the one before it."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    @property
    def in_flight(self) -> tuple[SeqId, ...] | None:
        """Sequences that have advanced over the step in flight between two calls of ``step``; None when no step is."""
        return None

    def step(self) -> bool:
        """Run one round of the four verbs. The scheduler has work, or a step is in flight. Return False where every
        request waits for the store, and nothing was done."""
        parts = self._parts
        began_s = parts.clock()
        plan = parts.scheduler.plan()
        if plan is None:
            assert parts.may_have_no_plan, "with nothing in flight, a scheduler with work has a plan"
            return False

        parts.scheduler.commit(plan)
        parts.note_commit(plan, began_s)

        result = parts.executor.execute(plan)
        parts.scheduler.advance(plan, result.tokens, result.verified)
        parts.settle(plan, result, began_s, in_flight=False)
        return True

    def abandon(self) -> None:
        """Drop the step in flight, which is never settled as the engine ends. Between two steps none is."""
