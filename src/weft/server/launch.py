"""``weft serve``: from two configs to an exit code.

    bind the port -> start HTTP (503 "starting") -> start the engine -> banner -> serve
                                                                          |
                    first Ctrl-C or SIGTERM: drain                        |
                    (new requests 503, running ones finish,   <-----------+
                    at most --drain-timeout seconds)
                    second: stop at once

The port is bound first, so that a busy one is said before a model is loaded; without --port the next
free one is taken and the banner says which.

Exit codes: 0 after a drain, also after one that its time limit cut short: the operator chose the limit.
130 after the second Ctrl-C. 2 when the flags or the checkpoint cannot work. 1 when the last engine died, 3
when it stalled.

An engine that dies is restarted, and its requests resume (``weft.fleet``). The server ends when --restarts
are used up, so that a supervisor can start it again or elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Generator
from typing import Any

import uvicorn
import uvloop
from rich.console import Console

from weft.config import EngineConfig
from weft.errors import ConfigError, UserError, WeftError
from weft.fleet.fleet import Fleet
from weft.router.protocol import Router
from weft.router.routers import make_router
from weft.server.access_log import log_access_as_json
from weft.server.app import build_app
from weft.server.banner import StartProgress, base_url, print_banner
from weft.server.client import ASSEMBLE
from weft.server.config import DEFAULT_PORT, PORTS_TRIED, ServerConfig
from weft.server.connection import BoundedProtocol
from weft.server.service import Service, load_served_model

EXIT_OK, EXIT_ENGINE_DIED, EXIT_CONFIG, EXIT_STALLED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
_BACKLOG = 2048
_OTHER_FILES = 256
"""File descriptors that the server needs besides its connections."""
_LAST_ANSWERS_S = 1.0
"""How long responses that are already decided (errors, last chunks) may take to leave."""
_log = logging.getLogger("weft.server")
_LOOKS = frozenset({"/health", "/metrics", "/v1/cache", "/load"})


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, factory: str = ASSEMBLE) -> int:
    """Serves until it is told to stop; returns the exit code. Call it from the main thread.

    ``factory`` ("module:function") builds the engine in its process; tests put scripted ones here.
    """
    _set_up_logging(server_config)
    console = Console(stderr=False, soft_wrap=True)
    try:
        server_config.check()
        listener = bind(server_config)
        progress = StartProgress(console)
        fleet = Fleet(engine_config, replicas=server_config.replicas, restarts=server_config.restarts,
                      factory=factory, record=server_config.recording(),
                      stall_after_s=server_config.stall_after, on_progress=progress.show,
                      router=_router(server_config))
        service = Service(server_config, fleet)
        if service.responses is not None and server_config.response_store is not None:
            service.responses.open_now()
    except UserError as error:
        _complain(error)
        return EXIT_CONFIG
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Serving(service, listener, console, progress).run())


def _router(config: ServerConfig) -> Router | None:
    """None with one replica: there is nothing to choose, and its engine reports no checkpoints."""
    return make_router(config.router, time.monotonic) if config.replicas > 1 else None


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError that names the flag to change."""
    if config.port is not None:
        return _listen(config.host, config.port)
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED):
        with contextlib.suppress(PortBusyError):
            return _listen(config.host, port)
    raise ConfigError(f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} are all in use; name a free "
                      "one with --port (--port 0 takes any)", param="--port")


class PortBusyError(ConfigError):
    """Another program listens on the port."""


