"""One HTTP exchange: the raw body in, an answer out while the client is still there.

    Request --read_raw--> bytes ... job --answer_job--> Response or EventStream
                 |                            |
            tenant.admit                 tenant.spend

A client that disconnects must not cost any more work. uvicorn reports the disconnect only to a task that waits in
``receive``. Both kinds of answer have such a task, which cancels them when the client leaves. The engine accepts a job
before the status is sent, so a refusal has a status of its own, for streams too. Once the headers are sent, an error
can only be a line of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.errors import RequestError, WeftError
from weft.server.connection import WRITE_PART, body_too_large
from weft.server.content_coding import coding_of, pieces
from weft.server.edge import EdgeLimits
from weft.server.errors import WrongMediaTypeError, bug, error_body
from weft.server.generation import Generation
from weft.server.protocol import LARGE_BODY_BYTES, Unserved
from weft.server.service import BodyChecker, Service
from weft.server.tenants import Tenant
from weft.server.tracing import RequestTrace
from weft.text.choices import Piece

DONE = b"data: [DONE]\n\n"
EVENTS, JSON_LINES = "text/event-stream", "application/x-ndjson"
PAGE_DEFAULT, PAGE_MAX = 20, 100
_KEEP_ALIVE = b": keep-alive\n\n"
_log = logging.getLogger("weft.server")

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client left, so no answer can be sent."""


