"""The page at ``/``: the figures of ``weft top`` in a browser, and a box to ask the model something.

    /                    page_files/index.html
    /docs                page_files/docs.html: what /openapi.json says, for readers
    /page/NAME           the other files of that folder, and those of its folder vendor; no other path is looked at

The files have no data of this server, so they need no key; the data that they ask the server for does (``gate``). The
page loads nothing from anywhere else, and its policy says so to the browser. Answers are shown as Markdown, and a
model's text is a stranger's: only the sanitiser of ``vendor`` may make HTML of a text (``trusted-types``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
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
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the next version of weft has other files under the same names
}


@cache
def page_routes() -> tuple[Route, ...]:
    """Return a route for each file, read once. None of them takes anything from the request."""
    routes = []
    for name, file in page_files().items():
        path = PATHS.get(name, f"/page/{name}")
        answer = _answering(file.read_bytes(), _TYPES[PurePath(name).suffix])
        routes.append(Route(path, answer, methods=["GET"]))
    return tuple(routes)


def page_files() -> dict[str, Traversable]:
    """Return the files that are served, by their path in the folder; licences of ``vendor`` are not."""
    folder = resources.files("weft.server") / "page_files"
    files = {file.name: file for file in folder.iterdir()}
    vendor = {f"vendor/{file.name}": file for file in files.pop("vendor").iterdir()}
    return {name: file for name, file in (files | vendor).items() if PurePath(name).suffix in _TYPES}


def _answering(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)

    return answer
