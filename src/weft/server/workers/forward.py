"""Requests that a worker does not answer itself go to the supervisor, over HTTP on a private socket.

    client --> worker: edge, gate (origin, key) --> this handler --> supervisor: gate (key) --> handler

Bodies pass in pieces in both directions, so no worker buffers a large upload. The supervisor checks the key again,
because it counts the request for its tenant. A worker that had to read the body to decide undoes its own count. Headers
of the gate (CORS, request id) are the worker's; those of the supervisor are dropped.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from weft.errors import EngineUnavailableError
from weft.server.openapi.endpoints import ENDPOINTS
from weft.server.sse import ClientGoneError, Handler, has_body, uncount

OWN_GROUPS = frozenset({"Generate", "Ollama", "Responses", "Tokens", "Models"})
OWN_OPERATIONS = frozenset({"version", "openapi"})
"""Endpoints that a worker answers; the groups are those of ``openapi.endpoints``."""
_PASSED_HEADERS = frozenset(
    {"authorization", "x-api-key", "content-type", "content-encoding", "content-length", "accept"}
)
_ANSWER_HEADERS = ("content-type", "content-length", "content-disposition", "retry-after", "allow", "x-weft-ignored")
_CONNECT_S = 5.0


def forwarded_operations() -> frozenset[str]:
    return frozenset(
        row.operation for row in ENDPOINTS if row.group not in OWN_GROUPS and row.operation not in OWN_OPERATIONS
    )


def forward_handler(socket: str) -> Handler:
    """Return the handler. ``socket``: where the supervisor listens."""
    import httpx  # the supervisor reads the table above without this import

    client = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=socket),
        base_url="http://localhost",
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
    )

    async def forward(request: Request) -> Response:
        uncount(request)
        headers = [(name, value) for name, value in request.headers.items() if name in _PASSED_HEADERS]
        headers += [("x-request-id", request.scope["state"]["request_id"]), ("accept-encoding", "identity")]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        content = request.stream() if has_body(request) else None
        passed = client.build_request(request.method, url, headers=headers, content=content)
        try:
            answer = await client.send(passed, stream=True)
        except ClientDisconnect:
            raise ClientGoneError from None
        except httpx.TransportError as error:
            raise EngineUnavailableError(f"the supervisor of this server does not answer: {error}") from None
        response = StreamingResponse(answer.aiter_raw(), answer.status_code)
        for name in _ANSWER_HEADERS:
            if name in answer.headers:
                response.headers[name] = answer.headers[name]
        return response

    return forward
