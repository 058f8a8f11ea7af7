"""``weft serve``: from two configs to an exit code.

    bind the port -> start the engine -> import and start HTTP (503 "starting") -> banner -> serve
                                                                          |
                    first Ctrl-C or SIGTERM: drain                        |
                    (new requests 503, running ones finish,   <-----------+
                    at most limits.drain_timeout seconds)
                    second: stop at once

The port is bound first, so that a busy port is reported before a model is loaded. The engine's process is started
before the modules of HTTP are imported, so that both processes import at the same time.

Exit codes: 0 after a drain, also after one that its time limit cut short; 130 after the second Ctrl-C; 2 when
the flags or the checkpoint cannot work; 1 when the last engine died, 3 when it stalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import uvloop
from rich.console import Console

from weft.config import EngineConfig
from weft.costs.step import given_cost
from weft.errors import ConfigError, UserError, WeftError
from weft.fleet.fleet import Fleet
from weft.fleet.places import visible_gpus
from weft.fleet.start_progress import ServiceConsole, StartProgress
from weft.host import end_start, usable_cores
from weft.info import ModelInfo
from weft.logs import is_json, set_up_logging
from weft.models.hub import local_checkpoint, resolve_model
from weft.models.local import model_directory, whole_models
from weft.rpc.client import ASSEMBLE
from weft.rpc.link import new_token, read_or_create_token, tcp_address
from weft.schedule.snapshots import parse_snapshots
from weft.server.banner import print_banner
from weft.server.config import ServerConfig
from weft.server.early_checks import check_adapters, check_device, check_early, make_directories
from weft.server.fleets import ALL_HOSTS, new_fleet
from weft.server.listening import listen_at, listening, own_url, tls_context
from weft.server.running import Announcement
from weft.speculation.drafter import parse_sources

if TYPE_CHECKING:
    from weft.fleet.ray_fleet import RayFleet
    from weft.server.models import Models
    from weft.server.service import Service

_LOOK_S = 1.0
"""Seconds between two scans of the models on this machine's disk."""
_UNTIL_READY = "answers 503 until the model is ready"
EXIT_OK, EXIT_ENGINE_DIED, EXIT_CONFIG, EXIT_STALLED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, models: Sequence[str] = (), *, factory: str = ASSEMBLE
) -> int:
    """Serve until a signal; return the exit code. Call it from the main thread. ``models``: the models as the command
    names them, if there are several.

    ``factory`` ("module:function") builds the engine in its process; tests pass scripted ones.
    """
    console = ServiceConsole(soft_wrap=True)
    with contextlib.ExitStack() as until_end:
        try:
            serving_once = _prepared(engine_config, server_config, models, console, factory, until_end)
        except UserError as error:
            _complain(error)
            return EXIT_CONFIG
        runner = until_end.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        name = ", ".join(models) or engine_config.model
        until_end.enter_context(
            contextlib.closing(Announcement(serving_once.url, name, certificate=server_config.ssl_certfile))
        )
        return runner.run(serving_once.run())


def _prepared(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    models: Sequence[str],
    console: Console,
    factory: str,
    until_end: contextlib.ExitStack,
) -> Serving:
    """Check both configs, and listen until ``until_end`` closes. Raise ConfigError, CheckpointError."""
    set_up_logging(server_config.log_level, form=server_config.log_format, file=server_config.log_file)
    server_config.check()
    engine_config.check()
    parse_sources(engine_config.speculate)
    parse_snapshots(engine_config.snapshots)
    given_cost(engine_config.step_costs)
    tls_context(server_config)
    check_early(engine_config, server_config)
    if factory == ASSEMBLE and server_config.own_replicas:
        check_device(engine_config)
    if len(models) > 1 or server_config.pulled:
        return _on_demand(engine_config, server_config, models, console, factory, until_end)
    check_adapters(engine_config)
    if server_config.own_replicas and factory == ASSEMBLE:
        _check_model(engine_config)
    if engine_config.model is None and (on_disk := whole_models()):
        console.print(
            f"serving the embedded model: name one of {', '.join(on_disk)} to serve it, or --pulled for all",
            markup=False,
            highlight=False,
        )
    make_directories(engine_config)
    listener = until_end.enter_context(listening(server_config))
    progress = StartProgress(console)
    link = joining(server_config, console)
    fleet = new_fleet(engine_config, server_config, factory=factory, link=link, on_progress=progress.show)
    ray = placed_by_ray(server_config, fleet, link, ranks=engine_config.tp, device=engine_config.device)
    service = partial(new_service, server_config, fleet, listener)
    return Serving(server_config, service, listener, console, fleet=fleet, progress=progress, ray=ray)


