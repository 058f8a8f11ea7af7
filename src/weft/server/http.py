"""The parts of an HTTP process that are independent of engines: uvicorn and file limits.

``launch`` uses them for a server of one process and for the supervisor, ``workers.process`` for a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import uvicorn

from weft.server.app import build_app
from weft.server.config import BACKLOG
from weft.server.connection import BoundedProtocol
from weft.server.edge import HttpEdge
from weft.server.listening import follow_certificate, tls_context
from weft.server.service import Service
from weft.server.sse import Handler

_LAST_ANSWERS_S = 1.0
"""Seconds that responses which are complete (errors, last chunks) get to be sent."""
_LOOK_S = 1.0
"""Seconds between two checks for a free descriptor."""
_OTHER_FILES = 256
"""Descriptors reserved for logs, stores, workers and engines that start."""
_log = logging.getLogger("weft.server")


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its own signal handlers: ``launch`` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_server(service: Service, forward: Handler | None = None) -> uvicorn.Server:
    """Return the HTTP server. ``forward`` as in ``build_app``."""
    config = service.config
    protocol: Any = functools.partial(
        BoundedProtocol, edge=service.edge
    )  # named like a class, as uvicorn calls it like one
    return _HttpServer(
        uvicorn.Config(
            build_app(service, forward),
            http=protocol,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,  # ``server.access_log`` has a line for each request
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # it is only added to a time
            timeout_graceful_shutdown=1,
            # Clients of a Unix socket have no address, unless its proxy names one.
            forwarded_allow_ips=None if config.uds is None else "*",
        )
    )


@contextlib.asynccontextmanager
async def serving(service: Service, listener: socket.socket, forward: Handler | None = None) -> AsyncGenerator[None]:
    """Answer on ``listener`` within the block. After the block, complete answers are still sent, and ``service`` is
    closed."""
    service.edge.cap_connections(raise_file_limit(service.config.max_connections))
    http = http_server(service, forward)
    watching = [asyncio.create_task(service.edge.sweep_forever())]
    tls = tls_context(service.config)
    if tls is not None:
        http.config.load()
        connection = functools.partial(BoundedProtocol, http.config, http.server_state, {}, edge=service.edge)
        watching.append(asyncio.create_task(follow_certificate(tls, service.config)))
        watching.append(asyncio.create_task(accept_tls(listener, tls, service.edge, connection)))
    answering = asyncio.create_task(http.serve(sockets=[listener] if tls is None else []))
    try:
        yield
    finally:
        http.should_exit = True
        for task in watching:
            task.cancel()
        await asyncio.wait((answering,), timeout=_LAST_ANSWERS_S)
        service.edge.abort_all()
        http.force_exit = True
        await answering
        await service.close()


async def accept_tls(
    listener: socket.socket, context: ssl.SSLContext, edge: HttpEdge, connection: Callable[[], BoundedProtocol]
) -> None:
    """Accept connections and shake hands, until it is cancelled. A connection is counted from its first moment on, and
    its handshake may take as long as a request's headers: else clients that never begin a handshake would take every
    descriptor."""
    loop = asyncio.get_running_loop()

    async def shake_hands(client: socket.socket, protocol: BoundedProtocol) -> None:
        try:
            await loop.connect_accepted_socket(
                lambda: protocol, client, ssl=context, ssl_handshake_timeout=edge.limits.header_s
            )
        except BaseException as error:
            edge.leave(protocol)
            client.close()
            if not isinstance(error, OSError):  # no TLS, or no handshake in time, or the client has left
                raise

    handshakes: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor is free
                await asyncio.sleep(_LOOK_S)
                continue
            protocol = connection()
            if edge.enter(protocol, address[0]) is not None and edge.is_crowded():
                edge.leave(protocol)
                client.close()
                continue
            handshake = loop.create_task(shake_hands(client, protocol))
            handshakes.add(handshake)
            handshake.add_done_callback(handshakes.discard)
    finally:
        for handshake in handshakes:
            handshake.cancel()


def raise_file_limit(connections: int) -> int:
    """Raise the limit of open files for ``connections``: each is a file descriptor, and the usual limit is 1,024.
    Return the number of connections that leaves room for files and children of the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Twice: a refused connection lingers.
    wanted = 2 * connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY:
        return connections
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = max(1, (soft - min(_OTHER_FILES, soft // 2)) // 2)
    if room < connections:
        _log.warning(
            "the system allows %d open files (ulimit -n), which is room for %d connections; limits.max_connections "
            "asks for %d",
            soft,
            room,
            connections,
        )
    return min(room, connections)