def sse_line(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def named_event(name: str, json: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json + b"\n\n"


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of ``work``; when the client leaves first, cancel the work and raise ClientGoneError."""
    working, is_gone = asyncio.current_task(), False
    assert working is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        working.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not working.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


class LineStream(Response, ABC):
    """A response whose lines come one after another. However the response ends, and if it never begins, ``on_end`` is
    called."""

    def __init__(self, *, on_end: Callable[[], None], keep_alive_s: float, media_type: str) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._sent_s = 0.0
        """Time of the last part (of the event loop)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(self._send_all(send), receive)
        except (ClientGoneError, OSError):
            _log.debug("a client left in the middle of a stream")
        finally:
            self._on_end()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        keeping_alive = asyncio.ensure_future(self._keep_alive(send)) if self._keep_alive_s > 0 else None
        try:
            await self._pump(send)
        except ClientGoneError:
            raise
        except Exception as error:
            failure = error if isinstance(error, WeftError) else bug(error)
            if failure is not error:
                _log.exception("a stream failed")
            await self._send_part(send, self._failed(failure))
        finally:
            if keeping_alive is not None:
                await _cancel(keeping_alive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, body: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        for chunk in self._chunks(body):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _chunks(self, part: bytes) -> Sequence[bytes]:
        """Return ``part`` as chunks of HTTP: a line of JSON is one, as in Ollama, because clients parse each chunk."""
        return part.splitlines(keepends=True) if self.media_type == JSON_LINES else (part,)

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            idle_s = loop.time() - self._sent_s
            if idle_s >= self._keep_alive_s:
                await self._send_part(send, _KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - idle_s)

    @abstractmethod
    async def _pump(self, send: Send) -> None:
        """Send all parts. An error is sent as ``_failed`` writes it."""

    def _failed(self, error: WeftError) -> bytes:
        """Return the lines that tell the client of an error after the headers."""
        return failure_lines(error)

    async def _close(self) -> None:
        """Release the resources of the lines."""


class EventStream(LineStream):
    """A stream of the lines of ``lines``: complete SSE lines, or complete lines of JSON with that ``media_type``.
    ``lines`` is closed at the end."""

    def __init__(
        self,
        lines: AsyncGenerator[bytes, None],
        *,
        on_end: Callable[[], None],
        keep_alive_s: float = 0.0,
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(on_end=on_end, keep_alive_s=keep_alive_s, media_type=media_type)
        self._lines = lines

    async def _pump(self, send: Send) -> None:
        async for line in self._lines:
            await self._send_part(send, line)

    async def _close(self) -> None:
        await self._lines.aclose()


class AnswerStream(LineStream):
    """A stream of the answer of ``job``. No task wakes for a token: the generation calls ``_step``, which writes the
    part of the new pieces to the connection. A client that reads slowly costs a task, which waits until the connection
    takes more; the pieces of that time are then one part."""

    def __init__(
        self, job: StreamedJob, *, on_end: Callable[[], None], keep_alive_s: float, media_type: str = EVENTS
    ) -> None:
        super().__init__(on_end=on_end, keep_alive_s=keep_alive_s, media_type=media_type)
        self._job = job
        self._sending: asyncio.Task[None] | None = None

    async def _pump(self, send: Send) -> None:
        job = self._job
        if begin := job.begin():
            await self._send_part(send, begin)
        self._send = send
        self._write: Callable[[bytes], bool] | None = self._scope["state"].get(WRITE_PART)
        self._all_sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        job.generation.listen(self._step)
        try:
            await self._all_sent
        finally:
            if self._sending is not None:
                await _cancel(self._sending)
        if end := await job.end():
            await self._send_part(send, end)

    def _failed(self, error: WeftError) -> bytes:
        return self._job.failed(error)

    def _step(self) -> None:
        """Send the pieces that wait, unless an earlier part is still being sent."""
        generation = self._job.generation
        try:
            while self._sending is None and not self._all_sent.done():
                if not generation.unfinished:
                    self._all_sent.set_result(None)
                    break
                pieces = generation.next_pieces()
                if pieces is None:
                    break
                if pieces and (part := self._job.part(pieces)):
                    self._send_now(part)
        except Exception as error:
            self._all_sent.set_exception(error)

    def _send_now(self, part: bytes) -> None:
        chunks = self._chunks(part)
        while chunks and self._write is not None and self._write(chunks[0]):
            chunks = chunks[1:]
        if not chunks:
            if self._keep_alive_s:
                self._sent_s = asyncio.get_running_loop().time()
            return
        self._sending = asyncio.ensure_future(self._send_part(self._send, b"".join(chunks)))
        self._sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._sending = None
        if sending.cancelled() or self._all_sent.done():
            return
        if error := sending.exception():
            self._all_sent.set_exception(error)
        else:
            self._step()


def failure_lines(error: WeftError) -> bytes:
    """Return the end of a stream of OpenAI's that fails."""
    return sse_line(error_body(error)) + DONE


async def lines_of(job: StreamedJob) -> AsyncGenerator[bytes, None]:
    """Yield the parts of the answer of ``job`` where no client reads them as they come. Close its generation."""
    try:
        yield job.begin()
        async for pieces in job.generation.pieces():
            if part := job.part(pieces):
                yield part
        yield await job.end()
    except Exception as error:
        failure = error if isinstance(error, WeftError) else bug(error)
        yield job.failed(failure)
        if failure is not error:
            raise
    finally:
        job.generation.close()


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended. Drop its result or error."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


Handler = Callable[[Request], Awaitable[Response]]


class Job(Protocol):
    generation: Generation

    async def answer(self) -> bytes: ...


class StreamedJob(Job, Protocol):
    """Base of a job whose answer may be streamed."""

    def begin(self) -> bytes:
        """Return the lines before the first piece."""
        return b""

    @abstractmethod
    def part(self, pieces: list[Piece]) -> bytes:
        """Return the lines of the next pieces, if any."""

    async def end(self) -> bytes:
        """Return the lines after the last piece."""
        return b""

    def failed(self, error: WeftError) -> bytes:
        """Return the lines of an error that ends the answer."""
        return failure_lines(error)


@dataclass(frozen=True, slots=True)
class Way:
    """The functions that make jobs from the bodies of an endpoint that generates."""

    body: type[Any]
    unserved: Unserved
    prepare: Callable[[Service, Any], Awaitable[Job]]


async def prepared(job: Job) -> Job:
    """Return ``job``, for callers of ``answer_job`` that have prepared it."""
    return job


async def answer_job(
    request: Request, making: Awaitable[Job], *, stream: bool, keep_alive_s: float, media_type: str = EVENTS
) -> Response:
    """Answer a request. ``making`` may wait in the queues of templates and pictures; it is cancelled if the client
    leaves. Raise the refusals of ``making`` and of the engine."""
    tenant = tenant_of(request)
    trace: RequestTrace = request.scope["state"]["trace"]

    async def started() -> Job:
        job = await making
        await job.generation.start()
        return job

    def end(job: Job) -> None:
        job.generation.close()
        trace.outcome = job.generation.outcome(stream=stream)
        if tenant is not None:
            tenant.spend(job.generation.usage().total_tokens)

    async def whole() -> bytes:
        job = await started()
        try:
            return await job.answer()
        finally:
            end(job)

    if not stream:
        return Response(await unless_gone(whole(), request.receive), media_type="application/json")
    job = await unless_gone(started(), request.receive)
    # Bodies of endpoints without streams refuse the field.
    streamed = cast(StreamedJob, job)
    on_end = functools.partial(end, job)
    return AnswerStream(streamed, on_end=on_end, keep_alive_s=keep_alive_s, media_type=media_type)


async def read_raw(request: Request, *, undeclared: bool = False) -> bytes:
    """Return the body, as it was before a client compressed it. Raise WrongMediaTypeError; ClientGoneError if the
    client left; the refusals of ``BodyChecker``. ``connection`` bounds the size. ``undeclared``: whether another
    content type is accepted, as ``curl -d`` sends one."""
    coding = coding_of(request.headers.get("content-encoding", ""))
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = undeclared or media_type == "application/json" or media_type.endswith("+json")
    if not is_json and has_body(request):
        raise WrongMediaTypeError(
            f"the body is {media_type or 'of no type'}; send JSON with the header 'Content-Type: application/json'",
            param="Content-Type",
        )
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    raw = b"".join(parts)
    if coding:
        raw = await unless_gone(_uncompressed(request, raw, coding), request.receive)
    tenant = tenant_of(request)
    if tenant is not None:
        request.scope["state"]["body_bytes"] = len(raw)  # released by the gate
        refusal = tenant.admit(len(raw))
        if refusal is not None:
            raise refusal
    checker: BodyChecker = request.app.state.body_checker
    if len(raw) > LARGE_BODY_BYTES:
        await unless_gone(checker.check(raw), request.receive)
    return raw


async def _uncompressed(request: Request, raw: bytes, coding: str) -> bytes:
    """Return the content of a compressed body. The request's headers are then those of the content, for a process to
    which it is forwarded."""
    limits: EdgeLimits = request.app.state.edge_limits
    parts, size_bytes = [], 0
    async for piece in pieces(raw, coding):
        size_bytes += len(piece)
        if size_bytes > limits.body_bytes:
            raise body_too_large(limits, size_bytes)
        refusal = request.scope["state"]["body_lease"].grow(len(piece))
        if refusal is not None:
            raise refusal
        parts.append(piece)
    headers = [row for row in request.scope["headers"] if row[0] not in (b"content-encoding", b"content-length")]
    request.scope["headers"] = [*headers, (b"content-length", b"%d" % size_bytes)]
    return b"".join(parts)


def uncount(request: Request) -> None:
    """Undo the counts of ``read_raw``, if there are any: another process answers this request and counts it."""
    tenant, body_bytes = tenant_of(request), request.scope["state"].pop("body_bytes", None)
    if tenant is not None and body_bytes is not None:
        tenant.withdraw(body_bytes)


def tenant_of(request: Request) -> Tenant | None:
    """Return the tenant of a request; None on a server without keys."""
    tenant: Tenant | None = request.scope["state"].get("tenant")
    return tenant


def salt_of(request: Request, salt: str | None) -> str | None:
    """Return the cache salt of a request whose body has ``salt``."""
    tenant = tenant_of(request)
    return salt if tenant is None else tenant.salt(salt)


def owner_of(request: Request) -> str:
    """Return the owner of the objects that the request stores; without API keys all requests have the same owner."""
    tenant = tenant_of(request)
    return "" if tenant is None else tenant.owner


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """A part of a list. ``first_id``, ``last_id``: null if the part is empty."""

    object: str = "list"
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None


def page_of(listed: Sequence[T], request: Request, id_of: Callable[[T], str]) -> Page[T]:
    """Return the part of ``listed`` that ``after`` and ``limit`` in the query ask for. Raise RequestError."""
    query = request.query_params
    limit_text = query.get("limit", str(PAGE_DEFAULT))
    limit = int(limit_text) if limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 10 else 0
    if not 1 <= limit <= PAGE_MAX:
        raise RequestError(f"limit is {limit_text[:20]!r}; it must be at least 1 and at most {PAGE_MAX}", param="limit")
    ids = [id_of(item) for item in listed]
    after = query.get("after")
    begin = 0
    if after is not None:
        if after not in ids:
            raise RequestError(f"after is {after[:100]!r}, which is not one of the listed ids", param="after")
        begin = ids.index(after) + 1
    end = min(begin + limit, len(ids))
    return Page(
        data=list(listed[begin:end]),
        has_more=end < len(ids),
        first_id=ids[begin] if begin < end else None,
        last_id=ids[end - 1] if begin < end else None,
    )


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
