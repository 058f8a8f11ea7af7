"""One HTTP connection: uvicorn's httptools protocol, with a bound on everything that a client controls.

    IDLE --first byte--> HEAD --blank line--> BODY --last byte--> IDLE          (what the client sends)
      |                    |                    |
    idle_s              header_s        body_s, body_rate_min                   (how long it may take)
      |                    |                    |
    closed               408                  408

uvicorn's parser bounds neither a request line nor headers. This subclass adds sizes (414, 431, 413, 503), clocks
(``sweep``), a limit of pipelined requests, and refusals in the path's dialect (``raw_answer``). A refused client may go
on sending for LINGER_S, so that it reads the answer. A refusal never breaks into an answer that is under way: the
connection then takes no more input, and closes after the answers to earlier requests. Decision 0020 lists the rejected
alternatives.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import os
import socket
import struct
from http import HTTPStatus
from secrets import token_hex
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from weft.server.edge import LINGER_S, EdgeError, EdgeLimits, HttpEdge
from weft.server.errors import dialect_body, error_headers

_BLOBS = b"/api/blobs/"
"""Prefix of paths whose bodies are handled in pieces as they come: these bodies have a limit of their own and are never
buffered. An answer ends the upload."""
PEER_IS_OWNER = "peer_is_owner"
"""Key in the state of a request at a Unix socket: whether the client runs as the user of this server, or as root."""
WRITE_PART = "write_part"
"""Key in the state of a request: ``_write_part`` of the connection."""
_BODY_GRACE_S = 5.0
"""Seconds before ``body_rate_min`` counts."""


def body_timed_out(limits: EdgeLimits, received_bytes: int, elapsed_s: float) -> EdgeError:
    return EdgeError(
        408,
        f"the body has {received_bytes} bytes after {elapsed_s:.0f} s; it must be complete in "
        f"{limits.body_s:g} s (limits.body_timeout) and bring {limits.body_rate_min} bytes a second "
        "(limits.min_body_rate)",
        param="limits.body_timeout",
        code="request_timeout",
    )


def body_too_large(limits: EdgeLimits, size_bytes: int, *, is_blob: bool = False) -> EdgeError:
    flag, limit = ("limits.blob_size", limits.blob_bytes) if is_blob else ("limits.max_body_mb", limits.body_bytes)
    return EdgeError(
        413,
        f"the body has {size_bytes} bytes or more; the limit is {limit} bytes ({flag})",
        param=flag,
        code="body_too_large",
    )


def request_line_too_long(limits: EdgeLimits) -> EdgeError:
    return EdgeError(
        414,
        f"the request line has more than {limits.request_line_bytes} bytes (limits.max_request_line)",
        param="limits.max_request_line",
        code="request_line_too_long",
    )


def too_many_pipelined() -> EdgeError:
    return EdgeError(429, "too many requests are pipelined", code="too_many_pipelined")


def headers_too_large(limits: EdgeLimits) -> EdgeError:
    return EdgeError(
        431,
        f"the headers have more than {limits.header_bytes} bytes (limits.max_header_bytes) or "
        f"{limits.header_count} fields (limits.max_headers)",
        param="limits.max_header_bytes",
        code="headers_too_large",
    )


def raw_answer(refusal: EdgeError, path: str = "") -> bytes:
    """Return the complete HTTP answer that refuses a request before it reaches the application. ``path``: empty if the
    request line was not read. The connection closes after the answer."""
    request_id = token_hex(16)
    body = dialect_body(refusal, path, request_id)
    headers = {
        **error_headers(refusal),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-content-type-options": "nosniff",
        "x-request-id": request_id,
    }
    lines = [
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def peer_is_owner(own: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as this one's user, or as root. True where the
    system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (0, os.geteuid())


class _Phase(enum.Enum):
    IDLE, HEAD, BODY = range(3)


class _StopParsingError(Exception):
    """Raised through the parser, which then takes no more bytes."""


class _UnchunkedSend:
    """``send`` of a request of HTTP/1.0, whose clients know no chunks: a body of unknown length ends with the
    connection. uvicorn writes chunks to them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        edge: HttpEdge,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""  # uvicorn sets it with the first request, and a connection may be refused before that
        self._edge = edge
        self._limits = edge.limits
        self._phase = _Phase.IDLE
        self._phase_s = 0.0
        self._unparsed_bytes = 0
        self._header_bytes = 0
        self._body_bytes = 0
        self._refusal: EdgeError | None = None
        self._takes_input = True
        self._linger_end_s: float | None = None
        self._unsent_bytes = 0
        self._unsent_s = 0.0
        self._active: RequestResponseCycle | None = None

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        if own is not None and own.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, PEER_IS_OWNER: peer_is_owner(own)}
        refusal = self._edge.enter(self, self.client[0] if self.client else "")
        if refusal is None:
            self.timeout_keep_alive_task = self.loop.call_later(self._limits.idle_s, transport.close)
        elif self._edge.is_crowded():
            self.abort()
        else:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.leave(self)
        for cycle, _ in self.pipeline:
            cycle.scope["state"]["body_lease"].release()
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True  # uvicorn tells only the youngest request
            self._active.message_event.set()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._takes_input:
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD)
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end_input()  # no other protocol is spoken here: the answer is the last one
        except httptools.HttpParserError:
            self._refuse(
                self._refusal or EdgeError(400, "the bytes received are not an HTTP/1.1 request", code="invalid_http")
            )
        else:
            if self._unparsed_bytes > self._limits.header_bytes:
                self._refuse(headers_too_large(self._limits))

    def sweep(self, now_s: float) -> None:
        """End phases that have taken too long, twice a second. A TLS handshake has a limit of its own."""
        if self.transport is None:
            return
        if self._is_write_stalled(now_s) or (self._linger_end_s is not None and now_s > self._linger_end_s):
            self.abort()
            return
        if not self._takes_input or self._phase is _Phase.IDLE or self.transport.is_closing():
            return
        if self.flow.read_paused:
            self._phase_s = now_s  # the client waits for the server
            return
        elapsed_s = now_s - self._phase_s
        limits = self._limits
        if self._phase is _Phase.HEAD:
            if elapsed_s > limits.header_s:
                self._refuse(
                    EdgeError(
                        408,
                        f"no complete request header came in {limits.header_s:g} s (limits.header_timeout)",
                        param="limits.header_timeout",
                        code="request_timeout",
                    )
                )
            return
        least_bytes = (elapsed_s - _BODY_GRACE_S) * limits.body_rate_min
        if (elapsed_s > limits.body_s and not self._is_blob) or self._body_bytes < least_bytes:
            self._refuse(body_timed_out(limits, self._body_bytes, elapsed_s))

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter(_Phase.HEAD)
        self._header_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.request_line_bytes:
            self._stop(request_line_too_long(self._limits))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Trailers come here as well, after the body."""
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._limits.header_bytes or len(self.headers) >= self._limits.header_count:
            self._stop(headers_too_large(self._limits))
        if self._phase is _Phase.HEAD:  # uvicorn appends a trailer to the headers of the running request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if (
            self._active is not None
            and not self._active.response_complete
            and len(self.pipeline) >= self._limits.pipelined
        ):
            self._stop(too_many_pipelined())
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit():
                self._check_size(int(value), is_blob=self.url.startswith(_BLOBS))
        self.scope["state"]["body_lease"] = self._edge.lease()
        super().on_headers_complete()
        self._enter(_Phase.BODY)

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        is_blob = self._is_blob
        self._check_size(self._body_bytes, is_blob=is_blob)
        if not self.cycle.response_complete and not is_blob:
            refusal = self.cycle.scope["state"]["body_lease"].grow(len(body))
            if refusal is not None:
                self._stop(refusal)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter(_Phase.IDLE)

    @property
    def _is_blob(self) -> bool:
        return self.url.startswith(_BLOBS) and not self.cycle.response_complete

    def _check_size(self, size_bytes: int, *, is_blob: bool) -> None:
        if size_bytes > (self._limits.blob_bytes if is_blob else self._limits.body_bytes):
            self._stop(body_too_large(self._limits, size_bytes, is_blob=is_blob))

    # ------------------------------------------------------------------ uvicorn's side

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _UnchunkedSend(cycle)  # type: ignore[method-assign]
        cycle.scope["state"][WRITE_PART] = functools.partial(self._write_part, cycle)
        super()._start_asgi_task(cycle, app)

    def _write_part(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Write a part of a chunked answer without a coroutine, as ``cycle.send`` does. Return false, with nothing
        written, if the caller must await ``send``: the client reads slowly, has left, or requested only headers."""
        if (
            self.flow.write_paused
            or cycle.disconnected
            or not cycle.chunked_encoding
            or cycle.scope["method"] == "HEAD"
            or self.transport.is_closing()
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _unsupported_upgrade_warning(self) -> None:
        """Write no line in the log for a request that any client can send."""

    # ------------------------------------------------------------------ refusals

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_s = self.loop.time()
        self._unparsed_bytes = 0

    def _stop(self, refusal: EdgeError) -> None:
        self._refusal = refusal
        raise _StopParsingError

    def _refuse(self, refusal: EdgeError) -> None:
        """Take no more input. Answer, unless another answer is under way."""
        self._edge.on_refusal(refusal.code or "")
        active = self._active
        answer = raw_answer(refusal, (self.url or b"").decode("latin-1"))
        if active is not None and self._phase is _Phase.BODY and self.cycle is active:
            if active.response_complete:
                answer = b""  # the request was answered before its body was complete
            elif active.response_started:
                self.abort()
                return
            active.disconnected = True
            active.message_event.set()
        elif active is not None and not active.response_complete:
            self._end_input()
            return
        self._takes_input = False
        self._linger_end_s = self.loop.time() + LINGER_S
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _end_input(self) -> None:
        """Answer the requests that are complete, the last one with ``Connection: close``."""
        self._takes_input = False
        if self._phase is _Phase.BODY and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()[0].scope["state"]["body_lease"].release()
        last = self.pipeline[0][0] if self.pipeline else self._active
        if last is None or last.response_complete:
            self.transport.close()
        else:
            last.keep_alive = False

    def _is_write_stalled(self, now_s: float) -> bool:
        """Return whether bytes wait to be sent and none has left for ``write_s`` seconds."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes < self._unsent_bytes or not self._unsent_bytes:
            self._unsent_s = now_s
        self._unsent_bytes = unsent_bytes
        return unsent_bytes > 0 and now_s - self._unsent_s > self._limits.write_s
