"""Models that the server loads when requests name them; each has its own engines while it is loaded.

    request --model_for--> the model's text side      known after the first load
            --enter------> its fleet                  loads it first if it is absent; waits for room

    Residency (pure)  <--events--  OnDemandModels  --actions-->  _load, _unload: a Fleet, started or stopped

``planning.residency`` decides which models are in memory; this file carries out its decisions. A loaded model is a
``Fleet`` of one engine process, so deaths, resumes and queues work as in a server with one model. The process gets the
model's share of the memory (``HostShare``): weights, and the rest as arena. While it loads, it gives way to processes
that answer requests.

If a model fails to load, only the requests that wait for it fail. A request uses the model from ``enter`` until the
answer has ended, and counts as waiting before that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import UNSET

from weft.adapters import named_paths
from weft.config import EngineConfig, Sizes
from weft.default_sampling import read_default_sampling
from weft.errors import ConfigError, EngineUnavailableError, ModelLoadError, QueueFullError, RequestError, WeftError
from weft.fleet.fleet import Fleet
from weft.info import ModelInfo
from weft.models.local import whole_models
from weft.planning.residency import Residency, Resident, Use
from weft.planning.together import ModelNeed, share_of
from weft.rpc.client import ASSEMBLE
from weft.rpc.messages import HostShare
from weft.server.config import ServerConfig
from weft.server.fleets import new_fleet
from weft.server.models import HostedModel, KeepAlive, Models, ModelUse
from weft.server.served_model import ServedModel, load_served_model
from weft.tasks import begin_task, end_tasks
from weft.text.pooling import is_embedder
from weft.text.tokenizer import Tokenizer
from weft.units import format_bytes

_LINES_AT_ONCE = 64
_log = logging.getLogger("weft.server")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One of the models: directory, settings, need of memory. ``server``: the config with this model's template and
    parsers. ``tokenizers``: the model's tokenizer, if it could be read at the start."""

    name: str
    engine: EngineConfig
    server: ServerConfig
    directory: Path
    need: ModelNeed
    tokenizers: tuple[Tokenizer, ...] = ()
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    pulled_s: float | None = None
    """Time of the pull, for a model that is served only while it is on this machine's disk."""


