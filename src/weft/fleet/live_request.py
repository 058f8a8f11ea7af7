"""One request from arrival to last event: the tokens of its answers, and deaths of engines that it may cause.

    event --take--> the event as the client gets it --> RequestStream --events, rest--> its handler
    resumable()     the request with the tokens so far     -> the next engine
    lost()          its engine ended                       -> a strike, or none

A token is a function of logits, seed and position, so an engine that gets ``resumable()`` generates the same tokens as
the first one would have. A client notices a resume only as a pause.

**Strikes.** A request may crash its engines. A death is a strike against each request without a token from that engine;
a token clears the strikes. A request with a strike resumes on an engine without other requests, so a second strike
identifies the request, and STRIKES_MAX strikes end it. An engine reports which requests it is about to compute: a death
before that report counts half.

**Handoffs.** An engine may compute only the prompt: it generates one token, and sends the records to another engine.
The end of the answer after that token is hidden from the client; the request then moves on, as after a death.

**Slow clients.** An engine never waits for a client (law L11), so tokens for a slow client wait in its
``RequestStream``. A stream counts the bytes of waiting events while there are more than EVENTS_MAX; if all streams of a
process exceed a limit, the largest ends with an error. A client that keeps up is never counted. Complete answers have
another bound, which is checked before the request starts (``limits.max_answer_logprobs``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weft.errors import DeadlyRequestError, SlowClientError, WeftError
from weft.handoff import Handoff
from weft.request import Request, Resumption, TokenEvent
from weft.router.protocol import RoutedRequest

STRIKES_MAX = 2.0
HALF_STRIKE = 0.5
EVENTS_MAX = 64
"""Most events that ``events`` returns at once: bounds the bytes of one piece of an answer."""
_EVENT_BYTES, _TOKEN_BYTES, _LOGPROBS_BYTES, _ALTERNATIVE_BYTES = 250, 40, 150, 120
"""Bytes of a decoded event and its parts in CPython, rounded up."""


@dataclass(slots=True)
class AnswerSoFar:
    """One answer that has not ended. ``first``: the first event, whose facts the client has. The counts are from
    engines that have ended; ``last`` has the counts of the present engine."""

    tokens: list[int] = field(default_factory=list)
    first: TokenEvent | None = None
    last: TokenEvent | None = None
    recomputed_tokens: int = 0
    preemptions: int = 0

    def corrected(self, event: TokenEvent) -> TokenEvent:
        """Return ``event`` of an engine that resumed the answer, with the counts that the first engine would have
        reported."""
        first = self.first
        facts = {} if first is None else {"cached_tokens": first.cached_tokens, "queued_s": None, "lost": None}
        return msgspec.structs.replace(
            event,
            recomputed_tokens=self.recomputed_tokens + event.recomputed_tokens,
            preemptions=self.preemptions + event.preemptions,
            **facts,
        )

    def engine_ended(self) -> None:
        if self.last is not None:
            self.recomputed_tokens += self.last.recomputed_tokens
            self.preemptions += self.last.preemptions
            self.last = None


class LiveRequest:
    """A request of a fleet. ``number``: the order of arrival. ``replica``: the replica that computes it; None while it
    is held."""

    def __init__(self, request: Request, number: int) -> None:
        assert request.sampling.seed is not None, "without its seed, a request cannot be resumed"
        self.request = request
        self.number = number
        self.replica: int | None = None
        self.accepted = False
        """Whether an engine has accepted it. An accepted request is never refused for a full queue."""
        self.full_replicas: set[int] = set()
        """Replicas that refused the request for a full queue, before an engine accepted it."""
        self.begun = False
        """Whether the present engine has reported that it is about to compute the request."""
        self.strikes = 0.0
        self.resumes = 0
        self._answers = {index: AnswerSoFar() for index in range(request.sampling.n)}
        self.load = 0, 0
        """Sequences and tokens (prompts and answers) that the request brought to its replica."""
        self._deaths = 0
        """Deaths of its engines since its last token."""
        self._has_moved = False
        self.admitted = False
        """Whether the first event from this replica has come."""
        self._fleet_boundaries: tuple[int, ...] = ()
        self.handoff: Handoff | None = None
        """Set while the engine computes only the prompt."""
        self.decode: int | None = None
        """The replica that continues after the handoff."""
        self.handoff_end: str | None = None
        """Error of the transfer of the records; empty for success, None while it is under way."""
        self._handed: set[int] = set()
        """Answers whose first token has come from the engine that computes the prompt."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def open_count(self) -> int:
        """Number of answers that have not ended."""
        return len(self._answers)

    @property
    def suspect(self) -> bool:
        """Whether the request has strikes, and no token from its present engine."""
        return bool(self.strikes) and not self._has_moved

    @property
    def may_split(self) -> bool:
        """Whether one engine may compute the prompt and another the answer."""
        request = self.request
        return (
            request.pooling is None
            and request.sampling.max_tokens not in (0, 1)
            and not self.strikes
            and not any(answer.tokens for answer in self._answers.values())
        )

    @property
    def is_handed(self) -> bool:
        """Whether the prompt is computed, every answer has a token, and the transfer of the records has ended."""
        return self.handoff is not None and self.handoff_end is not None and self._handed >= set(self._answers)

    # ------------------------------------------------------------------ events

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """Return the event for the client. None for the end of an answer whose engine fails: another engine will resume
        it."""
        if event.finish_reason == "error" and not event.own_fault:
            return None
        self.accepted = True
        answer = self._answers.get(event.index)
        if answer is None:  # cancelled; the last event is on its way
            return event
        if self.handoff is not None and event.finish_reason == "length":
            self._handed.add(event.index)
            event = msgspec.structs.replace(event, finish_reason=None)
        if event.finish_reason is not None:
            del self._answers[event.index]
        if event.tokens or event.finish_reason is not None:
            self._has_moved, self.strikes, self._deaths = True, 0.0, 0
            answer.tokens += event.tokens
        answer.last = event
        if self.resumes:
            event = answer.corrected(event)
        if answer.first is None:
            answer.first = event
        return event

    def cancel(self, index: int | None) -> None:
        """Note that the client wants no more of an answer, or of all (None)."""
        if index is None:
            self._answers.clear()
        else:
            self._answers.pop(index, None)

    # ------------------------------------------------------------------ places

    def routed(self) -> RoutedRequest:
        """Return the request as a router sees it. The longest answer represents all of n."""
        request = self.request
        longest = max((answer.tokens for answer in self._answers.values()), key=len, default=[])
        keys = request.prompt_tokens
        if request.pictures:
            from weft.pictures import request_keys  # imports numpy, which text does not need

            keys = request_keys(request)
        tokens = [*keys, *longest] if longest else keys
        return RoutedRequest(
            self.id,
            tokens,
            request.salt,
            self.open_count,
            request.sampling.max_tokens,
            request.boundaries,
            self.may_split,
        )

    def resumable(self) -> Request:
        """Return the request for the next engine."""
        request = self.request
        if self.handoff is not None:
            sampling = request.sampling
            sampling = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1))
            request = msgspec.structs.replace(request, sampling=sampling, handoff=self.handoff)
        if self._fleet_boundaries:
            boundaries = list(dict.fromkeys((*request.boundaries, *self._fleet_boundaries)))
            request = msgspec.structs.replace(request, boundaries=boundaries)
        if not self.resumes:
            return request
        answers = {index: list(answer.tokens) for index, answer in self._answers.items()}
        return msgspec.structs.replace(request, resumption=Resumption(answers=answers))

    def placed(
        self, replica: int, boundaries: tuple[int, ...] = (), handoff: Handoff | None = None, decode: int | None = None
    ) -> None:
        """Note the replica that computes the request. ``boundaries``: positions where the prompt diverges from other
        prompts, from the router's table. With ``handoff`` this replica computes only the prompt, and ``decode``
        continues."""
        self.replica, self._fleet_boundaries = replica, boundaries
        self.handoff, self.decode, self.handoff_end = handoff, decode, None
        self._handed.clear()
        self.load = (
            self.open_count,
            sum(len(self.request.prompt_tokens) + len(answer.tokens) for answer in self._answers.values()),
        )
        self._has_moved = self.admitted = self.begun = False

    def moved(self) -> None:
        """Note that the prompt is computed, and that the request leaves for another replica."""
        for answer in self._answers.values():
            answer.engine_ended()
        self.resumes += 1

    def lost(self, *, blamed: bool = True) -> None:
        """Note the end of the engine. ``blamed``: whether the engine died; false if the operator ended it. Raise
        DeadlyRequestError at the last strike."""
        self.full_replicas.clear()
        for answer in self._answers.values():
            answer.engine_ended()
        if blamed and not self._has_moved:
            self._deaths += 1
            self.strikes += 1.0 if self.begun else HALF_STRIKE
        if self.strikes >= STRIKES_MAX:
            raise DeadlyRequestError(
                f"{self._deaths} engines in a row died while they computed this request, before its next "
                "token; it is not tried again",
                code="request_killed_engines",
            )
        if self.accepted:
            self.resumes += 1


