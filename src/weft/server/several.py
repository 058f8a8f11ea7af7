"""Several models behind one address: each has engines of its own while it is loaded.

    request --model_for--> the model's text side      known from its first load on
            --enter------> its fleet                  loads it first if it is absent; waits for room

    Residency (pure)  <--events--  SeveralModels  --actions-->  _load, _unload: a Fleet, started or stopped

``planning.residency`` decides which models are in memory; this file does what it says. A loaded model is a
``Fleet`` of one engine process, so deaths, resumes and queues are those of a server with one model. Its share
of the memory goes to the process (``HostShare``), which makes its arena of what its weights leave. A process
that loads gives way to those that answer.

A model that fails to load fails the requests that wait for it, and nothing else. A request holds its model
from ``enter`` until its answer has ended, and is counted while it waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from weft.adapters import named_paths
from weft.config import EngineConfig, Sizes
from weft.default_sampling import read_default_sampling
from weft.errors import (
    ConfigError,
    EngineUnavailableError,
    ModelLoadError,
    QueueFullError,
    UnknownModelError,
    WeftError,
)
from weft.fleet.fleet import Fleet
from weft.info import ModelInfo
from weft.models.local import whole_models
from weft.planning.residency import Residency, Resident, Use
from weft.planning.together import ModelNeed, share_of
from weft.rpc.client import ASSEMBLE, HostShare
from weft.server.adapter_names import AdapterNames
from weft.server.config import ServerConfig
from weft.server.service import ANY_NAME, KeepAlive, ServedModel, load_served_model, unknown_model
from weft.text.pooling import is_embedder
from weft.text.tokenizer import Tokenizer
from weft.units import format_bytes

_log = logging.getLogger("weft.server")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One of the models: where it is, how it is served, what it needs. ``server``: with its own template and
    parsers. ``tokenizers``: its own one, where it could be read at the start."""

    name: str
    engine: EngineConfig
    server: ServerConfig
    directory: Path
    need: ModelNeed
    tokenizers: tuple[Tokenizer, ...] = ()
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    pulled_s: float | None = None
    """When it came, of a model that is served as long as it is on this machine's disk."""


class HostedModel:
    """``fleet`` while it is loaded; ``served`` from its first load on; ``error``: why the last load failed,
    or why its engines ended."""

    def __init__(self, source: ModelSource, resident: Resident, several: SeveralModels) -> None:
        self.source = source
        self.name = source.name
        self.resident = resident
        self.fleet: Fleet | None = None
        self.served: ServedModel | None = None
        self.error: WeftError | None = None
        self.created_s = int(time.time())
        self.waiters: list[asyncio.Future[Use]] = []
        self.watch: asyncio.Task[None] | None = None
        self._several = several
        self._preview: ServedModel | None = None

    @property
    def state(self) -> str:
        """absent, loading, loaded, unloading, or failed: the last load was in vain."""
        return "failed" if self.resident.state == "absent" and self.error is not None else self.resident.state

    @property
    def reason(self) -> str:
        """Return why the last load failed; empty where it did not."""
        return self.error.message if self.state == "failed" and self.error is not None else ""

    @property
    def info(self) -> ModelInfo:
        """Of its last load; before it, what config.json says."""
        if self.served is not None:
            return self.served.info
        need, directory = self.source.need, self.source.directory
        return ModelInfo(
            name=self.name,
            directory=str(directory),
            family=need.family,
            layers="",
            dtype=need.dtype,
            vocab_size=need.vocab_size,
            weights_bytes=need.weights_bytes,
            load_s=0.0,
            device="",
            threads=0,
            kernels="",
            sizes=Sizes(need.max_positions, 0, 0, 0, 0),
            memory=[],
            notes=[],
            eos_ids=[],
            generation_defaults=dict(self.source.generation_defaults),
            default_sampling={
                **read_default_sampling(self.source.engine.default_sampling),
                **self.source.generation_defaults,
            },
            trust_control_tokens=self.source.engine.trust_control_tokens,
            generates=need.causal and not is_embedder(directory),
        )

    async def preview(self) -> ServedModel:
        """Its text side, before its first load too; no request is prepared with that one."""
        if self.served is not None:
            return self.served
        if self._preview is None:
            self._preview = await self.read_text(self.info)
        return self._preview

    async def read_text(self, info: ModelInfo) -> ServedModel:
        """Raises CheckpointError, ConfigError."""
        return await asyncio.to_thread(load_served_model, info, self.source.server, self.source.tokenizers)

    async def enter(self, keep_alive_s: KeepAlive = UNSET) -> FleetUse:
        return await self._several.enter(self, keep_alive_s)

    def unload_soon(self) -> None:
        """Once no request uses it."""
        self._several.unload_soon(self)


