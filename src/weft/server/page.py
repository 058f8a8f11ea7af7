"""The page at ``/``: a chat with the model, and the figures of ``weft top``, in a browser.

    /                    page_files/index.html
    /docs                page_files/docs.html: /openapi.json, formatted for readers
    /page/NAME           the other files of that folder, and of its folder vendor; no other path is read

The files contain no data of this server, so they need no key; requests for data do (``gate``). The page loads nothing
from other servers, and its Content-Security-Policy enforces that. Answers are shown as Markdown, and a model's text
cannot be trusted: only the sanitiser of ``vendor`` may make HTML of a text (``trusted-types``).
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
    "Cache-Control": "no-cache",  # a later version of weft has other files under the same names
}


@cache
def page_routes() -> tuple[Route, ...]:
    """Return a route for each file. Each file is read once; nothing of the request is used."""
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
