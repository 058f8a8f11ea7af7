"""Questions to all engines of a fleet at once: cache, sleep, counters.

    flush_cache, cache_shapes     every engine that serves
    load_adapter, unload_adapter  the same
    sleep, wake_up                all or none: if one refuses to sleep, the others wake again
    update_weights, pause         the same
    pin, unpin                    every engine that serves, and engines that start later (``pinned``)
    stats                         the last report of each engine, by replica

An engine that restarts gets the weights of the last update before it gets a request, and sleeps while the fleet
sleeps (``follow``): other processes use the memory that the fleet gave back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from weft.adapters import Adapter
from weft.engine.stats import AWAKE, EngineStats, Flushed, NamedPrefix, Part, PinState, SleepState, WeightsState
from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.replica import Replica
from weft.memory.usage import CacheShape
from weft.rpc.client import EngineClient
from weft.rpc.messages import PauseMode, SleepMode, SleepOutcome, WeightsOutcome

T = TypeVar("T")


class AllEngines:
    """The present engines of ``replicas``."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._asleep_level = 0
        self.is_paused = False
        self._update: tuple[str, str] | None = None
        """Directory and version of the weights that replaced those of the start."""
        self._digest = ""
        """Digest of the weights of the last update; empty before the first."""
        self.pinned: Callable[[], Awaitable[Sequence[NamedPrefix]]] = _nothing_pinned
        """Function that returns the prefixes that an engine pins when it starts."""

    def stats(self) -> list[tuple[int, EngineStats]]:
        """Return the number of each replica and the last report of its engine, if it has sent one."""
        return [
            (replica.number, replica.engine.stats) for replica in self._replicas if replica.engine.stats is not None
        ]

    async def flush_cache(self, *, store: bool = True) -> None:
        """Drop the cached prefixes of the engines, and with ``store`` the stored ones too; return when all engines are
        done. Raise EngineUnavailableError."""
        await asyncio.gather(*(engine.flush_cache(store=store) for engine in self._serving()))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load ``adapter`` in all engines; return when each of them has loaded it. Raise the first refusal, or
        EngineUnavailableError."""
        await asyncio.gather(*(engine.load_adapter(adapter) for engine in self._serving()))

    async def unload_adapter(self, digest: str) -> None:
        """Drop the adapter. An engine in which a request still uses the adapter drops it when the memory is needed."""
        await asyncio.gather(*(engine.unload_adapter(digest) for engine in self._serving()))

    async def pin(self, named: Sequence[NamedPrefix], *, waits: bool) -> dict[str, list[PinState]]:
        """Pin prefixes, and return each prefix's states in the engines, by name. Raise EngineUnavailableError."""
        answers = await asyncio.gather(*(engine.pin(named, waits=waits) for engine in self._serving()))
        states = [state for answer in answers for state in answer]
        return {prefix.name: [state for state in states if state.name == prefix.name] for prefix in named}

    async def unpin(self, names: Sequence[str]) -> None:
        """Forget the names of prefixes. Raise EngineUnavailableError."""
        await asyncio.gather(*(engine.unpin(names) for engine in self._serving()))

    async def cache_shapes(self) -> list[tuple[int, CacheShape]]:
        """Return the contents of each replica's cache. Raise EngineUnavailableError."""
        replicas = [replica for replica in self._replicas if replica.ready]
        shapes = await asyncio.gather(*(engine.cache_shape() for engine in self._serving()))
        return [(replica.number, shape) for replica, shape in zip(replicas, shapes, strict=True)]

    @property
    def sleep_state(self) -> SleepState:
        """State of sleep from the engines' last reports: asleep as long as one engine is asleep."""
        states = [stats.sleep for _, stats in self.stats()]
        return max(states, key=lambda state: (state.level, len(state.missing)), default=AWAKE)

    async def sleep(self, level: int, mode: SleepMode | None, timeout_s: float) -> SleepOutcome:
        """Put all engines to sleep, and return when they sleep. Raise the first refusal (the status of a BusyError is
        409), or EngineUnavailableError; engines that slept then wake again."""
        asleep_before = [engine for engine in self._serving() if engine.sleep_state.level]
        slept = await self._all_or_none(
            lambda engine: engine.sleep(level, mode, timeout_s), lambda engine: engine.wake_up(None), asleep_before
        )
        self._asleep_level = level
        return SleepOutcome(state=_deepest(slept), flushed=_flushed(slept) or Flushed())

    async def wake_up(self, tags: list[Part] | None) -> SleepOutcome:
        """Wake the engines, and return when the parts are back everywhere. Raise the error of waking, or
        EngineUnavailableError."""
        outcomes = await asyncio.gather(*(engine.wake_up(tags) for engine in self._serving()))
        outcome = SleepOutcome(state=_deepest(outcomes))
        if not outcome.state.level:
            self._asleep_level = 0
        return outcome

    @property
    def weights(self) -> WeightsState:
        """Weights from the engines' last reports: the oldest, if they differ."""
        return min(
            (stats.weights for _, stats in self.stats()), key=lambda state: state.updates, default=WeightsState()
        )

    async def pause(self, mode: PauseMode, timeout_s: float, *, flush: bool) -> WeightsOutcome:
        """Pause the engines, and return when none computes a step. Raise the first refusal, or EngineUnavailableError;
        the engines then go on."""
        outcomes = await self._all_or_none(
            lambda engine: engine.pause(mode, timeout_s, flush=flush), lambda engine: engine.resume()
        )
        self.is_paused = True
        return _sum_of(outcomes)

    async def resume(self) -> WeightsOutcome:
        """Let the engines go on after a pause. Raise EngineUnavailableError."""
        self.is_paused = False
        return _sum_of(await asyncio.gather(*(engine.resume() for engine in self._serving())))

    async def update_weights(self, directory: str, version: str, mode: PauseMode, timeout_s: float) -> WeightsOutcome:
        """Replace the weights, and return when all engines answer with those in ``directory``. Raise the first refusal,
        or EngineUnavailableError. Engines that have the new weights then read the earlier ones again, if other engines
        refused them."""
        old = self._update or (self._first_directory(), "")
        outcome = _sum_of(
            await self._all_or_none(
                lambda engine: engine.update_weights(directory, version, mode, timeout_s),
                lambda engine: engine.update_weights(*old, "keep", 0.0),
            )
        )
        self._update, self._digest = (directory, version), outcome.weights.digest
        return outcome

    def _first_directory(self) -> str:
        infos = [replica.engine.info for replica in self._replicas if replica.engine.info is not None]
        return infos[0].directory if infos else ""

    async def follow(self, engine: EngineClient) -> None:
        """Bring a process that has just started, or was reset, to the state of the fleet: it gets the fleet's weights
        and pins, sleeps if and only if the fleet does, and is paused if the fleet is."""
        weights = engine.weights
        if self._update is not None and (weights.digest, weights.version) != (self._digest, self._update[1]):
            if engine.sleep_state.level:
                await engine.wake_up(None)
            await engine.update_weights(*self._update, "keep", 0.0)
        named = await self.pinned()
        if named:
            await engine.pin(named, waits=False)
        if self.is_paused:
            await engine.pause("keep", 0.0, flush=False)
        if self._asleep_level:
            try:
                await engine.sleep(self._asleep_level, "abort", 0.0)
            except WeftError:
                if engine.death is None:
                    raise
        elif engine.sleep_state.level:
            await engine.wake_up(None)

    async def _all_or_none(
        self,
        ask: Callable[[EngineClient], Awaitable[T]],
        undo: Callable[[EngineClient], Awaitable[object]],
        spared: Sequence[EngineClient] = (),
    ) -> list[T]:
        """Return the answers of all engines. If one refuses, ``undo`` in the others, except in ``spared``, and raise
        the first refusal."""
        engines = self._serving()
        answers = await asyncio.gather(*map(ask, engines), return_exceptions=True)
        refusals = [answer for answer in answers if isinstance(answer, BaseException)]
        if refusals:
            done = [
                engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, BaseException)
            ]
            await asyncio.gather(*(undo(engine) for engine in done if engine not in spared), return_exceptions=True)
            raise refusals[0]
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _serving(self) -> list[EngineClient]:
        engines = [replica.engine for replica in self._replicas if replica.ready]
        if not engines:
            raise EngineUnavailableError(
                "no engine serves at the moment: " + "; ".join(replica.reason for replica in self._replicas)
            )
        return engines


async def _nothing_pinned() -> Sequence[NamedPrefix]:
    return ()


def _sum_of(outcomes: Sequence[WeightsOutcome]) -> WeightsOutcome:
    return WeightsOutcome(weights=outcomes[0].weights, paused=outcomes[0].paused, flushed=_flushed(outcomes))


def _flushed(outcomes: Sequence[SleepOutcome | WeightsOutcome]) -> Flushed | None:
    """Return the sum of the flushes; None if no engine flushed its cache."""
    flushed = [outcome.flushed for outcome in outcomes if outcome.flushed is not None]
    if not flushed:
        return None
    return Flushed(sum(flush.bytes for flush in flushed), sum(flush.tokens for flush in flushed))


def _deepest(outcomes: Sequence[SleepOutcome]) -> SleepState:
    return max((outcome.state for outcome in outcomes), key=lambda state: (state.level, len(state.missing)))
