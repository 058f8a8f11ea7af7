"""The second loop over the four verbs: while the device computes a step, the host plans the next one.

    plain        host    plan 1 commit |           | settle plan 2 commit |           | settle
                 device                | execute 1 |                      | execute 2 |

    overlapped   host    plan 1 begin 1 . plan 2 begin 2 | settle 1 . plan 3 begin 3 | settle 2 . plan 4
                 device                 | execute 1      | execute 2                 | execute 3

    one call of step():    plan k+1, commit, begin  ->  finish k  ->  settle k      while k+1 is computed

``execute`` is cut in two (``Executor.begin``, ``finish``). Steps are computed in the order in which they were
begun, and that order is the whole argument: a plan's copies, patches, zeroing and reads come after everything
that earlier plans write, on the device as in the books. At most one step is in flight while another is
planned.

**What the planner does not know** is the tokens that step k chooses; it knows that they will be chosen. So it
advances over k when k begins. A decode of k+1 has PAD for its token, which means "the one that your row chose
last"; its position, pages and slot are known without it. An answer whose length ends it is never overrun:
``RowTable.limit`` is data for the planner. Rows whose next choice hangs on the last one (penalties, grammars)
are no special case: their history lives with the executor, which has the tokens of k home before k+1 chooses
for such a row. For all others it launches k+1 without them.

**What turns out at settling k** to have ended (an end token, a cancel, a broken grammar) has one run in k+1
for nothing. That run's token is dropped. Plan k+2 closes the sequence: its pages and its slot are free from
plan k+3 on, and k+1 is home before that is made, so that nothing is handed out while a step in flight may
write it (decision 0001: what a draft closes is free from the next draft on). What it leaves to the prefix
cache is kept under exactly the tokens that its state has seen, which are all known then: the wasted run has
fed the last one that was chosen (``Scheduler.learn_late``).

``hold``: something waits for a moment without a step in flight (a flush of the cache: what it evicts may be
read by one). Then the loop plans nothing until there is one.

Rejected: two steps in flight (an answer overruns by two, and nothing is left to hide); guessing no decode at
all and planning prefills only (the decode is what there is to gain); settling before planning (that is the
plain loop); memory that is freed at settling (it is handed out to k+2 while k+1 writes it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.engine.executor import Executor
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.units import PAD, SeqId


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    began_s: float


class Overlap:
    """``start(now)`` plans and commits, None where nothing can be done yet; ``land(plan, result, since_s)``
    settles and counts, its seconds from ``since_s`` on: from when the step began, or the one before it was
    home, whichever is later."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float], *,
                 start: Callable[[float], StepPlan | None],
                 land: Callable[[StepPlan, StepResult, float], None], hold: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._start = start
        self._land = land
        self._hold = hold
        self._flight: _Flight | None = None
        self._landed_s = 0.0

    @property
    def flying(self) -> bool:
        """Whether a step has begun and is not home."""
        return self._flight is not None

    @property
    def in_flight(self) -> tuple[SeqId, ...]:
        """Sequences with a run in it."""
        return self._flight.plan.seqs if self._flight is not None else ()

    def step(self) -> None:
        """Begin the next step, then bring home the one in flight. The first call brings nothing home, the
        last one begins nothing."""
        landing, self._flight = self._flight, None
        if landing is None or not self._hold():
            self._flight = self._begin()
        if landing is None:
            assert self._flight is not None, "nothing was in flight and nothing could be planned"
            return
        result = self._executor.finish()
        since_s, self._landed_s = max(landing.began_s, self._landed_s), self._clock()
        self._land(landing.plan, result, since_s)

    def _begin(self) -> _Flight | None:
        began_s = self._clock()
        plan = self._start(began_s)
        if plan is None:
            return None
        self._executor.begin(plan)
        self._scheduler.advance(plan, PAD)
        return _Flight(plan, began_s)

    def forget(self) -> None:
        """The engine ends: what is in flight is nobody's any more."""
        self._flight = None
