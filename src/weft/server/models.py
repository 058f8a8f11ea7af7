"""The models of a server: names, and engines while they run.

    name --find--> HostedModel --enter--> ModelUse, with the Fleet that computes     until the answer has ended

    PinnedModel      engines start with the server, which ends when the last of them has ended
    OnDemandModel    a request loads it, and others that need its memory unload it (``on_demand``)

Everything outside of these two classes and ``launch`` is the same for one model and for many. Requests call an adapter
by its own name if the model is pinned, and MODEL/NAME if it is loaded on demand.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from weft.adapters import Adapter
from weft.default_sampling import OLLAMA_SAMPLING
from weft.errors import BusyError, EngineUnavailableError, RequestError, UnknownModelError, WeftError
from weft.fleet.fleet import Fleet
from weft.info import ModelInfo
from weft.planning.residency import Resident
from weft.server.adapter_names import AdapterNames
from weft.server.presets import Preset
from weft.server.protocol import did_you_mean
from weft.server.served_model import ServedModel, sampling_defaults

ANY_NAME = "default"
"""Name of the first model on every server."""
KeepAlive: TypeAlias = float | msgspec.UnsetType | None
"""Seconds that a model stays in memory after a request; None: for ever; UNSET: the server's default."""
_NAMES_SHOWN = 20
_STATUSES = ("dead", "starting", "degraded", "ok", "paused", "sleeping")
"""Statuses of models: the server's status is the first of these that a model has."""
_UNAVAILABLE = ("dead", "starting")


