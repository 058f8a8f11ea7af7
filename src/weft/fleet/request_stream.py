"""The events of one HTTP request on their way to its client, whatever engines compute them.

    put(event), fail(error)   the fleet, as reports arrive
    await events()            the handler of a stream, as fast as its client reads
    await rest(answers)       the handler of a whole answer: once, at its end

A stream buffers at most the tokens of its answers (law L11). A slow client costs that memory, and never the
engine's time. A whole answer wakes its handler once and not at each token, so each event has the time of its
arrival.
"""

from __future__ import annotations

import asyncio
import time

from weft.errors import WeftError
from weft.request import TokenEvent


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

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        if self._open_answers is None:
            self._news.set()
        else:
            self._arrivals_s.append(time.perf_counter())
            self._count_end(event)

    def fail(self, error: WeftError) -> None:
        self._error = error
        self._news.set()

    async def events(self) -> list[TokenEvent]:
        """All events since the last call; waits for at least one. Raises the error that the requests failed
        with, after the events that came before."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events, self._events = self._events, []
        return events

    async def rest(self, answers: int) -> list[tuple[float, TokenEvent]]:
        """All further events up to the ends of so many answers, or up to one that failed, each with the time
        of its arrival (``time.perf_counter``). Raises the error that the requests failed with."""
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

    def _count_end(self, event: TokenEvent) -> None:
        if event.finish_reason is None:
            return
        assert self._open_answers is not None
        self._open_answers -= 1
        if not self._open_answers or event.finish_reason in ("error", "cancelled"):
            self._news.set()
