"""The events of one HTTP request on their way to its client, whatever engines compute them.

    put(event), fail(error)   the fleet, as reports arrive
    await events()            the handler of the request, as fast as its client reads

A stream buffers at most the tokens of its answers (law L11). A slow client costs that memory, and never the
engine's time.
"""

from __future__ import annotations

import asyncio

from weft.errors import WeftError
from weft.request import TokenEvent


class RequestStream:
    """Events of one request, or of several that belong together, in order."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: WeftError | None = None
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._news.set()

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
