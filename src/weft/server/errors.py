"""Failures as the error object of the request's dialect, over HTTP and inside a stream.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}       OpenAI's
    {"type": "error", "error": {"type": ..., "message": ...}, "request_id"}   Anthropic's, under /v1/messages
    {"error": "..."}                                                          Ollama's, under /api

The status and type come from the exception (``weft.errors``); ``code`` is a word or null, as clients compare it with
strings. A bug is a 500 that says where to look; only the log has its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from weft.errors import UserError, WeftError
from weft.server.anthropic.protocol import error_json
from weft.server.edge import RETRY_AFTER_S
from weft.server.ollama.protocol import error_line


class WrongMediaTypeError(UserError):
    """The body is not declared as JSON."""

    status = 415


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


_DEFAULT_CODES = {401: "invalid_api_key", 404: "model_not_found"}


def code_of(error: WeftError) -> str | None:
    return error.code if error.code is not None else _DEFAULT_CODES.get(error.status)


def error_body(error: WeftError) -> bytes:
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.kind, error.param, code_of(error))))


def error_headers(error: WeftError) -> dict[str, str]:
    if error.status in (429, 503):
        retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
        return {"retry-after": str(retry_after_s)}
    return {"www-authenticate": "Bearer"} if error.status == 401 else {}


def dialect_body(error: WeftError, path: str, request_id: str | None) -> bytes:
    """Return ``error`` in the shape of the dialect that ``path`` speaks: Anthropic's for Messages, Ollama's, else
    OpenAI's."""
    if path.startswith("/api/"):
        return error_line(error)
    return error_json(error, request_id) if "/messages" in path else error_body(error)


def error_response(error: WeftError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to the request of ``scope``, and note the error's code for the line in the log."""
    state = scope.get("state", {})
    if "trace" in state:
        state["trace"].error = code_of(error) or error.kind
    body = dialect_body(error, scope.get("path", ""), state.get("request_id"))
    return Response(body, error.status, {**error_headers(error), **(headers or {})}, media_type="application/json")


async def on_weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    return error_response(error, request.scope)


async def on_bug(request: Request, error: Exception) -> Response:
    # The exception also reaches the connection, which it ends.
    request_id = request.scope.get("state", {}).get("request_id", "")
    return error_response(bug(error, request_id), request.scope, {"connection": "close"})


def bug(error: Exception, request_id: str = "") -> WeftError:
    """Return the error for a client about an exception that is a bug."""
    under = f" under the request id {request_id}" if request_id else ""
    return WeftError(f"the server failed on this request ({type(error).__name__}); its log has the details{under}")
