"""Reports to the drafter: the first token of each sequence, every token after it, and its end.

    settle   --first token-->  begin(prompt and answer so far)      from now on the planner asks for drafts
             --tokens------->  settle(tokens, drafted, accepted)
             --head's guess-->  offer, after the settles of the step
    step     --seconds------->  observe, after the settles of the step
    end      ---------------->  end

A sequence that was preempted stays begun: its tokens are the same when it comes back. Tokens are reported
before the end that they cause, so a source across sequences learns whole answers.

A drafter that is asleep gets only ends, and steps in groups. The next ``settle`` brings the tokens that it missed.
"""

from __future__ import annotations

from weft.schedule.plan import HeadDrafts, StepPlan
from weft.schedule.sequence import Sequence
from weft.speculation.drafter import PLAIN_STEPS, Drafter
from weft.units import SeqId

_SLEPT_STEPS_MAX = 16
"""Most steps that are reported at once to a sleeping drafter."""


class DraftFeed:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._begun: dict[SeqId, int] = {}
        """Number of tokens of the answer that the drafter knows, by sequence."""
        self._head_s = 0.0
        """Seconds of the last step that the model's own head took."""
        self._slept_steps = 0
        """Steps during the drafter's sleep that are not reported yet."""
        self._slept_s = 0.0
        self._slept_decodes = 0
        """Sequences of the last step, if that step was one of those not reported yet."""
        self._slept_alike = 0
        """Steps in a row with the same number of decodes."""

    @property
    def awake(self) -> bool:
        return self._drafter.awake

    def admitted(self, seq: Sequence) -> None:
        if seq.prediction is not None and not self.awake:
            self._drafter.wake()

    def settled(self, seq: Sequence, tokens: list[int], *, drafted: int = 0) -> None:
        """Report the ``tokens`` that a step chose for ``seq``, which has them now. ``drafted`` drafts were verified."""
        known = self._begun.get(seq.id)
        if known is None:
            self._drafter.begin(
                seq.id,
                seq.keys(),
                prompt_length=int(seq.prompt.size),
                salt=seq.salt or None,
                prediction=seq.prediction,
                grammar=seq.grammar,
                adapter=seq.adapter,
            )
        else:
            accepted = len(tokens) - 1 if drafted else 0
            seq.accepted_drafts += accepted
            seq.rejected_drafts += drafted - accepted
            if known + len(tokens) < len(seq.generated):
                assert not drafted, f"sequence {seq.id} was drafted for without its text"
                tokens = seq.generated[known:]
            self._drafter.settle(seq.id, tokens, drafted=drafted, accepted=accepted)
        self._begun[seq.id] = len(seq.generated)

    def offer(self, plan: StepPlan, head: HeadDrafts) -> None:
        """Offer the drafts of the model's own head after ``plan``, all of whose tokens are reported."""
        self._head_s = head.seconds
        for run, draft in head.by_run.items() if self._drafter.awake else ():
            if plan.seqs[run] in self._begun:
                self._drafter.offer(plan.seqs[run], draft.tokens, draft.chances)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Report ``plan`` after it was settled."""
        if not plan.run_count:
            return
        if not self._drafter.awake and plan.decode_count == plan.run_count and plan.mtp_drafts is None:
            self._slept_steps += 1
            self._slept_s += seconds
            if plan.decode_count != self._slept_decodes:
                self._slept_decodes, self._slept_alike = plan.decode_count, 0
            self._slept_alike += 1
            if self._slept_steps >= _SLEPT_STEPS_MAX:
                self._report_sleep(seconds if self._slept_alike >= PLAIN_STEPS else None)
            return
        if self._slept_steps:
            self._report_sleep(None)
        self._slept_decodes = self._slept_alike = 0
        prefills = bool(plan.prefills)
        drafted = int(plan.lengths[plan.decode_count : plan.prefills.start].sum()) - plan.verify_count
        self._drafter.observe(plan.run_count, drafted, seconds - self._head_s, prefills=prefills)
        if plan.mtp_drafts is not None:
            self._drafter.observe_head(plan.run_count, plan.mtp_drafts, self._head_s, prefills=prefills)

    def _report_sleep(self, last_s: float | None) -> None:
        steps, slept_s, self._slept_steps, self._slept_s = self._slept_steps, self._slept_s, 0, 0.0
        if not self._drafter.awake:  # a prediction may have ended the sleep
            self._drafter.sleep_through(steps, slept_s, self._slept_decodes, last_s)

    def ended(self, seq: SeqId) -> None:
        if seq in self._begun:
            del self._begun[seq]
            self._drafter.end(seq)
