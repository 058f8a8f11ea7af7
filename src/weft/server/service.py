"""The state that handlers share: the models, the names that users created, the limits.

The server answers /health from its first second. The text side of a model is loaded once the engines have reported
their directory. Before that, while draining, and after the death of the engines, ``model_for`` raises a 503 with the
reason.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from weft.engine.stats import NamedPrefix
from weft.errors import EngineUnavailableError, RequestError
from weft.fleet.fleet import Fleet
from weft.fleet.live_request import UnreadAnswers
from weft.objects.sessions import read_cipher
from weft.server.access_log import log_request
from weft.server.batches.files import open_file_store
from weft.server.config import ServerConfig
from weft.server.edge import HttpEdge, SharedCounts, Tally
from weft.server.metrics import EngineReport, FleetReport, Metrics
from weft.server.models import ANY_NAME, HostedModel, ListedModel, Models
from weft.server.presets import Preset, Presets
from weft.server.protocol import LARGE_BODY_BYTES, BodyVerdict
from weft.server.responses.background import ResponseRuns
from weft.server.responses.store import ResponseStore
from weft.server.served_model import ServedModel, preset_style
from weft.server.sessions.slot_table import SlotTable
from weft.server.sessions.store import SessionStore
from weft.server.tracing import RequestTrace, RequestTracer
from weft.text.current_request import API_KEY
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

if TYPE_CHECKING:
    from weft.server.workers.supervisor import Workers

_DRAIN_LOOK_S = 0.05
_SECONDS = 30.0


class TooManyValuesError(RequestError):
    """The body has more than limits.max_json_values values."""

    status = 413


class BodyChecker:
    def __init__(self, values_max: int) -> None:
        function, start = JobFunction("weft.server.protocol:prepare_worker"), values_max.to_bytes(8, "little")
        self._lane = WorkerLane(lambda: BoundedWorker(function, start), _SECONDS)

    async def check(self, raw: bytes) -> None:
        """Check a body; return at once for a small one.

        Raises TooManyValuesError, RequestError, EngineUnavailableError."""
        if len(raw) <= LARGE_BODY_BYTES:
            return
        try:
            answer = msgspec.msgpack.decode(await self._lane.ask(raw, API_KEY.get()), type=BodyVerdict)
        except OSError:
            raise EngineUnavailableError("the body took too long to check; try again later") from None
        if answer.is_too_large:
            raise TooManyValuesError(answer.message, param="limits.max_json_values", code="too_many_values")
        if answer.message:
            raise RequestError(answer.message, param=answer.param, code="invalid_json")


class Background(Protocol):
    """Background work of the server, from the time when the model is ready until draining."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Service:
    """The state that handlers share. ``counts``: of all HTTP processes, if there are several."""

    def __init__(
        self, config: ServerConfig, models: Models, counts: SharedCounts | None = None, *, is_supervisor: bool = False
    ) -> None:
        self.config = config
        self.models = models
        self.counts = counts
        self.workers: Workers | None = None
        self.edge = HttpEdge(config.edge_limits(), counts, is_inner=is_supervisor)
        processes = 1 if counts is None else counts.processes
        self.unread = UnreadAnswers(config.max_unread_mb * 1_000_000 // processes)
        self.body_checker = BodyChecker(config.max_json_values)
        self.metrics = Metrics(config.metrics_prefix, self.edge)
        self.names = Presets(config.presets())
        models.follow(self._count_steps)
        models.created_names = self.names.all
        path = config.response_path()
        self.files = open_file_store(
            config.file_directory(), config.file_limits(), is_default=config.file_store is None
        )
        self.background: list[Background] = []
        self.responses = None if path is None else ResponseStore(path, config.response_limits())
        self.response_runs = None if self.responses is None else ResponseRuns(self.responses)
        self.sessions = (
            None
            if self.responses is None
            else SessionStore(self.responses, config.session_limits(), read_cipher(config.session_key))
        )
        self.slots = SlotTable()
        self.pinned: Callable[[HostedModel], Awaitable[Sequence[NamedPrefix]]] | None = None
        """Function that returns the prefixes that engines of a model pin when they start."""
        self.tracer = None if config.otlp_endpoint is None else RequestTracer(config.otlp_endpoint)
        self._active = Tally() if counts is None else counts.requests
        self._drains = Tally() if counts is None else counts.drains

    def _count_steps(self, model: HostedModel, fleet: Fleet) -> None:
        if isinstance(fleet, Fleet):  # an HTTP worker has none
            fleet.engines.pinned = functools.partial(self._pinned, model)
        fleet.on_step_tokens = lambda replica, sizes: self.metrics.steps_ran(model.name, replica, sizes)

    async def _pinned(self, model: HostedModel) -> Sequence[NamedPrefix]:
        return () if self.pinned is None else await self.pinned(model)

    def request_ended(self, trace: RequestTrace, ignored: list[str]) -> None:
        """Log, count and trace a request."""
        log_request(trace, ignored)
        self.metrics.request_ended(trace)
        if self.tracer is not None:
            self.tracer.ended(trace)

    def enter(self) -> None:
        """Count a request as active; call ``leave`` when it has ended."""
        self._active.add(1)

    def leave(self) -> None:
        self._active.add(-1)

    @property
    def active(self) -> int:
        """Number of active requests, over all HTTP processes."""
        return self._active.total()

    @property
    def draining(self) -> bool:
        return self._drains.total() > 0

    async def drain(self) -> None:
        """Stop taking new requests, in all HTTP processes, and wait until no request is active."""
        self._drains.add(1)
        await asyncio.sleep(_DRAIN_LOOK_S)  # by then, requests that another process has just accepted are counted
        while self.active:
            await asyncio.sleep(_DRAIN_LOOK_S)

    async def close(self) -> None:
        """Close the parts of the server, after the last request."""
        if self.response_runs is not None:
            await self.response_runs.close()
        if self.responses is not None:
            await self.responses.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def open(self, served: ServedModel) -> None:
        """Serve the first model, whose engines are ready. Raise ConfigError."""
        self.models.learn(self.models.first, served)
        self.metrics.of(served.name)

    async def model_for(self, name: str | None) -> ServedModel:
        """Return the model of the name in a request; an empty name is none. Raise EngineUnavailableError,
        UnknownModelError, QueueFullError, ModelLoadError."""
        if self._drains.total():
            raise _draining()
        own, preset = self.names.meant(name or None, self.models.has)
        model = await self.models.model_for(own)
        return model if preset is None else await self.under(preset, model)

    async def under(self, preset: Preset, model: ServedModel) -> ServedModel:
        """Return ``model`` with the settings of the created name ``preset``. Raise RequestError."""
        renderer = replace(model.renderer, begun=preset.begun)
        style = await self.names.style(
            preset, model.vocabulary, functools.partial(preset_style, self.config, renderer.tokenizer, model.info)
        )
        if style is not None:
            renderer = replace(renderer, template=style[0], dialect=style[1])
        return replace(model, names=(preset.name,), preset=preset, renderer=renderer)

    def listed(self) -> list[ListedModel]:
        """Return every name that requests may use: models, adapters, then created names. Raise EngineUnavailableError,
        PresetStoreError."""
        self.check_open()
        own = {named.name: named for named in self.models.listed()}
        return [
            *own.values(),
            *(
                replace(
                    own[named.model], name=named.name, created_s=int(named.created_s), parent=named.model, preset=named
                )
                for named in self.names.all().values()
                if named.model in own and named.name not in own
            ),
        ]

    def own_name(self, name: str | None) -> str:
        """Return the listed name of the model, adapter or created name that a request names. Raise
        UnknownModelError."""
        own, preset = self.names.meant(name, self.models.has)
        if preset is not None:
            return preset.name
        model = self.models.find(own)
        return model.name if own in (None, ANY_NAME) else str(own)

    async def text_side(self, name: str | None) -> ServedModel:
        """Return the text side of a name without loading the model. Raise UnknownModelError."""
        self.check_open()
        own, preset = self.names.meant(name, self.models.has)
        host = self.models.find(own)
        model = await host.text_side() if host.served is None else self.models.served_as(own)
        return model if preset is None else await self.under(preset, model)

    def host_of(self, name: str | None) -> HostedModel:
        """Return the model of a name, loaded or not. Raise EngineUnavailableError, UnknownModelError."""
        self.check_open()
        return self.models.find(self.names.meant(name, self.models.has)[0])

    def check_open(self) -> None:
        """Raise EngineUnavailableError if the server takes no requests."""
        if self.draining:
            raise _draining()
        self.models.check_alive()

    def fleet_of(self, name: str | None) -> Fleet:
        """Return the engines as ``Models.fleet_of`` does. Raise EngineUnavailableError if the server takes no
        requests."""
        self.check_open()
        return self.models.fleet_of(name)

    def fleet_reports(self) -> list[FleetReport]:
        """Return a report of each model, for /metrics."""
        reports = [_report(model, self.models.budget) for model in self.models.hosted]
        if self.sessions is not None:
            reports[0] = replace(reports[0], sessions=(self.sessions.table.count, self.sessions.table.bytes))
        return reports

    def health(self) -> tuple[int, Mapping[str, Any]]:
        status, body = self.models.health()
        if status == 200 and self.draining:
            return 503, {"status": "draining", "reason": "the server is shutting down"}
        return status, body | (self._store_details() if status == 200 else {})

    def weight_version(self) -> str:
        """Return the name that the last update gave the weights; empty for the weights of the start."""
        return next((fleet.weight_version for _, fleet in self.models.fleets if fleet.weight_version), "")

    def _store_details(self) -> dict[str, str]:
        """Return the fields of ``/health`` about the store. ``/health`` needs no key, so the fields name the kind of
        fault, but neither bucket nor address."""
        faults = {
            stats.store.store.bucket_fault.partition(":")[0]
            for _, fleet in self.models.fleets
            for _, stats in fleet.engines.stats()
            if stats.store is not None
        } - {""}
        return {"store": f"the bucket does not answer: {', '.join(sorted(faults))}"} if faults else {}


def _draining() -> EngineUnavailableError:
    return EngineUnavailableError("this server is shutting down and takes no new requests")


def _report(model: HostedModel, budget: int | None) -> FleetReport:
    fleet = model.fleet
    if fleet is None:
        return FleetReport(model.name, [], 0, 0, resident=model.resident, budget=budget)
    return FleetReport(
        model.name,
        [
            EngineReport(replica.number, replica.ready, replica.restart_count, replica.engine.stats, replica.host)
            for replica in fleet.replicas
            if replica.state != "left"
        ],
        fleet.requests.resume_count,
        fleet.requests.deadly_count,
        fleet.router.counts(),
        fleet.requests.handoff_count,
        model.resident,
        budget,
    )
