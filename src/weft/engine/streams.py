"""What the engine remembers of one sequence for its client: the link from tokens to events.

A stream lives from ``submit`` to the last event. What an event says once (queue time, what the cache lost,
the prompt's logprobs) is taken out of the stream by the event that says it. Owned by ``EngineCore`` alone.
"""

from __future__ import annotations

from weft.engine.stopping import StopRule
from weft.memory.values import Lost
from weft.request import FinishReason, LostTokens, TokenEvent, TokenLogprobs
from weft.schedule.sequence import Sequence

_NOTHING_LOST = LostTokens()


class Stream:
    """One sequence and where its tokens go."""

    __slots__ = ("accepted_s", "cached_tokens", "generated", "index", "lost", "made_max", "plain",
                 "prompt_logprobs", "queued_s", "request_id", "rule", "seq", "started", "stop_ids",
                 "wants_logprobs")

    def __init__(self, request_id: str, index: int, seq: Sequence, rule: StopRule, accepted_s: float) -> None:
        self.request_id = request_id
        self.index = index
        self.seq = seq
        self.rule = rule
        # What a step looks at for each token, without going through other objects.
        self.stop_ids, self.made_max, self.generated = rule.ids, rule.made_max, seq.generated
        self.plain = False
        """Its next event brings tokens and nothing that is said once."""
        self.accepted_s = accepted_s
        self.wants_logprobs = seq.sampling.logprobs is not None
        self.started = False
        self.cached_tokens = 0
        # What the next event has to bring besides tokens; None once it was sent.
        self.queued_s: float | None = None
        self.lost: LostTokens | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if seq.prompt_logprobs_due else None

    def event(self, tokens: list[int], *, logprobs: TokenLogprobs | None = None,
              finish_reason: FinishReason | None = None, error: str | None = None,
              own_fault: bool = False) -> TokenEvent:
        stop_reason = self.rule.stop_reason(tokens[-1]) if finish_reason == "stop" else None
        self.plain = not self.wants_logprobs and self.prompt_logprobs is None
        queued_s, self.queued_s = self.queued_s, None
        lost, self.lost = self.lost, None
        prompt_logprobs = None
        if self.prompt_logprobs is not None and not self.seq.prompt_logprobs_due:
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return TokenEvent(
            request_id=self.request_id, index=self.index, tokens=tokens,
            logprobs=None if logprobs is None else [logprobs], prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason, stop_reason=stop_reason, error=error, own_fault=own_fault,
            cached_tokens=self.cached_tokens, preemptions=self.seq.preemption_count, queued_s=queued_s,
            lost=lost, recomputed_tokens=self.seq.recomputed_tokens)


    def plain_event(self, token: int) -> TokenEvent:
        """``event`` of a stream that is ``plain`` and goes on."""
        seq = self.seq
        return TokenEvent(request_id=self.request_id, index=self.index, tokens=[token],
                          cached_tokens=self.cached_tokens, preemptions=seq.preemption_count,
                          recomputed_tokens=seq.recomputed_tokens)


def told(lost: Lost) -> LostTokens | None:
    """What a client learns of ``lost``: nothing about the prompts of other salts (law L10)."""
    words = LostTokens(no_checkpoint=lost.no_checkpoint, evicted_state=lost.evicted_state,
                       evicted_kv=lost.evicted_kv, not_ready=lost.not_ready)
    return words if words != _NOTHING_LOST else None
