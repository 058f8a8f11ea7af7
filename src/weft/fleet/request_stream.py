"""The events of a request on their way to the handler that writes its answer.

    engine --put--> RequestStream --events--> pieces of a stream     (EVENTS_MAX at a time)
                         |        --rest----> a whole answer         (once, at its end)
                    UnreadAnswers: bytes of all streams that clients have not read

An engine never waits for a client (law L11), so the tokens of a client that reads slowly wait here. A stream counts
its bytes while more than EVENTS_MAX events wait; where all streams together exceed a limit, the one that holds the
most ends with an error. A client that keeps up is never counted. A whole answer has a bound of its own, which is
checked before its request starts (``limits.max_answer_logprobs``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from weft.errors import SlowClientError, WeftError
from weft.request import TokenEvent

EVENTS_MAX = 64
"""Events that ``events`` returns at once, which bounds the bytes that one piece of an answer brings to a connection."""
_EVENT_BYTES, _TOKEN_BYTES, _LOGPROBS_BYTES, _ALTERNATIVE_BYTES = 250, 40, 150, 120
"""Memory of a decoded event and its parts in CPython, rounded up."""


class EventSink(Protocol):
    """Where the events of requests go."""

    def put(self, event: TokenEvent) -> None: ...

    def fail(self, request_id: str, error: WeftError) -> None:
        """No further event comes."""


class RequestStream:
    """Events of one request, or of several that belong together, in order."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: WeftError | None = None
        self._news = asyncio.Event()
        self._open_answers: int | None = None
        """Answers that ``rest`` waits for."""
        self._arrivals_s: list[float] = []
        self._unread: UnreadAnswers | None = None
        self._counted_events = 0
        self.unread_bytes = 0
        """Memory of the first ``_counted_events`` of the events that wait."""
        self._on_overflow: Callable[[], None] = lambda: None

    def bound(self, unread: UnreadAnswers, on_overflow: Callable[[], None]) -> None:
        """Count what waits in ``unread``. ``on_overflow`` is called when this stream ends by it."""
        self._unread, self._on_overflow = unread, on_overflow

    def put(self, event: TokenEvent) -> None:
        if isinstance(self._error, SlowClientError):
            return
        self._events.append(event)
        if self._open_answers is None:
            self._news.set()
            if self._unread is not None and len(self._events) - self._counted_events >= EVENTS_MAX:
                self._count(self._unread)
        else:
            self._arrivals_s.append(time.perf_counter())
            self._count_end(event)

    def fail(self, request_id: str, error: WeftError) -> None:
        self._error = error
        self._news.set()

    def overflow(self, error: SlowClientError) -> None:
        """Drop what waits, and fail with ``error``."""
        self.close()
        self._events.clear()
        self._error = error
        self._news.set()
        self._on_overflow()

    def close(self) -> None:
        """Count no more. Idempotent."""
        if self._unread is not None:
            self._unread.change(self, -self.unread_bytes)
        self._unread, self._counted_events = None, 0

    async def events(self) -> list[TokenEvent]:
        """Return the next events, at most EVENTS_MAX; wait for at least one. Raises the error that the requests failed
        with, after the events that came before, and SlowClientError at once."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events, self._events = self._events[:EVENTS_MAX], self._events[EVENTS_MAX:]
        if self._counted_events and self._unread is not None:
            counted = events[: self._counted_events]
            self._counted_events -= len(counted)
            self._unread.change(self, -sum(map(_bytes_of, counted)))
        return events

    async def rest(self, answers: int) -> list[tuple[float, TokenEvent]]:
        """All further events up to the ends of so many answers, or up to one that failed, each with the time
        of its arrival (``time.perf_counter``): it wakes its caller once, and not at each token. Raises the
        error that the requests failed with."""
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
    """Bytes of the streams of one process that wait for clients which read slowly. ``limit_bytes`` holds for their
    sum; the stream that holds the most is the one that ends."""

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
            largest = max(self._streams, key=lambda one: one.unread_bytes)
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