class ModelUse:
    """The use of a loaded model by one request. ``end`` is idempotent."""

    def __init__(self, fleet: Fleet, end: Callable[[], None] | None = None) -> None:
        self.fleet = fleet
        self._end = end

    def end(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None


class HostedModel(ABC):
    """A model that requests can name. ``names``: the first is the model's own. ``fleet``: set while the engines run;
    ``served``: set once the text side was read; ``refused``: why adapters are not served, by name. ``resident``: the
    model's part of the memory that models share."""

    resident: Resident | None = None
    stays = False
    """Whether the model is never unloaded, so that ``keep_alive`` has no effect."""
    promised: Sequence[str] = ()
    """Names of adapters that the model will have once it was loaded."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.fleet: Fleet | None = None
        self.served: ServedModel | None = None
        self.refused: dict[str, str] = {}
        self.created_s = int(time.time())

    @property
    def name(self) -> str:
        return self.names[0] if self.names else ""

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The facts of the model that are known."""

    @property
    @abstractmethod
    def state(self) -> str | None:
        """State in lists of models: whether the model is in memory; None if it always is."""

    @property
    def reason(self) -> str:
        """Reason why the last load failed; empty if it did not."""
        return ""

    @property
    def death(self) -> WeftError | None:
        """Reason why the engines ended; only of a model whose end is the server's end."""
        return None

    @abstractmethod
    async def enter(self, keep_alive_s: KeepAlive = UNSET) -> ModelUse:
        """Wait until the model is loaded, and count this request as a user. Raise ModelLoadError, QueueFullError,
        EngineUnavailableError."""

    @abstractmethod
    async def text_side(self) -> ServedModel:
        """Return the model's text side for a look, without loading the model. Raise CheckpointError, ConfigError."""

    @abstractmethod
    async def known(self) -> None:
        """Wait until ``served`` is set, which may need a load. Raise as ``enter``."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise EngineUnavailableError where requests would fail at once."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Return the model's part of /health: ``status``, one of _STATUSES, and the reason."""

    @abstractmethod
    def adapter_name(self, own: str) -> str:
        """Return the name that requests use for its adapter ``own``."""

    def owns(self, adapter: str) -> bool:
        """Return whether an adapter that requests call ``adapter`` would belong to this model."""
        own = self.adapter_name("")
        return adapter.startswith(own) and adapter != own

    @abstractmethod
    def check_refit(self) -> None:
        """Raise RequestError if new weights would be lost at the next load."""

    @abstractmethod
    def unload_soon(self) -> None:
        """Unload the model once no request uses it."""

    def lines_at_once(self) -> int:
        """Return how many lines of a batch are computed at once."""
        sizes = self.info.sizes
        return max(1, min(sizes.rows_max + sizes.rows_max // 2 + 4, sizes.queue_max // 2))


class PinnedModel(HostedModel):
    """A model whose engines start with the server. ``fleet``: its engines, which ``launch`` starts."""

    stays = True
    fleet: Fleet

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(())
        self.fleet = fleet

    @property
    def death(self) -> WeftError | None:
        return self.fleet.death

    @property
    def info(self) -> ModelInfo:
        assert self.served is not None
        return self.served.info

    @property
    def state(self) -> None:
        return None

    async def enter(self, keep_alive_s: KeepAlive = UNSET) -> ModelUse:
        return ModelUse(self.fleet)

    async def text_side(self) -> ServedModel:
        assert self.served is not None
        return self.served

    async def known(self) -> None:
        """Do nothing: requests are refused until the text side was read."""

    def check_alive(self) -> None:
        self.fleet.check_alive()
        if self.served is None:
            raise EngineUnavailableError("the server is starting: it reads the tokenizer")

    def health(self) -> dict[str, Any]:
        if self.fleet.death is not None:
            return {"status": "dead", "reason": self.fleet.death.message}
        if self.served is None:
            return {"status": "starting", "reason": self.fleet.progress}
        if (reason := self.fleet.degraded_reason) is not None:  # requests wait, and none fails
            return {"status": "degraded", "reason": reason}
        engines, version = self.fleet.engines, self.fleet.weight_version
        details: dict[str, Any] = {"weight_version": version} if version else {}
        if (
            level := engines.sleep_state.level
        ):  # a healthy state: a supervisor that restarted the server would undo the operator's call
            return {"status": "sleeping", "level": level, "missing": list(engines.sleep_state.missing), **details}
        return {"status": "paused" if engines.is_paused else "ok", **details}

    def adapter_name(self, own: str) -> str:
        return own

    def check_refit(self) -> None:
        """Do nothing: the engines keep new weights."""

    def unload_soon(self) -> None:
        """Do nothing: a pinned model stays."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as lists of models show it. ``parent``: the model of an adapter; ``state``: whether it is in memory, None
    if it always is; ``reason``: why the last load failed."""

    name: str
    info: ModelInfo
    created_s: int
    parent: str | None = None
    state: str | None = None
    adapter: Adapter | None = None
    preset: Preset | None = None
    reason: str = ""

    @property
    def chat_sampling(self) -> dict[str, Any]:
        """The fields with which the page and `weft chat` sample. Stop strings stay the server's."""
        values = {**OLLAMA_SAMPLING, **sampling_defaults(self.info, self.preset)}
        return {name: value for name, value in values.items() if name != "stop"}


class Models:
    """The models of a server. ``hosted``: the first one answers "default" and requests without a name."""

    budget: int | None = None
    """Bytes that the models share."""

    def __init__(self, hosted: Iterable[HostedModel]) -> None:
        self.hosted = list(hosted)
        self.adapters = AdapterNames()
        self.created_names: Callable[[], Iterable[str]] = lambda: ()
        """Names that users created, for errors that list all names."""
        self.on_fleet: Callable[[HostedModel, Fleet], None] = lambda model, fleet: None
        """Called with each Fleet before it is started."""
        self.unserved: dict[str, str] = {}
        """Reasons why models on this machine's disk are not served, by name."""

    # ------------------------------------------------------------------ names

    @property
    def first(self) -> HostedModel:
        return self.hosted[0]

    @property
    def only(self) -> HostedModel | None:
        """The only model of the server; None if it has several."""
        return self.first if len(self.hosted) == 1 else None

    def names(self) -> list[str]:
        return [name for model in self.hosted for name in model.names]

    def adapter_names(self, model: HostedModel) -> list[str]:
        """Return the names by which requests call a model's adapters, refused adapters included."""
        bound = [name for name in self.adapters if self.owner_of(name) is model]
        return list(dict.fromkeys([*bound, *model.refused, *(model.promised if model.served is None else ())]))

    def owner_of(self, adapter: str) -> HostedModel | None:
        """Return the model that the adapter of this name belongs to; None if the name belongs to no model."""
        owners = [model for model in self.hosted if model.owns(adapter)]
        return max(owners, key=lambda model: len(model.adapter_name("")), default=None)

    def has(self, name: str | None) -> bool:
        """Return whether a model or an adapter has this name, or a request that says it means the first model."""
        return name is None or name == ANY_NAME or self._model_of(name) is not None

    def find(self, name: str | None) -> HostedModel:
        """Return the model of a name or of an adapter's name. Raise UnknownModelError that lists the names."""
        if name is None or name == ANY_NAME:
            return self.first
        if (model := self._model_of(name)) is not None:
            return model
        adapters = [known for model in self.hosted for known in self.adapter_names(model)]
        raise unknown_model(name, [*self.names(), *adapters, *self.created_names()])

    def _model_of(self, name: str) -> HostedModel | None:
        for model in self.hosted:
            if name in model.names:
                return model
        owner = self.owner_of(name)
        return owner if owner is not None and name in self.adapter_names(owner) else None

    def served_as(self, name: str | None) -> ServedModel:
        """Return the text side of a model that was loaded before, also under the name of an adapter. Raise
        UnknownModelError."""
        model = self.find(name)
        assert model.served is not None
        if name is None or name == ANY_NAME or name in model.names:
            return model.served
        adapter = self.adapters.find(name)
        if adapter is None:
            why = model.refused.get(name, "it was unloaded")
            raise UnknownModelError(f"the adapter {name!r} is not served: {why}", param="model")
        return replace(model.served, names=(name,), adapter=adapter)

    async def model_for(self, name: str | None) -> ServedModel:
        """Return the model of a name. A model that was never loaded is loaded first, since its properties are known
        only then. Raise UnknownModelError, EngineUnavailableError, and the errors of ``HostedModel.enter``."""
        model = self.find(name)
        await model.known()
        served = None if model.served is None else self.served_as(name)
        self.check_alive()  # raises while a pinned model has not been read yet
        assert served is not None
        return served

    def learn(self, model: HostedModel, served: ServedModel) -> None:
        """Serve a model whose engines are ready under ``served``. Raise ConfigError for an adapter with the name of a
        model."""
        info = served.info
        model.served, model.names = replace(served, base=served.name), served.names
        model.refused = {model.adapter_name(own): why for own, why in info.refused_adapters.items()}
        own = [msgspec.structs.replace(adapter, name=model.adapter_name(adapter.name)) for adapter in info.adapters]
        self.adapters.start_with(own, (*self.names(), ANY_NAME))

    def listed(self) -> list[ListedModel]:
        """Return every name of a model or an adapter."""
        return [
            *(
                ListedModel(name, model.info, model.created_s, None, model.state, reason=model.reason)
                for model in self.hosted
                for name in model.names
            ),
            *(
                ListedModel(name, model.info, model.created_s, model.name, model.state, self.adapters.find(name))
                if (why := model.refused.get(name)) is None
                else ListedModel(name, model.info, model.created_s, model.name, "failed", reason=why)
                for model in self.hosted
                for name in self.adapter_names(model)
            ),
        ]

    # ------------------------------------------------------------------ engines

    @property
    def fleets(self) -> list[tuple[str, Fleet]]:
        """The name and the engines of each model that is in memory."""
        return [(model.name, model.fleet) for model in self.hosted if model.fleet is not None]

    def fleet_of(self, name: str | None) -> Fleet:
        """Return the engines of the model that an operator names; a server with one model needs no name. Raise
        RequestError, UnknownModelError, BusyError."""
        if name is None and self.only is None:
            raise RequestError(
                f"this server has several models ({', '.join(self.names()[:_NAMES_SHOWN])}): name one of them, with "
                "?model=NAME in the query or with weft drain --model NAME",
                param="model",
                code="several_models",
            )
        model = self.find(name)
        if model.fleet is None:
            raise BusyError(f"the model {model.name!r} is not in memory ({model.state})", code="not_loaded")
        return model.fleet

    def follow(self, on_fleet: Callable[[HostedModel, Fleet], None]) -> None:
        """Call ``on_fleet`` with each Fleet, present and future."""
        self.on_fleet = on_fleet
        for model in self.hosted:
            if model.fleet is not None:
                on_fleet(model, model.fleet)

    def check_alive(self) -> None:
        """Raise EngineUnavailableError where requests would fail at once."""
        for model in self.hosted:
            model.check_alive()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return 0

    @property
    def death(self) -> WeftError | None:
        """Reason why this server can compute nothing any more; None while it can."""
        return next((model.death for model in self.hosted if model.death is not None), None)

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of /health. No key is needed to read it, so models are counted, not named."""
        each = [model.health() for model in self.hosted]
        status = min((report["status"] for report in each), key=_STATUSES.index)
        alike = [report for report in each if report["status"] == status]
        body = {**alike[0], "reason": "; ".join(report["reason"] for report in alike if "reason" in report)}
        if not body["reason"]:
            del body["reason"]
        if states := Counter(model.state for model in self.hosted if model.state is not None):
            body["models"] = dict(states)
        return (503 if status in _UNAVAILABLE else 200), body

    # ------------------------------------------------------------------ models that come and go

    @property
    def serves_pulled(self) -> bool:
        """Whether the models on this machine's disk are served, including those pulled later."""
        return False

    def forgets(self, name: str) -> bool:
        """Return whether the model is served only because it is on disk, and is not in memory."""
        return False

    async def look(self) -> None:
        """Serve models that have come to the disk, and stop serving those that were removed."""

    async def stop(self, reason: str) -> None:
        """End the engines. Requests that wait or run fail with ``reason``."""
        await asyncio.gather(*(fleet.stop(reason) for _, fleet in self.fleets))


def unknown_model(name: str, names: Sequence[str]) -> UnknownModelError:
    """Return the error for an unknown name. ``names``: the known names."""
    served = ", ".join(repr(known) for known in (*names[:_NAMES_SHOWN], ANY_NAME))
    served += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return UnknownModelError(
        f"there is no model {name[:200]!r} here{did_you_mean(name, names)}; this server has {served}", param="model"
    )