def _on_demand(
    engine: EngineConfig,
    config: ServerConfig,
    models: Sequence[str],
    console: Console,
    factory: str,
    until_end: contextlib.ExitStack,
) -> Serving:
    """Return a server of several models. Raise ConfigError, CheckpointError."""
    from weft.planning.together import share_of, share_out
    from weft.server.on_demand import OnDemandModels
    from weft.server.service import Service
    from weft.server.sources import memory_of, read_pulled, read_sources

    sources = read_sources(models or [_one_model(engine, config)], engine, config, reads_weights=factory == ASSEMBLE)
    check_adapters(engine)
    memory = memory_of(engine)
    needs = [source.need for source in sources]
    # Models that come later need room, so with --pulled no model gets more than it asks for.
    shares = {need.name: share_of(need, memory) for need in needs} if config.pulled else share_out(needs, memory)
    make_directories(engine)
    listener = until_end.enter_context(listening(config))
    hosted = OnDemandModels(
        sources,
        config,
        shares=shares,
        memory_bytes=memory,
        factory=factory,
        background=engine.device == "cpu" or not visible_gpus(),  # a GPU's context is its thread's
        tell=lambda line: console.print(line, markup=False, highlight=False),
        read_pulled=partial(read_pulled, engine, config) if config.pulled else None,
    )
    service = _with_open_stores(Service(config, hosted))
    return Serving(config, lambda: service, listener, console)


def _one_model(engine: EngineConfig, config: ServerConfig) -> str:
    """Return NAME=MODEL of the only model; of the embedded model if none is named. Raise ConfigError."""
    from weft.assemble import find_model

    if engine.model is None:
        name, directory = find_model(engine, lambda text: None)
        return f"{name}={directory}"
    return engine.model


def _with_open_stores(service: Service) -> Service:
    """Open the stores, so that a file of another kind is an error before any request is served. Raise ConfigError."""
    if service.responses is not None and service.config.response_store is not None:
        service.responses.open_now()
    if service.names.store is not None:
        service.names.store.open_now()
    return service


def _check_model(config: EngineConfig) -> None:
    """Raise ConfigError, before anything listens, for a wrong path and for ranks that do not divide the model. For a
    model on the hub only ``config.json`` is fetched, and only with several ranks."""
    local = config.model is None or local_checkpoint(config.model) is not None
    if config.tp > 1:
        from weft.assemble import find_model
        from weft.assemble.ranks import check_divides, check_no_gguf

        check_no_gguf(config, not local and ":" in str(config.model))  # OWNER/NAME:TYPE
        check_divides(
            config,
            find_model(config, lambda text: None)[1]
            if local
            else resolve_model(str(config.model), config.revision, config_only=True),
        )


def new_service(config: ServerConfig, fleet: Fleet, listener: socket.socket) -> Service:
    """Return the service of the only HTTP process, or of the supervisor of several. Raise ConfigError."""
    from weft.server.models import Models, PinnedModel
    from weft.server.service import Service

    models = Models([PinnedModel(fleet)])
    if config.http_workers == 1:
        return _with_open_stores(Service(config, models))
    from weft.server.workers.supervisor import Workers

    workers = Workers(config, fleet, listener.fileno())
    inner = dataclasses.replace(
        config,
        max_connections_per_address=0,
        log_level="warning",  # workers log and trace the requests that they answer and forward, and speak TLS
        otlp_endpoint=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        ssl_keyfile_password=None,
        ssl_ca_certs=None,
    )
    service = Service(inner, models, workers.counts, is_supervisor=True)
    service.workers = workers
    return _with_open_stores(service)


def joining(config: ServerConfig, console: Console) -> tuple[str, str] | None:
    """Return the address where engines of other machines join, as ZeroMQ writes it, and the token. Without a token
    file, Ray gets a token that is in no file. Raise ConfigError for the file."""
    address = config.listen_engines or (None if config.ray is None else "0.0.0.0:0")
    if address is None:
        return None
    if config.token is None:
        return tcp_address(address, flag="--listen-engines"), new_token()
    token, is_new = read_or_create_token(config.token)
    if is_new:
        console.print(
            f"created the token {config.token}; machines that join need a copy of it", markup=False, highlight=False
        )
    return tcp_address(address, flag="--listen-engines"), token


