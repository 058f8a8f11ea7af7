"""What every request passes before it is routed: an id, and the key.

* ``X-Request-Id``: the client's own is echoed (if it is short and printable), else one is made. It is in
  every answer, errors too.
* ``--api-key``: without a right one nothing is answered but /health and the files of the page (``page``),
  which say nothing of this server. Keys are compared as SHA-256 digests in constant time, and all of them
  each time, so that timing says nothing about any.
* ``--operator-key``: a right one opens everything. Where there is one, /metrics and /v1/cache open to no
  other: what they say adds up over all clients, and differences of it tell one about the others. Nor do
  /sleep and /wake_up, which are felt by all clients.

Plain ASGI rather than Starlette's BaseHTTPMiddleware, which puts a queue and two tasks around every
response, streams included.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import AuthenticationError
from weft.server.errors import error_response
from weft.server.page import page_routes
from weft.server.sse import ClientGoneError

_OPEN_PATHS = frozenset({"/health", *(route.path for route in page_routes())})
_OPERATOR_PATHS = ("/metrics", "/v1/cache", "/sleep", "/wake_up")
_CLOSED = "the handler is closed"
"""uvloop's words for writing to a connection that is no more."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], operator_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._operators = [hashlib.sha256(key.encode()).digest() for key in operator_keys]
        self._clients = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        is_gone = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_gone
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            try:
                await send(message)
            except RuntimeError as error:
                # A request pipelined behind another is begun by uvicorn on a closed connection too, and not
                # told of it: writing is the first that knows.
                if _CLOSED not in str(error):
                    raise
                is_gone = True
                raise ClientGoneError from None

        refused = None
        if scope["path"] not in _OPEN_PATHS:
            refused = self._refusal(scope["path"], headers.get("authorization", ""))
        answer = self._app if refused is None else error_response(refused)
        try:
            await answer(scope, receive, send_with_id)
        except Exception:
            if not is_gone:  # else there is no client to answer
                raise
        finally:
            if "body_lease" in state:
                state["body_lease"].release()

    def _refusal(self, path: str, authorization: str) -> AuthenticationError | None:
        for_operators = bool(self._operators) and path.startswith(_OPERATOR_PATHS)
        if not self._clients and not for_operators:
            return None
        scheme, _, key = authorization.partition(" ")
        if not authorization:
            return AuthenticationError("this server wants an API key: send the header 'Authorization: Bearer "
                                       "KEY' (api_key= in the openai client)", code="missing_api_key")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        client_matches = [hmac.compare_digest(given, digest) for digest in self._clients]
        operator_matches = [hmac.compare_digest(given, digest) for digest in self._operators]
        is_bearer = scheme.lower() == "bearer"
        if is_bearer and (any(operator_matches) or (any(client_matches) and not for_operators)):
            return None
        if is_bearer and any(client_matches):
            return AuthenticationError(f"{path} is for the operator of this server (--operator-key)",
                                       code="invalid_api_key")
        return AuthenticationError("this API key is not one of the server's", code="invalid_api_key")
