"""What steps cost on this engine, measured while it serves: the currency in which a router compares replicas.

    each step with a prefill, and one in 16 of the others  -->  a fading least-squares fit  -->  WorkCosts

Measurements fade: after FADE_STEPS of them an old one counts a third. So an engine whose device became slow,
or whose cores other processes use, reports higher costs within some 200 steps. It gets fewer requests.

Until STEPS_MIN steps with a prefill were measured there is no report, and the router guesses. A step that
verifies drafts is left out: its extra tokens are cheaper than those of a prompt.

Rejected: the fit of the cache policy (``weft.memory.prefix.value.cost_fit``): it forgets over 16,384 steps,
and knows only the ratio of its terms. Rejected: seconds of the last step (a step of decodes says nothing
about prompts).
"""

from __future__ import annotations

from weft.memory.prefix.value.step_fit import StepFit
from weft.schedule.plan import StepPlan
from weft.schedule.work import work_of
from weft.work_costs import WorkCosts

STEPS_MIN = 8
FADE_STEPS = 64
_FIT_EVERY = 8
_DECODE_STEPS_EACH = 16


class MeasuredCosts:
    def __init__(self) -> None:
        self._fit = StepFit(1 - 1 / FADE_STEPS)
        self._prefill_steps = 0
        self._unfitted = 0
        self._costs: WorkCosts | None = None

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` took ``seconds``."""
        if seconds <= 0 or plan.window_count or (plan.step % _DECODE_STEPS_EACH and not plan.prefills):
            return
        work = work_of(plan)
        self._fit.add(*work, seconds)
        self._prefill_steps += work.prefill_tokens > 0
        self._unfitted += 1

    def costs(self) -> WorkCosts | None:
        """None until enough was measured."""
        if self._prefill_steps >= STEPS_MIN and (self._costs is None or self._unfitted >= _FIT_EVERY):
            fixed_s, token_s, pair_s, decode_s, context_s = self._fit.terms()
            self._costs = WorkCosts(fixed_s=fixed_s, token_s=token_s, pair_s=pair_s, decode_s=decode_s,
                                    context_s=context_s, steps=self._prefill_steps)
            self._unfitted = 0
        return self._costs