class OnDemandModel(HostedModel):
    """A model that requests load. ``fleet``: set while the model is loaded; ``served``: set after the first load;
    ``error``: why the last load failed, or why the engines ended."""

    resident: Resident

    def __init__(self, source: ModelSource, resident: Resident, models: OnDemandModels) -> None:
        super().__init__((source.name,))
        self.source = source
        self.resident = resident
        self.error: WeftError | None = None
        self.waiters: list[asyncio.Future[Use]] = []
        self.watch: asyncio.Task[None] | None = None
        self.promised = [self.adapter_name(own) for own in named_paths(source.engine.lora)]
        self._models = models
        self._preview: ServedModel | None = None

    @property
    def state(self) -> str:
        """``absent``, ``loading``, ``loaded``, ``unloading``, or ``failed`` after a load that failed."""
        return "failed" if self.resident.state == "absent" and self.error is not None else self.resident.state

    @property
    def reason(self) -> str:
        return self.error.message if self.state == "failed" and self.error is not None else ""

    @property
    def info(self) -> ModelInfo:
        """Facts from the last load; before the first load, from config.json."""
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

    async def text_side(self) -> ServedModel:
        """Return the text side. Before the first load it comes from config.json, and no request is prepared with it."""
        if self.served is not None:
            return self.served
        if self._preview is None:
            self._preview = await self.read_text(self.info)
        return self._preview

    async def read_text(self, info: ModelInfo) -> ServedModel:
        """Read the text side. Raise CheckpointError, ConfigError."""
        return await asyncio.to_thread(load_served_model, info, self.source.server, self.source.tokenizers)

    async def enter(self, keep_alive_s: KeepAlive = UNSET) -> ModelUse:
        return await self._models.enter(self, keep_alive_s)

    async def known(self) -> None:
        if self.served is None:
            (await self._models.enter(self, keep_fresh=True)).end()

    def check_alive(self) -> None:
        """Do nothing: a request loads it."""

    def check_refit(self) -> None:
        raise RequestError(
            f"{self.name} is loaded when it is asked for, and would have the weights of its files again: "
            "new weights need a server with only that model",
            param="model",
        )

    def health(self) -> dict[str, Any]:
        reason = None if self.fleet is None else self.fleet.degraded_reason
        return {"status": "ok"} if reason is None else {"status": "degraded", "reason": reason}

    def adapter_name(self, own: str) -> str:
        return f"{self.name}/{own}"

    def unload_soon(self) -> None:
        self._models.unload_soon(self)

    def lines_at_once(self) -> int:
        """Return a part of the number of requests that may wait for loads: each line of a batch may name another
        model."""
        return max(1, min(_LINES_AT_ONCE, self._models.residency.waiting_max // 2))


class OnDemandModels(Models):
    """The models of a server that loads them on demand. ``shares``: see ``share_out``. ``background``: whether loading
    gives way to answers. ``tell`` gets a line for each load and unload. ``read_pulled``: with --pulled, returns the
    models on disk other than its argument."""

    hosted: list[OnDemandModel]  # type: ignore[assignment]  # and no other kind
    budget: int

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
        self.budget = memory_bytes
        self.residency = Residency.of(
            shares,
            memory_bytes,
            waiting_max=sources[0].engine.max_queued_requests,
            keep_alive_s=self.default_keep_alive_s,
        )
        super().__init__(OnDemandModel(source, self.residency.models[source.name], self) for source in sources)
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

    @property
    def waiting(self) -> int:
        return self.residency.waiting

    # ------------------------------------------------------------------ models that come and go

    @property
    def serves_pulled(self) -> bool:
        return self._read_pulled is not None

    def forgets(self, name: str) -> bool:
        model = self._named(name)
        return model is not None and model.source.pulled_s is not None and model.resident.is_absent

    def _named(self, name: str) -> OnDemandModel | None:
        return next((model for model in self.hosted if model.name == name), None)

    async def look(self) -> None:
        if self._read_pulled is None:
            return
        async with self._looks:
            on_disk = await asyncio.to_thread(whole_models)
            for model in [model for model in self.hosted if self.forgets(model.name)]:
                if model.name not in on_disk or on_disk[model.name].manifest.pulled_s != model.source.pulled_s:
                    self.hosted.remove(model)
                    del self.residency.models[model.name]
            known = [model.source for model in self.hosted]
            for source in await asyncio.to_thread(self._read_pulled, known):
                self._add(source)

    def _add(self, source: ModelSource) -> None:
        try:
            share = share_of(source.need, self.budget)
        except ConfigError as error:
            self.unserved[source.name] = error.message
            _log.warning("%s is on disk and is not served: %s", source.name, error.message)
            return
        self.residency.models[source.name] = Resident(source.name, share, self.default_keep_alive_s)
        self.hosted.append(OnDemandModel(source, self.residency.models[source.name], self))
        self.unserved.pop(source.name, None)
        self._tell(f"{source.name}: served from this machine's disk, with {format_bytes(share)} once it is asked for")

    # ------------------------------------------------------------------ requests

    async def enter(
        self, model: OnDemandModel, keep_alive_s: KeepAlive = UNSET, *, keep_fresh: bool = False
    ) -> ModelUse:
        """Wait until the model is loaded, and count this request as a user. ``keep_fresh``: another request that uses
        the model is about to come. Raise ModelLoadError, QueueFullError, EngineUnavailableError."""
        if self._stopped is not None:
            raise self._stopped
        entry = self.residency.enter(model.name, time.monotonic())
        if entry == "refused":
            assert model.error is not None
            left_s = model.resident.retry_s - time.monotonic()
            raise ModelLoadError(
                f"the model {model.name!r} could not be loaded: {model.error.message}; it is "
                f"tried again in {math.ceil(left_s)} s",
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
        return ModelUse(model.fleet, lambda: self._leave(use, keep_fresh=keep_fresh))

    def unload_soon(self, model: OnDemandModel) -> None:
        self.residency.keep_alive(model.name, 0.0, time.monotonic())
        self._act()

    async def _wait(self, model: OnDemandModel) -> Use:
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
            elif not waiter.cancelled() and waiter.exception() is None:  # the load ended meanwhile
                self._leave(waiter.result())
            raise

    def _leave(self, use: Use, *, keep_fresh: bool = False) -> None:
        self.residency.leave(use, time.monotonic(), keep_fresh=keep_fresh)
        self._act()

    def _let_in(self, model: OnDemandModel) -> None:
        """Let all waiting requests in: ``residency`` already counts them as users."""
        waiters, model.waiters = model.waiters, []
        use = self.residency.use(model.name)
        for waiter in waiters:
            if waiter.done():  # cancelled, but the task has not run yet
                self.residency.leave(use, time.monotonic())
            else:
                waiter.set_result(use)

    def _turn_away(self, model: OnDemandModel, error: WeftError) -> None:
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
            model = self._named(action.name)
            assert model is not None
            if action.verb == "admit":
                self._let_in(model)
            elif action.verb == "load":
                begin_task(self._load(model), self._loads)
            else:
                begin_task(self._unload(model), self._unloads)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.residency.next_s(now_s)
        self._timer = None if math.isinf(due_s) else asyncio.get_running_loop().call_later(due_s - now_s, self._act)

    async def _load(self, model: OnDemandModel) -> None:
        share, began_s = model.resident.share, time.monotonic()
        self._tell(f"{model.name}: loading, with {format_bytes(share)} of {format_bytes(self.budget)}")
        fleet = new_fleet(
            model.source.engine,
            self._config,
            factory=self._factory,
            place=HostShare(memory_bytes=share, background=self._background),
            record_as=f"{model.name}.{model.resident.life}",
        )
        self.on_fleet(model, fleet)
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

    async def _learn(self, model: OnDemandModel, info: ModelInfo) -> None:
        """Read the text side, unless the files are those of the load before."""
        known = model.served
        if known is not None and (known.info.identity, known.info.sizes) == (info.identity, info.sizes):
            return
        self.learn(model, await model.read_text(info))
        for name, why in model.refused.items():
            self._tell(f"{name}: not served: {why}")

    def _failed(self, model: OnDemandModel, error: Exception) -> None:
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

    async def _watch(self, model: OnDemandModel, fleet: Fleet) -> None:
        """Watch the engines until they have ended for good: requests then fail, and the next request loads the model
        again."""
        model.error = await fleet.died()
        self._tell(f"{model.name}: its engine is gone, and its restarts are used up: {model.error.message}")
        self.residency.died(model.name, time.monotonic())
        model.fleet = model.watch = None
        self._turn_away(model, ModelLoadError(model.error.message, model.resident.retry_s - time.monotonic()))
        begin_task(self._end(model, fleet, "its engine died"), self._unloads)

    async def _unload(self, model: OnDemandModel) -> None:
        fleet, watch = model.fleet, model.watch
        assert fleet is not None
        if watch is not None:
            watch.cancel()
        model.fleet = model.watch = None
        await self._end(model, fleet, "the model was unloaded")
        self._tell(f"{model.name}: unloaded; {self._loaded_in_words()}")

    async def _end(self, model: OnDemandModel, fleet: Fleet, reason: str) -> None:
        """End the engines. First, as at every end of an engine, valuable prefixes are written to the store."""
        await fleet.stop(reason)
        self.residency.unloaded(model.name)
        self._act()

    def _loaded_in_words(self) -> str:
        names = [name for name, resident in self.residency.models.items() if resident.state == "loaded"]
        return (
            f"{format_bytes(self.residency.used_bytes)} of {format_bytes(self.budget)} taken by {', '.join(names)}"
            if names
            else "no model is loaded"
        )

    # ------------------------------------------------------------------ all models

    async def stop(self, reason: str) -> None:
        """End the processes; requests that wait or run fail with ``reason``."""
        self._stopped = EngineUnavailableError(reason)
        if self._timer is not None:
            self._timer.cancel()
        await end_tasks(*self._loads, *(model.watch for model in self.hosted if model.watch is not None))
        await asyncio.gather(*self._unloads, return_exceptions=True)
        for model in self.hosted:
            self._turn_away(model, self._stopped)
        await super().stop(reason)
