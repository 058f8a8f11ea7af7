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

**Drafts** need the tokens before them, and a step with drafts decides how far its sequences come
(``StepPlan.decides_next``). Such a step settles before the next one is planned:

    with drafts  host    settle k . plan k+1 begin k+1 | events of k, commands ..... | settle k+1 . plan k+2
                 device                                | verify k+1, replay | drafts |

Its launch waits for nothing, and the events of the step before are sent while it is computed. The drafts of the model's
own head are launched before the tokens are settled. After steps without drafts, every few of them the one in flight
settles first, and the drafter is asked.
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
        if self._begun is None:
            return None
        return () if self._begun.plan.decides_next else self._begun.plan.seqs

    def step(self) -> bool:
        """Plan, commit and begin the next step, and finish and settle the step in flight: first if the plan depends on
        its tokens, else last. The first call settles nothing, the last call begins nothing."""
        previous, self._begun = self._begun, None
        alone = previous is None or self._settles_first(previous.plan)
        if previous is not None and alone:
            self._settle(previous)
        self._begin_next(alone=alone)
        if previous is None:
            planned = self._begun is not None
            assert planned or self._parts.may_have_no_plan, "nothing was in flight, nothing could be planned"
            return planned
        if not alone:
            self._settle(previous)
        return True

    def _settles_first(self, plan: StepPlan) -> bool:
        """Return whether ``plan``, which is in flight, settles before the next one is planned: that depends on its
        tokens, or may verify drafts, or comes after a flush."""
        drafter = self._parts.scheduler.drafter
        if plan.decides_next:
            self._steps_ahead = _STEPS_AHEAD  # a text that can be drafted goes on so
            return True
        if drafter is not None and drafter.awake:
            self._steps_ahead += 1
            if self._steps_ahead > _STEPS_AHEAD:
                self._steps_ahead = 0
                return True
        return self._parts.flush.due

    def _begin_next(self, *, alone: bool) -> None:
        """Plan, commit and begin the next step. ``alone``: no step is in flight."""
        parts = self._parts
        began_s = parts.clock()
        plan = parts.scheduler.plan(verifies=alone)
        if plan is None:
            return
        parts.scheduler.commit(plan)
        parts.note_commit(plan, began_s)
        parts.executor.begin(plan)
        if not plan.decides_next:
            parts.scheduler.advance(plan, PAD)
        self._begun = _BegunStep(plan, began_s)

    def _settle(self, begun: _BegunStep) -> None:
        parts, plan = self._parts, begun.plan
        result = parts.executor.finish()
        since_s, self._settled_s = max(begun.began_s, self._settled_s), parts.clock()
        if plan.decides_next:
            parts.scheduler.advance(plan, result.tokens, result.verified)
        parts.settle(plan, result, since_s, in_flight=self._begun is not None)

    def abandon(self) -> None:
        self._begun = None
