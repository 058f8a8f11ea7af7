"""Checks of every request before it is routed: its origin, an id, the key; and the report of its end.

* ``edge.Origins``: the Host and Origin headers decide whether a web page may send this request at all.
* ``X-Request-Id``: the client's own is echoed if it is short and printable, else the server draws one. Anthropic's
  clients read it from ``request-id``.
* ``--api-key``: without a valid key only paths that tell nothing about this server are answered. The key also names the
  tenant (``tenants``).
* ``--operator-key``: a valid one opens everything. If the server has one, no other key opens sums over all clients
  (/metrics, /v1/cache) or calls that every client feels (/sleep, /wake_up, /update_weights, /v1/replicas, /api/delete).

Plain ASGI: Starlette's BaseHTTPMiddleware puts a queue and two tasks around every response, streams included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from secrets import token_hex

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import AuthenticationError, WeftError, is_panic
from weft.logs import request_id_of_task
from weft.server.anthropic.protocol import ANTHROPIC_VERSION, REQUEST_ID_HEADER
from weft.server.connection import PEER_IS_OWNER
from weft.server.edge import EdgeError, Origins, is_loopback, names_loopback
from weft.server.errors import error_response
from weft.server.openapi.endpoints import ENDPOINTS
from weft.server.page import page_routes
from weft.server.protocol import HEADER
from weft.server.sse import ClientGoneError
from weft.server.tenants import Keys
from weft.server.tracing import RequestTrace
from weft.server.weights import VERSION_HEADER
from weft.text.current_request import API_KEY, begin_request

_OPEN_PATHS = frozenset(
    {*(row.path for row in ENDPOINTS if row.access == "open"), *(route.path for route in page_routes())}
)
_OPERATOR_PATHS = (
    "/metrics",
    "/v1/cache",
    "/v1/replicas",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/update_weights",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/api/create",
    "/api/blobs",
    "/api/copy",
    "/api/delete",
    "/api/pull",
)
_READING = ("GET", "HEAD")
_CLOSED = "the handler is closed"
"""Message of uvloop about a write to a connection that has ended."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def _may_operate(scope: Scope, headers: Headers) -> bool:
    """Return whether a request to an operator's path may pass without an operator key: it reads, or it comes from this
    machine and from no proxy. If a proxy does not pass on the addresses of clients, the Host header reveals the proxy,
    and at a Unix socket the user of the process does."""
    if scope["method"] in _READING:
        return True
    client = scope.get("client")
    is_here = scope["state"].get(PEER_IS_OWNER, True) if client is None else is_loopback(client[0])
    return is_here and names_loopback(headers.get("host"))


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        origins: Origins,
        on_end: Callable[[RequestTrace, list[str]], None] = lambda trace, ignored: None,
        strict_fields: bool = False,
        weight_version: Callable[[], str] = str,
    ) -> None:
        self._app = app
        self._weight_version = weight_version
        self._on_end = on_end
        self._strict_fields = strict_fields
        self._keys = keys
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        request_id_of_task.set(request_id)
        client = scope.get("client")
        # a proxy names the address of its client and no port
        address = None if client is None else f"{client[0]}:{client[1]}" if client[1] else client[0]
        trace = state["trace"] = RequestTrace(scope["method"], scope["path"], request_id, headers, client=address)
        if trace.path in _OPEN_PATHS:
            trace.route = trace.path  # the page's files, which no endpoint answers
        own_headers = self._origins.cors_headers(headers)
        if ANTHROPIC_VERSION in headers:
            own_headers = [*own_headers, (REQUEST_ID_HEADER.encode(), request_id.encode())]
        ignored = begin_request(strict=self._strict_fields)
        is_gone = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_gone
            if message["type"] == "http.response.start":
                self._add_headers(MutableHeaders(scope=message), request_id, own_headers, ignored.names)
                trace.status = message["status"]
            try:
                await send(message)
            except RuntimeError as error:
                # The connection may have ended since the last check.
                if _CLOSED not in str(error):
                    raise
                is_gone = True
                raise ClientGoneError from None

        try:
            await self._answer(scope, headers)(scope, receive, send_with_id)
        except Exception:
            if not is_gone:  # else there is no client to answer
                raise
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RuntimeError("a library panicked") from error  # answered and logged as any bug
        finally:
            self._on_end(trace, ignored.names)
            if "body_lease" in state:
                state["body_lease"].release()
            if "body_bytes" in state:
                state["tenant"].release(state["body_bytes"])

    def _add_headers(
        self, headers: MutableHeaders, request_id: str, own_headers: list[tuple[bytes, bytes]], ignored: Collection[str]
    ) -> None:
        headers["x-request-id"] = request_id
        headers["x-content-type-options"] = "nosniff"
        headers.raw.extend(own_headers)
        if version := self._weight_version():
            headers[VERSION_HEADER] = version
        if ignored:
            headers[HEADER] = ", ".join(ignored)

    def _answer(self, scope: Scope, headers: Headers) -> ASGIApp:
        method = scope["method"]
        preflight_headers = self._origins.preflight_headers(method, headers)
        if preflight_headers is not None:
            return Response(status_code=204, headers=preflight_headers)
        refusal: WeftError | None = self._origins.refusal(method, headers)
        if refusal is None and scope["path"] not in _OPEN_PATHS:
            key = headers.get("x-api-key")  # where clients of the Messages API put the key
            authorization = headers.get("authorization") or (f"Bearer {key}" if key else "")
            refusal = self._key_refusal(scope, headers, authorization)
        return self._app if refusal is None else error_response(refusal, scope)

    def _key_refusal(self, scope: Scope, headers: Headers, authorization: str) -> WeftError | None:
        """Return the refusal of a key; None for a valid key, whose tenant is then in the state of the request."""
        path = scope["path"]
        for_operators = self._keys.has_operators and path.startswith(_OPERATOR_PATHS)
        if not self._keys.has_operators and path.startswith(_OPERATOR_PATHS) and not _may_operate(scope, headers):
            return EdgeError(
                403,
                f"{scope['method']} {path} changes the server for all: without an --operator-key it answers clients "
                "on this machine only, at localhost or at a Unix socket as the user of the server or root",
                code="operator_only",
            )
        scheme, _, key = authorization.partition(" ")
        tenant, is_operator = self._keys.match(key.strip()) if scheme.lower() == "bearer" else (None, False)
        if tenant is not None and (is_operator or not for_operators):
            scope["state"]["tenant"] = tenant
            scope["state"]["trace"].key = tenant.name
            API_KEY.set(tenant.owner)
            return None
        if not self._keys.has_clients and not for_operators:
            return None
        if not authorization:
            header = (
                "'x-api-key: KEY' (api_key= in the anthropic client)"
                if "/messages" in path
                else "'Authorization: Bearer KEY' (api_key= in the openai client)"
            )
            return AuthenticationError(
                f"this server wants an API key: send the header {header}", code="missing_api_key"
            )
        if tenant is not None:
            return EdgeError(403, f"{path} is for the operator of this server (--operator-key)", code="operator_only")
        return AuthenticationError("this API key is not one of the server's", code="invalid_api_key")