def placed_by_ray(
    config: ServerConfig, fleet: Fleet, link: tuple[str, str] | None, *, ranks: int, device: str
) -> RayFleet | None:
    """Return the replicas that Ray places, if any. ``ranks``: processes of a replica. They share one bundle, so Ray
    places all of them on one node."""
    if config.ray is None or link is None:
        return None
    from weft.fleet.ray_fleet import RayFleet
    from weft.fleet.ray_placer import PlacerOrder

    host = (config.listen_engines or "").rpartition(":")[0]
    gpus = float(device.startswith("cuda")) if config.ray_gpus is None else config.ray_gpus
    order = PlacerOrder(
        address=config.ray,
        server=f"{'' if host in ALL_HOSTS else host}:0",
        token=link[1],
        own={},
        cpus=ranks * config.ray_cpus,
        gpus=ranks * gpus,
    )
    return RayFleet(fleet, order, *config.replica_range())


class Serving:
    """One run of the server: HTTP, the engines that start with it, and its reaction to signals. ``new_service`` is
    called in a thread once the engines of ``fleet`` are started; without a fleet, requests start engines."""

    def __init__(
        self,
        config: ServerConfig,
        new_service: Callable[[], Service],
        listener: socket.socket,
        console: Console,
        *,
        fleet: Fleet | None = None,
        progress: StartProgress | None = None,
        ray: RayFleet | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._new_service = new_service
        self._ray = ray
        self._listener = listener
        self._console = console
        self._progress = progress or StartProgress(console)
        self._service: Service | None = None
        self._first_stop, self._second_stop = asyncio.Event(), asyncio.Event()
        self.url = own_url(config, listener)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._start_engines()
            service = self._service = await asyncio.to_thread(self._new_service)
        except WeftError as error:
            await self._stop_engines()
            return self._failed(error)
        from weft.server.http import serving

        workers = service.workers
        if workers is not None:
            workers.start()
        listener = self._listener if workers is None else listen_at(workers.http_socket)
        async with serving(service, listener):
            until = "models are loaded when they are asked for" if self._fleet is None else _UNTIL_READY
            self._say(f"listening on {self.url}; {until}")
            if (replicas := self._config.own_replicas) > (cores := usable_cores()):
                self._say(
                    f"--replicas {replicas} share {cores} cores: they take turns, and each gets a part "
                    f"of the free memory; more than {cores} are no faster"
                )
            try:
                return await self._until_stopped(service)
            finally:
                await self._stop_engines()
                if workers is not None:
                    await workers.stop()

    async def _start_engines(self) -> None:
        """Start the engines. Raise ConfigError where other machines cannot join."""
        if self._fleet is not None:
            await self._fleet.start()
        if self._ray is not None:
            self._ray.start()

    async def _until_stopped(self, service: Service) -> int:
        try:
            if self._ray is None and self._fleet is not None and self._fleet.joined is not None:
                self._say(f"machines join with: weft join HOST:{self._fleet.joined.port} --token FILE")
            if not await _first_of(self._open(service), self._first_stop.wait()):
                return EXIT_INTERRUPTED  # nothing to drain
        except WeftError as error:
            return self._failed(error)
        finally:
            self._progress.end()
        print_banner(self._console, service.models, self.url, self._config)
        looking = asyncio.create_task(_look_forever(service.models))
        try:
            if await _first_of(self._died(), self._first_stop.wait()):
                return self._engine_lost()
        finally:
            looking.cancel()
        for work in service.background:
            await work.stop()
        return await self._drain(service)

    def _failed(self, error: WeftError) -> int:
        """Return the exit code of a start that failed."""
        self._progress.end()
        _complain(error)
        return EXIT_CONFIG if isinstance(error, UserError) else EXIT_ENGINE_DIED

    async def _stop_engines(self) -> None:
        reason = "the server was stopped"
        if self._ray is not None:
            await self._ray.stop()
        if self._service is not None:
            await self._service.models.stop(reason)
        elif self._fleet is not None:
            await self._fleet.stop(reason)

    async def _died(self) -> None:
        """Wait for the death of the last engine that started with the server. Engines that requests start are replaced
        by the next request."""
        await (asyncio.Event().wait() if self._fleet is None else self._fleet.died())

    def _engine_lost(self) -> int:
        assert self._fleet is not None
        assert self._fleet.death is not None
        _complain(self._fleet.death)
        self._say(f"no engine is left, and the restarts are used up (limits.restarts {self._config.restarts})")
        return EXIT_STALLED if self._fleet.stalled else EXIT_ENGINE_DIED

    async def _open(self, service: Service) -> None:
        """Open HTTP; return once requests are answered."""
        if self._fleet is not None:
            await self._open_model(service, self._fleet)
        end_start()
        await service.models.look()
        for work in service.background:
            work.start()

    async def _open_model(self, service: Service, fleet: Fleet) -> None:
        """Wait for the engines, then read the model's tokenizer and template; the process for the template starts
        meanwhile. The HTTP workers open first, so that after the first healthy answer no process of this server refuses
        a request as not ready."""
        from weft.server.served_model import load_served_model
        from weft.text.template_sandbox import template_worker

        worker = await asyncio.to_thread(template_worker, self._config.template_bytes())
        with contextlib.ExitStack() as unused:
            unused.callback(worker.end)
            info = await fleet.ready()
            if not self._config.own_replicas:
                info = await asyncio.to_thread(_with_own_text, info, fleet.config)
            model = await asyncio.to_thread(load_served_model, info, self._config, (), worker)
            if model.renderer.template is not None:
                unused.pop_all()
        if service.workers is not None:
            service.workers.info = info
            await service.workers.opened()
        service.open(model)

    async def _drain(self, service: Service) -> int:
        active = service.active
        if active:
            self._say(
                f"finishing {active} request{'' if active == 1 else 's'}, at most "
                f"{self._config.drain_timeout:g} s; "
                "Ctrl-C again stops at once"
            )
        finished = asyncio.ensure_future(service.drain())
        try:
            await _within(
                _first_of(finished, _first_of(self._second_stop.wait(), self._died())), self._config.drain_timeout
            )
        finally:
            finished.cancel()
        if self._second_stop.is_set():
            return EXIT_INTERRUPTED
        if service.models.death is not None:
            return self._engine_lost()
        if active := service.active:
            self._say(
                f"{active} requests did not finish in {self._config.drain_timeout:g} s "
                "(limits.drain_timeout) and are cut"
            )
        return EXIT_OK

    def _on_signal(self) -> None:
        (self._second_stop if self._first_stop.is_set() else self._first_stop).set()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


async def _look_forever(models: Models) -> None:
    """Follow changes that `weft pull` and `weft rm` make in other processes."""
    seen = None
    while models.serves_pulled:
        now = await asyncio.to_thread(_changed_s)
        if now != seen and seen is not None:
            await models.look()
        seen = now
        await asyncio.sleep(_LOOK_S)


def _changed_s() -> float:
    """Return the time of the last change of this machine's models."""
    try:
        return model_directory().stat().st_mtime
    except OSError:
        return 0.0


def _with_own_text(info: ModelInfo, config: EngineConfig) -> ModelInfo:
    """Return ``info`` of a joined replica, with this machine's tokenizer and template. Raise ConfigError if the
    tokenizers differ."""
    from weft.assemble import find_model  # the modules of the engine; other servers need none
    from weft.assemble.identity import vocabulary_digest

    _, directory = find_model(config, lambda text: None, text_only=True)
    own, other = vocabulary_digest(directory), info.identity.get("tokenizer")
    if other not in (own, None):
        raise ConfigError(
            f"{directory} has another tokenizer ({own}) than the first replica that joined ({other})", param="--model"
        )
    return msgspec.structs.replace(info, directory=str(directory))


async def _first_of(first: Awaitable[object], second: Awaitable[object]) -> bool:
    """Wait until either ends, and cancel the other. Return whether ``first`` ended first; raise its exception, if it
    had one."""
    first_task, second_task = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.wait((first_task, second_task), return_when=asyncio.FIRST_COMPLETED)
        if first_task.done():
            first_task.result()
        return first_task.done()
    finally:
        first_task.cancel()
        second_task.cancel()


async def _within(work: Awaitable[object], seconds: float) -> None:
    """Wait ``seconds`` for ``work``. A task that is not done by then goes on; any other awaitable is cancelled."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task,), timeout=seconds)
    if not task.done() and not isinstance(work, asyncio.Future):
        task.cancel()


def _complain(error: WeftError) -> None:
    if is_json():
        logging.getLogger("weft").error(error.message)
    else:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
