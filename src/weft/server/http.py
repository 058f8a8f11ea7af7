"""The parts of an HTTP process that have nothing to do with engines: uvicorn, file limits, the log.

``launch`` uses them for a server of one process and for the supervisor, ``workers.process`` for a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import logging
import resource
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any

import msgspec
import uvicorn

from weft.server.app import build_app
from weft.server.config import ServerConfig
from weft.server.connection import BoundedProtocol
from weft.server.protocol import ignored_names
from weft.server.service import Service
from weft.server.sse import Handler

BACKLOG = 2048
_LAST_ANSWERS_S = 1.0
"""How long responses that are already decided (errors, last chunks) may take to leave."""
_OTHER_FILES = 256
"""File descriptors that the server needs besides its connections."""
_LOOKS = frozenset({"/health", "/metrics", "/v1/cache", "/load"})


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: what a signal means is decided by ``launch``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(service: Service, forward: Handler | None = None) -> uvicorn.Server:
    """``forward`` as in ``build_app``."""
    config = service.config
    protocol: Any = functools.partial(BoundedProtocol, edge=service.edge)  # called as a class is called
    return _HttpServer(uvicorn.Config(
        build_app(service, forward), http=protocol, lifespan="off", ws="none", log_config=None,
        access_log=config.log_level in ("debug", "info"), server_header=False, backlog=BACKLOG,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # it is only added to a time
        timeout_graceful_shutdown=1))


@contextlib.asynccontextmanager
async def serving(service: Service, listener: socket.socket,
                  forward: Handler | None = None) -> AsyncGenerator[None]:
    """Answers on ``listener`` in the block. Behind it, what is decided already may still leave, and
    ``service`` is closed."""
    raise_file_limit(service.config.max_connections)
    sweeping = asyncio.create_task(service.edge.sweep_forever())
    http = http_server(service, forward)
    answering = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield
    finally:
        http.should_exit = True
        await asyncio.wait((answering,), timeout=_LAST_ANSWERS_S)
        service.edge.abort_all()
        sweeping.cancel()
        http.force_exit = True
        await answering
        await service.close()


def raise_file_limit(connections: int) -> None:
    """A connection is a file descriptor, and the usual limit is 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Twice: a refused connection lingers.
    wanted = 2 * connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def set_up_logging(config: ServerConfig) -> None:
    level = config.log_level.upper()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.getLogger("weft").setLevel(level)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(level)
    if config.access_log == "json":
        log_access_as_json()
    if config.log_level != "debug":
        access.addFilter(_is_no_look)


def _is_no_look(record: logging.LogRecord) -> bool:
    """False for a look that succeeded, and for a poll of the health: monitors and the page send one a second,
    which would fill the log."""
    match record.args:
        case (_, "GET", "/health" | "/ping", _, _):
            return False
        case (_, "GET", str(path), _, 200):
            return path.partition("?")[0] not in _LOOKS
    return True


class JsonAccessFormatter(logging.Formatter):
    """Of the records of ``uvicorn.access``: (client, method, path, HTTP version, status). No query string, no
    header and no body: a client may have put a key or a text there."""

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, tuple)
        client, method, path, _, status = record.args
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {"time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "client": client,
                "method": method, "path": str(path).partition("?")[0], "status": status}
        if names := ignored_names():
            line["ignored"] = names
        return msgspec.json.encode(line).decode()


def log_access_as_json() -> None:
    """From now on, in this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonAccessFormatter())
    access = logging.getLogger("uvicorn.access")
    access.handlers = [handler]
    access.propagate = False
