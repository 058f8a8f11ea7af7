"""Live sequences as their clients see them: the link from tokens to events.

    request_id --> index --> Stream --> Sequence        from submit to the last event
                                |
                                '--> outbox: events that the next step() hands out

A stream lives from ``submit`` to its last event. Some values are sent once: the queue time, the tokens that the cache
lost, the logprobs of the prompt. The event that carries such a value removes it from the stream.

``StreamTable.end`` is the one place where a sequence ends: last event, scheduler, both tables, counter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from weft.engine.draft_feed import DraftFeed
from weft.engine.pictures import PictureQueue
from weft.engine.stats import EngineCounters
from weft.engine.submission import StopRule
from weft.memory.values import Lost
from weft.request import FinishReason, LostTokens, TokenEvent, TokenLogprobs
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import Sequence
from weft.units import SeqId

_NOTHING_LOST = LostTokens()


class Stream:
    """One sequence and the events that its client gets."""

    __slots__ = (
        "accepted_s",
        "cached_tokens",
        "generated",
        "index",
        "lost",
        "new_tokens_max",
        "plain",
        "pooled",
        "prompt_logprobs",
        "queued_s",
        "request_id",
        "rule",
        "seq",
        "started",
        "stop_ids",
        "wants_logprobs",
    )

    def __init__(self, request_id: str, index: int, seq: Sequence, rule: StopRule, accepted_s: float) -> None:
        self.request_id = request_id
        self.index = index
        self.seq = seq
        self.rule = rule
        # The columns of decodes have these values.
        self.stop_ids, self.new_tokens_max, self.generated = rule.ids, rule.new_tokens_max, seq.generated
        self.plain = False
        """Whether the next event brings only tokens, and no value that is sent once."""
        self.accepted_s = accepted_s
        self.wants_logprobs = seq.sampling.logprobs is not None
        self.started = False
        self.cached_tokens = 0
        # Values for the next event, in addition to its tokens; None once an event has carried them.
        self.queued_s: float | None = None
        self.lost: LostTokens | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if seq.prompt_logprobs_due else None
        self.pooled: npt.NDArray[np.float64] | None = None
        """Running sum of the rows that ``pooling`` needs, or these rows."""

    def start(self, now_s: float, cached_tokens: int, lost: Lost) -> None:
        """Note the first admission of the sequence."""
        self.started, self.plain = True, False
        self.lost = lost_tokens(lost)
        self.queued_s = now_s - self.accepted_s
        self.cached_tokens = cached_tokens

    def restart_prompt(self) -> None:
        """Begin the prompt again after a preemption if it was incomplete: it is computed again from the start."""
        self.pooled = None
        if self.seq.prompt_logprobs_due:
            self.prompt_logprobs = [None]
            self.plain = False

    def add_pooled(self, parts: npt.NDArray[np.float64]) -> None:
        """Add rows one by one, in the order of positions: the sum is the same however the prompt was cut. Rows of
        tokens are appended."""
        assert self.seq.pooling is not None
        if self.seq.pooling.kind == "token":
            self.pooled = parts if self.pooled is None else np.concatenate((self.pooled, parts))
            return
        for part in parts:
            self.pooled = part if self.pooled is None else self.pooled + part

    @property
    def _pooled_value(self) -> bytes | None:
        if self.pooled is None:
            return None
        pooling = self.seq.pooling
        assert pooling is not None
        count = self.seq.prompt.size - pooling.skip if pooling.kind == "mean" else 1
        return (self.pooled / count).astype("<f4").tobytes()

    def event(
        self,
        tokens: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        own_fault: bool = False,
    ) -> TokenEvent:
        stop_reason = self.rule.stop_reason(tokens[-1]) if finish_reason == "stop" else None
        self.plain = not self.wants_logprobs and self.prompt_logprobs is None
        queued_s, self.queued_s = self.queued_s, None
        lost, self.lost = self.lost, None
        prompt_logprobs = None
        if self.prompt_logprobs is not None and not self.seq.prompt_logprobs_due:
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return TokenEvent(
            request_id=self.request_id,
            index=self.index,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            own_fault=own_fault,
            cached_tokens=self.cached_tokens,
            preemptions=self.seq.preemption_count,
            queued_s=queued_s,
            lost=lost,
            recomputed_tokens=self.seq.recomputed_tokens,
            accepted_drafts=self.seq.accepted_drafts,
            rejected_drafts=self.seq.rejected_drafts,
            pooled=self._pooled_value if finish_reason == "length" else None,
        )


class StreamTable:
    """Live streams, by sequence and by request. ``outbox``: events for the next ``step``. The end of each sequence is
    reported to ``pictures`` and to ``feed``, if there is one."""

    def __init__(
        self, scheduler: Scheduler, counters: EngineCounters, pictures: PictureQueue, feed: DraftFeed | None = None
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._pictures = pictures
        self._feed = feed
        self.by_seq: dict[SeqId, Stream] = {}
        self.by_request: dict[str, dict[int, SeqId]] = {}
        self.outbox: list[TokenEvent] = []
        self.ended_count = 0

    def add(self, stream: Stream) -> None:
        self.by_seq[stream.seq.id] = stream
        self.by_request.setdefault(stream.request_id, {})[stream.index] = stream.seq.id

    def of_request(self, request_id: str, index: int | None = None) -> list[Stream]:
        """Return live streams of a request, or the one at ``index``; empty when there are none."""
        live = self.by_request.get(request_id, {})
        if index is not None:
            return [self.by_seq[live[index]]] if index in live else []
        return [self.by_seq[seq] for seq in live.values()]

    def end(
        self,
        stream: Stream,
        tokens: list[int],
        reason: FinishReason,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        own_fault: bool = False,
    ) -> None:
        """End the sequence with this event; the scheduler closes it with the next plan."""
        self._scheduler.finish(stream.seq)
        self._forget(stream)
        self._counters.finished[reason] += 1
        self.outbox.append(
            stream.event(tokens, logprobs=logprobs, finish_reason=reason, error=error, own_fault=own_fault)
        )

    def cancel(self, streams: Iterable[Stream], why: str | None = None) -> None:
        for stream in streams:
            self.end(stream, [], "cancelled", error=why)

    def fail_all(self, message: str) -> None:
        """End every stream with "error", as the engine has failed. The scheduler may be half way through a step and is
        not called."""
        for stream in list(self.by_seq.values()):
            self._forget(stream)
            self._counters.finished["error"] += 1
            self.outbox.append(stream.event([], finish_reason="error", error=message))

    def drain(self) -> list[TokenEvent]:
        """Return the events of the outbox, which is empty afterwards."""
        events, self.outbox = self.outbox, []
        return events

    def audit(self) -> None:
        """Compare the tables with each other and with the scheduler (law L1)."""
        live = {seq for ids in self.by_request.values() for seq in ids.values()}
        assert live == set(self.by_seq), "requests and streams differ"
        scheduled = {seq.id for seq in (*self._scheduler.running, *self._scheduler.waiting)}
        assert live <= scheduled, f"sequences without a place in the scheduler: {live - scheduled}"
        assert live >= scheduled, f"sequences without a stream: {scheduled - live}"

    def _forget(self, stream: Stream) -> None:
        del self.by_seq[stream.seq.id]
        self.ended_count += 1
        self._pictures.ended(stream.seq)
        if self._feed is not None:
            self._feed.ended(stream.seq.id)
        live = self.by_request[stream.request_id]
        del live[stream.index]
        if not live:
            del self.by_request[stream.request_id]


def lost_tokens(lost: Lost) -> LostTokens | None:
    """Return the part of ``lost`` that a client may see: nothing about the prompts of other salts (law L10)."""
    tokens = LostTokens(
        no_checkpoint=lost.no_checkpoint,
        evicted_state=lost.evicted_state,
        evicted_kv=lost.evicted_kv,
        not_ready=lost.not_ready,
        stored=lost.stored,
        damaged=lost.damaged,
        store_busy=lost.store_busy,
    )
    return tokens if tokens != _NOTHING_LOST else None
