"""One HTTP exchange: the raw body in, a job's answer out, and the tenant that both are counted for.

    Request --read_raw--> bytes ... job --answer_job--> Response or EventStream
                 |                            |
            tenant.admit                 tenant.spend

Every endpoint that generates goes through ``answer_job``: the engine accepts the job before the status is
sent, so a refusal has a status of its own, for streams too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server.body_check import BodyChecker
from weft.server.errors import WrongMediaTypeError
from weft.server.generation import Generation
from weft.server.sse import ClientGoneError, EventStream, unless_gone
from weft.server.tenants import Tenant
from weft.server.tracing import RequestTrace

Handler = Callable[[Request], Awaitable[Response]]


class Job(Protocol):
    generation: Generation

    async def answer(self) -> bytes: ...

    def lines(self) -> AsyncGenerator[bytes, None]: ...


async def answer_job(request: Request, job: Job, *, stream: bool, keep_alive_s: float) -> Response:
    """Raises what the engine refuses the job with."""
    await unless_gone(job.generation.start(), request.receive)
    tenant = tenant_of(request)
    trace: RequestTrace | None = request.scope["state"].get("trace")

    def end() -> None:
        job.generation.close()
        if trace is not None:
            trace.outcome = job.generation.outcome(stream=stream)
        if tenant is not None:
            tenant.spend(job.generation.usage().total_tokens)

    if stream:
        return EventStream(job.lines(), on_end=end, keep_alive_s=keep_alive_s)
    try:
        return Response(await unless_gone(job.answer(), request.receive), media_type="application/json")
    finally:
        end()


async def read_raw(request: Request) -> bytes:
    """The body. Raises WrongMediaTypeError; ClientGoneError if the client left; what ``BodyChecker``
    refuses. ``connection`` bounds the size."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json") and _has_body(request):
        raise WrongMediaTypeError(f"the body is {media_type or 'of no type'}; send JSON with the header "
                                  "'Content-Type: application/json'", param="Content-Type")
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    raw = b"".join(parts)
    tenant = tenant_of(request)
    if tenant is not None:
        request.scope["state"]["body_bytes"] = len(raw)  # released by the gate
        refusal = tenant.admit(len(raw))
        if refusal is not None:
            raise refusal
    checker: BodyChecker = request.app.state.body_checker
    await checker.check(raw)
    return raw


def uncount(request: Request) -> None:
    """Takes back what ``read_raw`` counted, if it did: another process answers this request and counts it."""
    tenant, body_bytes = tenant_of(request), request.scope["state"].pop("body_bytes", None)
    if tenant is not None and body_bytes is not None:
        tenant.withdraw(body_bytes)


def tenant_of(request: Request) -> Tenant | None:
    """None on a server without keys."""
    tenant: Tenant | None = request.scope["state"].get("tenant")
    return tenant


def namespace_of(request: Request, salt: str | None) -> str | None:
    """The cache salt of a request that brings ``salt``."""
    tenant = tenant_of(request)
    return salt if tenant is None else tenant.namespace(salt)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
