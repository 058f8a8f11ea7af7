"""The page at ``/``: what ``weft top`` shows, in a browser, and a box to ask the model something.

    /                    page_files/index.html
    /docs                page_files/docs.html: what /openapi.json says, for readers
    /page/NAME           the other files of that folder; no other path is looked at

The files say nothing of this server, so they need no key; what they ask the server for does (``gate``). The
page loads nothing from anywhere else, and its policy says so to the browser.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
PATHS = {"index.html": "/", "docs.html": "/docs"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; media-src data:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the next version of weft has other files under the same names
}


@cache
def page_routes() -> tuple[Route, ...]:
    """A route for each file, read once. None of them takes anything from the request."""
    routes = []
    for file in (resources.files("weft.server") / "page_files").iterdir():
        path = PATHS.get(file.name, f"/page/{file.name}")
        answer = _answering(file.read_bytes(), _TYPES[PurePath(file.name).suffix])
        routes.append(Route(path, answer, methods=["GET"]))
    return tuple(routes)


def _answering(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)

    return answer