class Serving:
    """One run of the server: the engine, HTTP, and what signals do to them."""

    def __init__(self, service: Service, listener: socket.socket, console: Console,
                 progress: StartProgress) -> None:
        self._service = service
        self._engine = service.engine
        self._config = service.config
        self._listener = listener
        self._console = console
        self._progress = progress
        self._first_stop, self._second_stop = asyncio.Event(), asyncio.Event()
        host, port = listener.getsockname()[:2]
        self._url = base_url(self._config.host if self._config.host else host, port)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        _raise_file_limit(self._config.max_connections)
        edge = self._service.edge
        sweeping = asyncio.create_task(edge.sweep_forever())
        http = _http_server(self._service)
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        self._say(f"listening on {self._url}; answers 503 until the model is ready")
        try:
            await self._engine.start()
            return await self._until_stopped()
        finally:
            await self._engine.stop("the server was stopped")
            http.should_exit = True
            await _within(serving, _LAST_ANSWERS_S)
            edge.abort_all()
            sweeping.cancel()
            http.force_exit = True
            await serving
            await self._service.close()

    async def _until_stopped(self) -> int:
        try:
            if not await _first_of(self._open(), self._first_stop.wait()):
                return EXIT_INTERRUPTED  # there was nothing to drain
        except WeftError as error:
            self._progress.end()
            _complain(error)
            return EXIT_CONFIG if isinstance(error, UserError) else EXIT_ENGINE_DIED
        finally:
            self._progress.end()
        assert self._service.model is not None
        print_banner(self._console, self._service.model, self._url, self._config)
        if await _first_of(self._engine.died(), self._first_stop.wait()):
            return self._engine_lost()
        for work in self._service.background:
            await work.stop()
        return await self._drain()

    def _engine_lost(self) -> int:
        assert self._engine.death is not None
        _complain(self._engine.death)
        self._say(f"no engine is left, and the restarts are used up (--restarts {self._config.restarts})")
        return EXIT_STALLED if self._engine.stalled else EXIT_ENGINE_DIED

    async def _open(self) -> None:
        """Waits for the engine, then reads the model's tokenizer and template."""
        info = await self._engine.ready()
        self._service.open(await asyncio.to_thread(load_served_model, info, self._config))
        for work in self._service.background:
            work.start()

    async def _drain(self) -> int:
        service = self._service
        service.draining = True
        if service.active:
            self._say(f"finishing {service.active} request{'' if service.active == 1 else 's'}, at most "
                      f"{self._config.drain_timeout:g} s; "
                      "Ctrl-C again stops at once")
        finished = asyncio.ensure_future(service.idle.wait())
        try:
            await _within(_first_of(finished, _first_of(self._second_stop.wait(), self._engine.died())),
                          self._config.drain_timeout)
        finally:
            finished.cancel()
        if self._second_stop.is_set():
            return EXIT_INTERRUPTED
        if self._engine.death is not None:
            return self._engine_lost()
        if service.active:
            self._say(f"{service.active} requests did not finish in {self._config.drain_timeout:g} s "
                      "(--drain-timeout) and are cut")
        return EXIT_OK

    def _on_signal(self) -> None:
        (self._second_stop if self._first_stop.is_set() else self._first_stop).set()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: what a signal means is decided above."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _http_server(service: Service) -> _HttpServer:
    config = service.config
    protocol: Any = functools.partial(BoundedProtocol, edge=service.edge)  # called as a class is called
    return _HttpServer(uvicorn.Config(
        build_app(service), http=protocol, lifespan="off", ws="none", log_config=None,
        access_log=config.log_level in ("debug", "info"), server_header=False, backlog=_BACKLOG,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # it is only added to a time
        timeout_graceful_shutdown=1))


def _raise_file_limit(connections: int) -> None:
    """A connection is a file descriptor, and the usual limit is 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Twice: a refused connection lingers.
    wanted = 2 * connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}", param="--host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusyError(f"port {port} is in use on {host}; name a free one with --port (--port 0 "
                                "takes any), or leave --port out and the next free one is taken",
                                param="--port") from None
        flag = "--port" if error.errno == errno.EACCES else "--host"
        raise ConfigError(f"cannot listen on {host} port {port}: {error}", param=flag) from error
    listener.setblocking(False)
    return listener


async def _first_of(first: Awaitable[object], second: Awaitable[object]) -> bool:
    """Whether ``first`` was it (with its exception, if it had one); the other is cancelled."""
    one, two = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.wait((one, two), return_when=asyncio.FIRST_COMPLETED)
        if one.done():
            one.result()
        return one.done()
    finally:
        one.cancel()
        two.cancel()


async def _within(work: Awaitable[object], seconds: float) -> None:
    """Waits for ``work`` that long; a task that is not done goes on, anything else is cancelled."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task,), timeout=seconds)
    if not task.done() and not isinstance(work, asyncio.Future):
        task.cancel()


def _complain(error: WeftError) -> None:
    print(f"error: {error.message}", file=sys.stderr, flush=True)


def _set_up_logging(config: ServerConfig) -> None:
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