class FleetUse:
    """Of a loaded model by one request. ``end`` is idempotent."""

    def __init__(self, fleet: Fleet, end: Callable[[], None]) -> None:
        self.fleet = fleet
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None


class SeveralModels:
    """``shares`` as by ``share_out``. ``background``: loading gives way to answers. ``tell`` gets a line for
    each load and unload. ``read_pulled``: with --pulled, the models on disk besides those that it gets."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        config: ServerConfig,
        *,
        shares: dict[str, int],
        memory_bytes: int,
        factory: str = ASSEMBLE,
        background: bool = True,
        tell: Callable[[str], None] = lambda line: None,
        read_pulled: Callable[[Sequence[ModelSource]], list[ModelSource]] | None = None,
    ) -> None:
        self.default_keep_alive_s = config.keep_alive_s()
        self.memory_bytes = memory_bytes
        self.residency = Residency.of(
            shares,
            memory_bytes,
            waiting_max=sources[0].engine.max_queued_requests,
            keep_alive_s=self.default_keep_alive_s,
        )
        self.models = {source.name: HostedModel(source, self.residency.models[source.name], self) for source in sources}
        self.adapters = AdapterNames()
        self.refused: dict[str, str] = {}
        """Why adapters of models are not served, by MODEL/NAME."""
        self.on_fleet: Callable[[str, Fleet], None] = lambda name, fleet: None
        self.other_names: Callable[[], Iterable[str]] = lambda: ()
        self._config = config
        self._factory = factory
        self._background = background
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._stopped: WeftError | None = None
        self._read_pulled = read_pulled
        self._looks = asyncio.Lock()
        self.unserved: dict[str, str] = {}
        """Why models on disk are not served."""

    # ------------------------------------------------------------------ models that come and go

    @property
    def serves_pulled(self) -> bool:
        return self._read_pulled is not None

    def forgets(self, name: str) -> bool:
        """Return whether the model is served for being on disk alone, and not in memory."""
        model = self.models.get(name)
        return model is not None and model.source.pulled_s is not None and model.resident.is_absent

    async def look(self) -> None:
        """Serve the models that are on disk by now, and no longer those that were removed."""
        if self._read_pulled is None:
            return
        async with self._looks:
            on_disk = await asyncio.to_thread(whole_models)
            for name in [name for name in self.models if self.forgets(name)]:
                if name not in on_disk or on_disk[name].manifest.pulled_s != self.models[name].source.pulled_s:
                    del self.models[name], self.residency.models[name]
            known = [model.source for model in self.models.values()]
            for source in await asyncio.to_thread(self._read_pulled, known):
                self._add(source)

    def _add(self, source: ModelSource) -> None:
        try:
            share = share_of(source.need, self.memory_bytes)
        except ConfigError as error:
            self.unserved[source.name] = error.message
            _log.warning("%s is on disk and is not served: %s", source.name, error.message)
            return
        self.residency.models[source.name] = Resident(source.name, share, self.default_keep_alive_s)
        self.models[source.name] = HostedModel(source, self.residency.models[source.name], self)
        self.unserved.pop(source.name, None)
        self._tell(f"{source.name}: served from this machine's disk, with {format_bytes(share)} once it is asked for")

    # ------------------------------------------------------------------ names

    @property
    def first(self) -> HostedModel:
        """What "default" and a request without a name mean."""
        return next(iter(self.models.values()))

    def adapter_names(self, name: str) -> list[str]:
        """MODEL/NAME of each of a model: those of --lora, and those that were loaded later."""
        model = self.models[name]
        own = [f"{name}/{adapter}" for adapter in named_paths(model.source.engine.lora)]
        bound = [full for full in self.adapters if self.base_of(full) is model]
        refused = [full for full in self.refused if self.base_of(full) is model]
        return list(dict.fromkeys([*own, *bound])) if model.served is None else [*bound, *refused]

    def find(self, name: str | None) -> HostedModel:
        """The model of a name, of an adapter's too. Raises UnknownModelError with those that there are."""
        if name is None or name == ANY_NAME:
            return self.first
        if (model := self._model_of(name)) is not None:
            return model
        names = [
            *self.models,
            *(known for model in self.models.values() for known in self.adapter_names(model.name)),
            *self.other_names(),
        ]
        raise unknown_model(name, names)

    def has(self, name: str) -> bool:
        """A model or an adapter."""
        return self._model_of(name) is not None

    def _model_of(self, name: str) -> HostedModel | None:
        if name in self.models:
            return self.models[name]
        base = self.base_of(name)
        return base if base is not None and name in self.adapter_names(base.name) else None

    async def model_for(self, name: str | None) -> ServedModel:
        """Loads a model that was never loaded: what it serves is known from then on. Raises
        UnknownModelError, and what ``enter`` raises."""
        model = self.find(name)
        if model.served is None:
            (await self.enter(model, keep_fresh=True)).end()
        assert model.served is not None
        if name is None or name in (ANY_NAME, model.name):
            return model.served
        adapter = self.adapters.find(name)
        if adapter is None and name in self.refused:
            raise UnknownModelError(f"the adapter {name!r} is not served: {self.refused[name]}", param="model")
        if adapter is None:  # released while the model was loaded
            return await self.model_for(self.find(name).name)
        return replace(model.served, names=(name,), adapter=adapter)

    def base_of(self, name: str) -> HostedModel | None:
        """The model of an adapter that is called MODEL/NAME."""
        bases = [model for model in self.models.values() if name.startswith(f"{model.name}/")]
        return max(bases, key=lambda model: len(model.name), default=None)

    # ------------------------------------------------------------------ requests

    async def enter(self, model: HostedModel, keep_alive_s: KeepAlive = UNSET, *, keep_fresh: bool = False) -> FleetUse:
        """Returns when the model is loaded and this request is one of its users. ``keep_fresh``: what comes
        next uses it. Raises ModelLoadError, QueueFullError, EngineUnavailableError."""
        if self._stopped is not None:
            raise self._stopped
        entry = self.residency.enter(model.name, time.monotonic())
        if entry == "refused":
            assert model.error is not None
            left_s = model.resident.retry_s - time.monotonic()
            raise ModelLoadError(
                f"the model {model.name!r} is not there: {model.error.message}; it is tried "
                f"again in {math.ceil(left_s)} s",
                left_s,
            )
        if entry == "full":
            raise QueueFullError(
                f"{self.residency.waiting} requests wait for models to be loaded; the limit is "
                f"{self.residency.waiting_max} (limits.max_queued_requests). Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )
        use = self.residency.use(model.name) if entry == "in" else await self._wait(model)
        stays_s = self.default_keep_alive_s if keep_alive_s is UNSET else keep_alive_s
        self.residency.keep_alive(model.name, stays_s, time.monotonic())
        assert model.fleet is not None
        return FleetUse(model.fleet, lambda: self._leave(use, keep_fresh=keep_fresh))

    def unload_soon(self, model: HostedModel) -> None:
        self.residency.keep_alive(model.name, 0.0, time.monotonic())
        self._act()

    async def _wait(self, model: HostedModel) -> Use:
        waiter: asyncio.Future[Use] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        self._act()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
                self.residency.leave_queue(model.name)
                self._act()
            elif not waiter.cancelled() and waiter.exception() is None:  # it was let in meanwhile
                self._leave(waiter.result())
            raise

    def _leave(self, use: Use, *, keep_fresh: bool = False) -> None:
        self.residency.leave(use, time.monotonic(), keep_fresh=keep_fresh)
        self._act()

    def _let_in(self, model: HostedModel) -> None:
        """All that wait: ``residency`` counts them as users by now."""
        waiters, model.waiters = model.waiters, []
        use = self.residency.use(model.name)
        for waiter in waiters:
            if waiter.done():  # cancelled, and its task has not run yet
                self.residency.leave(use, time.monotonic())
            else:
                waiter.set_result(use)

    def _turn_away(self, model: HostedModel, error: WeftError) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # ------------------------------------------------------------------ loads and unloads

    def _act(self) -> None:
        if self._stopped is not None:
            return
        now_s = time.monotonic()
        for action in self.residency.actions(now_s):
            model = self.models[action.name]
            if action.verb == "admit":
                self._let_in(model)
            elif action.verb == "load":
                _begin(self._load(model), self._loads)
            else:
                _begin(self._unload(model), self._unloads)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.residency.next_s(now_s)
        self._timer = None if math.isinf(due_s) else asyncio.get_running_loop().call_later(due_s - now_s, self._act)

    async def _load(self, model: HostedModel) -> None:
        share, began_s = model.resident.share, time.monotonic()
        self._tell(f"{model.name}: loading, with {format_bytes(share)} of {format_bytes(self.memory_bytes)}")
        fleet = Fleet(
            model.source.engine,
            restarts=self._config.restarts,
            factory=self._factory,
            stall_after_s=self._config.stall_after,
            place=HostShare(memory_bytes=share, background=self._background),
        )
        self.on_fleet(model.name, fleet)
        try:
            await fleet.start()
            await self._learn(model, await fleet.ready())
        except asyncio.CancelledError:
            await fleet.stop("the server was stopped")
            raise
        except Exception as error:
            await fleet.stop("the model did not load")
            self._failed(model, error)
            return
        model.fleet, model.error = fleet, None
        self.residency.loaded(model.name, time.monotonic())
        self._let_in(model)
        model.watch = asyncio.get_running_loop().create_task(self._watch(model, fleet))
        self._tell(
            f"{model.name}: loaded in {time.monotonic() - began_s:.1f} s, up to "
            f"{model.info.sizes.max_model_len} tokens; {self._loaded_in_words()}"
        )
        self._act()

    async def _learn(self, model: HostedModel, info: ModelInfo) -> None:
        """The text side, unless the files are those of the load before."""
        known = model.served
        if known is not None and (known.info.identity, known.info.sizes) == (info.identity, info.sizes):
            return
        model.served = replace(await model.read_text(info), loadable=model)
        self.refused = {full: why for full, why in self.refused.items() if self.base_of(full) is not model}
        for name, why in info.refused_adapters.items():
            self.refused[f"{model.name}/{name}"] = why
            self._tell(f"{model.name}/{name}: not served: {why}")
        for adapter in info.adapters:
            self.adapters.bind(msgspec.structs.replace(adapter, name=f"{model.name}/{adapter.name}"))

    def _failed(self, model: HostedModel, error: Exception) -> None:
        if not isinstance(error, WeftError):
            _log.error("loading %s failed", model.name, exc_info=error)
        model.error = (
            error
            if isinstance(error, WeftError)
            else WeftError(f"the server failed ({type(error).__name__}); its log has the details")
        )
        self.residency.failed(model.name, time.monotonic())
        left_s = model.resident.retry_s - time.monotonic()
        self._tell(f"{model.name}: not loaded: {model.error.message}")
        self._turn_away(model, ModelLoadError(f"the model {model.name!r} does not load: {model.error.message}", left_s))
        self._act()

    async def _watch(self, model: HostedModel, fleet: Fleet) -> None:
        """Until its engines have ended for good: requests fail, and the next one loads it again."""
        model.error = await fleet.died()
        self._tell(f"{model.name}: its engine is gone, and its restarts are used up: {model.error.message}")
        self.residency.died(model.name, time.monotonic())
        model.fleet = model.watch = None
        self._turn_away(model, ModelLoadError(model.error.message, model.resident.retry_s - time.monotonic()))
        _begin(self._end(model, fleet, "its engine died"), self._unloads)

    async def _unload(self, model: HostedModel) -> None:
        fleet, watch = model.fleet, model.watch
        assert fleet is not None
        if watch is not None:
            watch.cancel()
        model.fleet = model.watch = None
        await self._end(model, fleet, "the model was unloaded")
        self._tell(f"{model.name}: unloaded; {self._loaded_in_words()}")

    async def _end(self, model: HostedModel, fleet: Fleet, reason: str) -> None:
        """Prefixes that are worth it go to the store first, as at every end of an engine."""
        await fleet.stop(reason)
        self.residency.unloaded(model.name)
        self._act()

    def _loaded_in_words(self) -> str:
        names = [name for name, resident in self.residency.models.items() if resident.state == "loaded"]
        return (
            f"{format_bytes(self.residency.held)} of {format_bytes(self.memory_bytes)} taken by {', '.join(names)}"
            if names
            else "no model is loaded"
        )

    # ------------------------------------------------------------------ the whole

    @property
    def fleets(self) -> list[tuple[str, Fleet]]:
        """Of the models that are loaded."""
        return [(name, model.fleet) for name, model in self.models.items() if model.fleet is not None]

    def states(self) -> dict[str, int]:
        """How many models are in each state that one is in."""
        states = [model.state for model in self.models.values()]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    async def stop(self, reason: str) -> None:
        """Ends the processes; what waits or runs fails with ``reason``."""
        self._stopped = EngineUnavailableError(reason)
        if self._timer is not None:
            self._timer.cancel()
        to_end = [*self._loads, *(model.watch for model in self.models.values() if model.watch is not None)]
        for task in to_end:
            task.cancel()
        await asyncio.gather(*to_end, *self._unloads, return_exceptions=True)
        for model in self.models.values():
            self._turn_away(model, self._stopped)
        await asyncio.gather(*(fleet.stop(reason) for _, fleet in self.fleets))


def _begin(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """``tasks`` hold it while it runs."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
