"""What the router refuses, unknown paths and wrong methods: in words that say what to change.

Two slips are usual: clients of OpenAI take a base URL that ends with /v1, those of Anthropic one that does
not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weft.server.errors import EdgeError, error_response
from weft.server.ignored_fields import did_you_mean
from weft.server.openapi.endpoints import ENDPOINTS

_SERVED = re.compile("|".join(re.sub(r"\\{.*?\\}", "[^/]+", re.escape(path))
                              for path in {row.path for row in ENDPOINTS}))
_GENERATE = ", ".join(dict.fromkeys(row.path for row in ENDPOINTS if row.method == "POST"
                                    and row.path in ("/v1/chat/completions", "/v1/completions",
                                                     "/v1/responses", "/v1/messages")))


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers: Mapping[str, str] = error.headers or {}
    path = request.url.path
    if error.status_code == 404:
        why = _slip(path, str(request.base_url)) or did_you_mean(path, {row.path for row in ENDPOINTS})
        failure = EdgeError(404, f"there is nothing at {path[:200]}{why}. Served are /v1/models, {_GENERATE} "
                                 "and others, which /openapi.json lists", code="unknown_path")
    elif error.status_code == 405:
        failure = EdgeError(405, f"{request.method} is not served at {path}; use "
                                 f"{headers.get('Allow', 'another method')}", code="method_not_allowed")
    else:
        failure = EdgeError(error.status_code, error.detail)
    return error_response(failure, request.scope, headers)


def _slip(path: str, base_url: str) -> str:
    twice = path.startswith("/v1/v1/")
    meant = path.removeprefix("/v1") if twice else f"/v1{path}"
    if not _SERVED.fullmatch(meant):
        return ""
    if twice and "/messages" not in path:
        return f": it has /v1 twice; the base URL is {base_url}v1"
    if "/messages" in path:
        return f" (did you mean {meant}?): the base URL of Anthropic's clients is {base_url}, without /v1"
    return f" (did you mean {meant}?): the base URL of OpenAI's clients is {base_url}v1, with /v1"
