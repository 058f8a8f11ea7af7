"""The overlapped loop: while the device computes a step, the host plans the next one.

    plain        host    plan 1 commit |           | settle plan 2 commit |           | settle
                 device                | execute 1 |                      | execute 2 |

    overlapped   host    plan 1 begin 1 . plan 2 begin 2 | settle 1 . plan 3 begin 3 | settle 2 . plan 4
                 device                 | execute 1      | execute 2                 | execute 3

    one call of step():    plan k+1, commit, begin  ->  finish k  ->  settle k      while k+1 is computed

``execute`` has two halves, ``Executor.begin`` and ``finish``. Steps are computed in the order in which they
began, and that order is the whole argument. The copies, patches, zeroing and reads of a plan come after all
writes of earlier plans, on the device as in memory. At most one step is in flight while another is
planned.

**The planner does not know** which tokens step k chooses. It knows that each decode chooses one, so the
scheduler advances over k when k begins. A decode of k+1 has the token PAD: "the token that your row chose
last". For rows with penalties or a grammar the executor has the tokens of k before k+1 chooses.

**An end that shows only when k settles** (an end token, a cancel, a broken grammar) wastes one run of k+1.
The token of that run is dropped. Plan k+2 closes the sequence, so its pages and slot are free from plan k+3
on. Step k+1 is settled before k+3 is planned: a step in flight never writes memory that was handed out
(decision 0001). The wasted run fed the last chosen token. So the cache indexes pages and state of the
sequence under exactly the tokens that they have seen (``Scheduler.learn_late``).

**Drafts** need the tokens before them. With a drafter, every few steps the one in flight settles before the next is
planned, and the drafter is asked. A step with drafts runs without overlap, as in the plain loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.loop import StepParts
from weft.schedule.plan import StepPlan
from weft.units import PAD, SeqId

_STEPS_AHEAD = 4
"""Steps that are planned ahead until the drafter is asked again, after it had no drafts."""


@dataclass(frozen=True, slots=True)
class _BegunStep:
    plan: StepPlan
    began_s: float


class OverlapLoop:
    """The loop that plans the next step while one is computed. A step's seconds count from its start, or from the
    settling of the step before it if that is later."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._begun: _BegunStep | None = None
        self._settled_s = 0.0
        self._steps_ahead = 0

    @property
    def in_flight(self) -> tuple[SeqId, ...] | None:
        return self._begun.plan.seqs if self._begun is not None else None

    def step(self) -> bool:
        """Plan, commit and begin the next step, then finish and settle the step in flight. The first call
        settles nothing, the last call begins nothing."""
        parts = self._parts
        previous, self._begun = self._begun, None
        draining = previous is not None and self._speculates_next()

        if previous is None or not (parts.flush.due or draining):
            began_s = parts.clock()
            plan = parts.scheduler.plan(verifies=previous is None)
            if plan is not None:
                parts.scheduler.commit(plan)
                parts.note_commit(plan, began_s)
                if plan.verify_count or plan.mtp_drafts:
                    # Positions after the draft depend on its tokens. A text that can be drafted goes on so.
                    self._steps_ahead = _STEPS_AHEAD
                    parts.run_alone(plan, began_s)
                    self._settled_s = parts.clock()
                    return True
                parts.executor.begin(plan)
                parts.scheduler.advance(plan, PAD)
                self._begun = _BegunStep(plan, began_s)
        if draining:
            self._steps_ahead = 0
        if previous is None:
            planned = self._begun is not None
            assert planned or parts.may_have_no_plan, "nothing was in flight, nothing could be planned"
            return planned

        result = parts.executor.finish()
        parts.note_finish(previous.plan)
        since_s, self._settled_s = max(previous.began_s, self._settled_s), parts.clock()
        if parts.flush.due:
            parts.flush.run(in_flight=self._begun is not None)

        parts.settlement.settle(previous.plan, result)
        parts.counters.step(previous.plan, parts.clock() - since_s)
        return True

    def _speculates_next(self) -> bool:
        """Return whether the step in flight is to settle first, so that the next one may verify drafts."""
        drafter = self._parts.scheduler.drafter
        if drafter is None or not drafter.awake:
            return False
        self._steps_ahead += 1
        return self._steps_ahead > _STEPS_AHEAD

    def abandon(self) -> None:
        self._begun = None
