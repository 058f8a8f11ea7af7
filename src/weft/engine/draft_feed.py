"""What the drafter hears of sequences: their first token, every token after it, and their end.

    settle   --first token-->  begin(prompt and answer so far)      from now on the planner asks for drafts
             --tokens------->  settle(tokens, drafted, accepted)
             --head's guess-->  offer
    step     --seconds------->  observe, after the settles of a step without prefills
    end      ---------------->  end

A sequence that was preempted stays begun: its tokens are the same when it comes back. Tokens are reported
before the end that they cause, so a source across sequences learns whole answers.
"""

from __future__ import annotations

from weft.schedule.plan import HeadDraft, StepPlan
from weft.schedule.sequence import Sequence
from weft.speculation.drafter import Drafter
from weft.units import SeqId


class DraftFeed:
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._begun: set[SeqId] = set()
        self.head_s = 0.0
        """Seconds of the last step that the model's own head took."""

    def settled(self, seq: Sequence, tokens: list[int], *, drafted: int = 0,
                head: HeadDraft | None = None) -> None:
        """A step chose ``tokens`` for ``seq``, which has them now. ``drafted`` drafts were verified.
        ``head``: what the model's own head expects next."""
        self._settled(seq, tokens, drafted)
        if head is not None:
            self._drafter.offer(seq.id, head.tokens, head.chances)

    def _settled(self, seq: Sequence, tokens: list[int], drafted: int) -> None:
        if seq.id in self._begun:
            accepted = len(tokens) - 1 if drafted else 0
            seq.accepted_drafts += accepted
            seq.rejected_drafts += drafted - accepted
            self._drafter.settle(seq.id, tokens, drafted=drafted, accepted=accepted)
            return
        self._begun.add(seq.id)
        self._drafter.begin(seq.id, seq.known().tolist(), prompt_length=int(seq.prompt.size),
                            salt=seq.salt or None, prediction=seq.prediction, grammar=seq.grammar)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` was settled. A step with a prefill says nothing about the cost of drafts."""
        if plan.run_count and not plan.prefills:
            self._drafter.observe(plan.run_count, plan.token_count - plan.run_count, seconds - self.head_s)
            if plan.mtp_drafts:
                self._drafter.observe_head(plan.run_count, plan.mtp_drafts, self.head_s)

    def ended(self, seq: SeqId) -> None:
        if seq in self._begun:
            self._begun.remove(seq)
            self._drafter.end(seq)
