"""One connection of the soak to its server: HTTP/1.1 over httptools, cheaper than a general client.

    Connection   opened when it is needed, used for one request after the other, closed by whoever leaves
    Answer       status, then the whole body, or its lines as they come in

A client that shares the machine with what it measures must be cheap. The parser is the server's own one,
and the loop uvloop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httptools

TIMEOUT_S = 300.0
IDLE_S = 2.0
"""A connection that was idle for so long is opened anew: its server may be about to close it."""


class ConnectionFailed(Exception):
    """No answer, or only the beginning of one."""


class Answer(asyncio.Protocol):
    """The protocol of one connection, and the answer that it reads now. ``status`` 0: no headers yet."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._idle_since_s = asyncio.get_running_loop().time()
        self.begin()

    def begin(self) -> None:
        """The next answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._news = asyncio.Event()
        self._body = bytearray()
        self.status, self.is_complete, self._keeps_alive = 0, False, True

    # ------------------------------------------------------------------ what asyncio and httptools call

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._news.set()

    def on_headers_complete(self) -> None:
        self.status, self._keeps_alive = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.is_complete = True

    # ------------------------------------------------------------------ what the soak calls

    @property
    def is_open(self) -> bool:
        if asyncio.get_running_loop().time() - self._idle_since_s > IDLE_S:
            self.close()
        return self._transport is not None

    def write(self, request: bytes) -> None:
        if self._transport is not None:
            self._transport.write(request)

    def rest(self) -> None:
        """Until the next request."""
        if not self.is_complete or not self._keeps_alive:
            self.close()
        self._idle_since_s = asyncio.get_running_loop().time()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _more(self) -> None:
        """Waits for bytes. Raises ConnectionFailed where none will come."""
        if self._transport is None:
            raise ConnectionFailed("the server closed the connection")
        await self._news.wait()
        self._news.clear()
        if self._transport is None and not self.is_complete:
            raise ConnectionFailed("the server closed the connection")

    async def head(self) -> int:
        """The status."""
        while not self.status:
            await self._more()
        return self.status

    async def read(self) -> bytes:
        while not self.is_complete:
            await self._more()
        return bytes(self._body)

    async def lines(self) -> list[bytes]:
        """Those that have come since the last call; none at the end of the body."""
        while True:
            *whole, rest = bytes(self._body).split(b"\n")
            if whole:
                self._body = bytearray(rest)
                return whole
            if self.is_complete:
                return []
            await self._more()


class Connection:
    """``async with connection.post(...) as answer``. ``url`` may change between two requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._answer: Answer | None = None

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, key: str) -> AsyncIterator[Answer]:
        """An answer whose headers are there. What has not been read to its end is closed behind it. Raises
        ConnectionFailed, for the body too."""
        answer = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._opened()
                answer.write(
                    (
                        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(self.url).netloc}\r\n"
                        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
                        f"content-length: {len(body)}\r\n\r\n"
                    ).encode()
                    + body
                )
                await answer.head()
                yield answer
        except TimeoutError:
            raise ConnectionFailed(f"no answer in {TIMEOUT_S:.0f} s") from None
        finally:
            if answer is not None:
                answer.rest()

    async def _opened(self) -> Answer:
        if self._answer is None or not self._answer.is_open:
            place = urlsplit(self.url)
            try:
                _, self._answer = await asyncio.get_running_loop().create_connection(Answer, place.hostname, place.port)
            except OSError as error:
                raise ConnectionFailed(repr(error)) from None
        self._answer.begin()
        return self._answer

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