class EventSink(Protocol):
    """A receiver of the events of requests."""

    def put(self, event: TokenEvent) -> None: ...

    def deliver(self) -> None:
        """Pass on the events that were put: all events of a report have come."""

    def fail(self, request_id: str, error: WeftError) -> None:
        """End a request with ``error``: no further event comes."""


class RequestStream:
    """Events of one request, or of several that belong together, in order."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: WeftError | None = None
        self._news = asyncio.Event()
        self._listener: Callable[[], None] | None = None
        self._interval_tokens = 1
        self._awaited_tokens = 1
        """Number of tokens to come before the listener is called."""
        self._open_answers: int | None = None
        """Number of answers for which ``rest`` waits."""
        self._arrivals_s: list[float] = []
        self._unread: UnreadAnswers | None = None
        self._counted_events = 0
        self.unread_bytes = 0
        """Bytes of the first ``_counted_events`` of the events that wait."""
        self._on_overflow: Callable[[], None] = lambda: None

    def bound(self, unread: UnreadAnswers, on_overflow: Callable[[], None]) -> None:
        """Count waiting events in ``unread``. ``on_overflow`` is called if they end this stream."""
        self._unread, self._on_overflow = unread, on_overflow

    def listen(self, listener: Callable[[], None], interval_tokens: int) -> None:
        """Call ``listener``, without a task, after events or an error came: after the first event, after each
        ``interval_tokens`` tokens and after an end; once for a report."""
        self._listener, self._interval_tokens = listener, interval_tokens
        if self._events or self._error is not None:
            self._call_soon()

    def put(self, event: TokenEvent) -> None:
        if isinstance(self._error, SlowClientError):
            return
        self._events.append(event)
        if self._open_answers is None:
            self._awaited_tokens -= len(event.tokens)
            if event.finish_reason is not None:
                self._awaited_tokens = 0
            self._news.set()
            if self._unread is not None and len(self._events) - self._counted_events >= EVENTS_MAX:
                self._count(self._unread)
        else:
            self._arrivals_s.append(time.perf_counter())
            self._count_end(event)

    def deliver(self) -> None:
        """Call the listener, if enough has come since its last call."""
        if self._awaited_tokens <= 0 and self._listener is not None:
            self._awaited_tokens = self._interval_tokens
            self._listener()

    def fail(self, request_id: str, error: WeftError) -> None:
        self._error = error
        self._news.set()
        self._call_soon()

    def overflow(self, error: SlowClientError) -> None:
        """Drop waiting events, and fail with ``error``."""
        self._count_no_more()
        self._events.clear()
        self.fail("", error)
        self._on_overflow()

    def close(self) -> None:
        """Stop calling the listener and counting. Idempotent."""
        self._listener = None
        self._count_no_more()

    async def events(self) -> list[TokenEvent]:
        """Return the next events as ``next_events`` does; wait for at least one."""
        while not (events := self.next_events()):
            self._news.clear()
            await self._news.wait()
        return events

    def next_events(self) -> list[TokenEvent]:
        """Return the waiting events, at most EVENTS_MAX. Raise the error of failed requests after the events that came
        before it; raise SlowClientError at once."""
        if not self._events:
            if self._error is not None:
                raise self._error
            return []
        events, self._events = self._events[:EVENTS_MAX], self._events[EVENTS_MAX:]
        if self._counted_events and self._unread is not None:
            counted = events[: self._counted_events]
            self._counted_events -= len(counted)
            self._unread.change(self, -sum(map(_bytes_of, counted)))
        return events

    async def rest(self, answers: int) -> list[tuple[float, TokenEvent]]:
        """Return all further events up to the ends of ``answers`` answers, or up to a failed answer, each with the time
        of its arrival (``time.perf_counter``). The caller is woken once, not at each token. Raise the error of failed
        requests."""
        self._arrivals_s = [time.perf_counter()] * len(self._events)
        self._open_answers = answers
        self._news.clear()
        for event in self._events:
            self._count_end(event)
        if self._error is None:
            await self._news.wait()
        if self._error is not None and self._open_answers > 0:
            raise self._error
        return list(zip(self._arrivals_s, self._events, strict=True))

    def _call_soon(self) -> None:
        if self._listener is not None:
            self._awaited_tokens = 0
            asyncio.get_running_loop().call_soon(self.deliver)

    def _count_no_more(self) -> None:
        if self._unread is not None:
            self._unread.change(self, -self.unread_bytes)
        self._unread, self._counted_events = None, 0

    def _count(self, unread: UnreadAnswers) -> None:
        new = self._events[self._counted_events :]
        self._counted_events = len(self._events)
        unread.change(self, sum(map(_bytes_of, new)))

    def _count_end(self, event: TokenEvent) -> None:
        if event.finish_reason is None:
            return
        assert self._open_answers is not None
        self._open_answers -= 1
        if not self._open_answers or event.finish_reason in ("error", "cancelled"):
            self._news.set()


class UnreadAnswers:
    """Bytes in the streams of one process that wait for slow clients. ``limit_bytes`` bounds the sum; beyond it the
    largest stream ends."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self._streams: set[RequestStream] = set()

    def change(self, stream: RequestStream, more_bytes: int) -> None:
        """Add ``more_bytes`` to the bytes that ``stream`` holds."""
        stream.unread_bytes += more_bytes
        self.total_bytes += more_bytes
        if stream.unread_bytes:
            self._streams.add(stream)
        else:
            self._streams.discard(stream)
        while self.total_bytes > self.limit_bytes:
            largest = max(self._streams, key=lambda candidate: candidate.unread_bytes)
            largest.overflow(
                SlowClientError(
                    f"the client reads this answer too slowly: {largest.unread_bytes} bytes of it wait, and those of "
                    f"all answers exceed {self.limit_bytes} bytes (limits.max_unread_mb)",
                    param="limits.max_unread_mb",
                    code="client_too_slow",
                )
            )


def _bytes_of(event: TokenEvent) -> int:
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.tokens)
    for entries in (event.logprobs, event.prompt_logprobs):
        for entry in entries or ():
            if entry is not None:
                size += _LOGPROBS_BYTES + _ALTERNATIVE_BYTES * len(entry.top)
    return size
