"""Questions to all engines of a fleet at once: cache, sleep, counters.

    flush_cache, cache_shapes     every engine that serves
    load_adapter, unload_adapter  the same
    sleep, wake_up                all or none: where one refuses to sleep, the others wake again
    stats                         the last report of each engine, by replica

An engine that restarts while the fleet sleeps is put to sleep too, before it gets a request
(``sleep_again``): other processes use the memory that the fleet gave back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft.adapters import Adapter
from weft.engine.stats import AWAKE, EngineStats, Flushed, Part, SleepState
from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.replica import Replica
from weft.memory.usage import CacheShape
from weft.rpc.client import EngineClient
from weft.rpc.messages import SleepMode, SleepOutcome


class AllEngines:
    """The engines of ``replicas``, whichever processes they are at the moment."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._asleep_level = 0

    def stats(self) -> list[tuple[int, EngineStats]]:
        """The number of each replica and the last report of its engine, if it has sent one."""
        return [
            (replica.number, replica.engine.stats) for replica in self._replicas if replica.engine.stats is not None
        ]

    async def flush_cache(self) -> None:
        """Returns when the engines have dropped what their caches held. Raises EngineUnavailableError."""
        await asyncio.gather(*(engine.flush_cache() for engine in self._serving()))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Returns when all engines have it in memory, or had it. Raises the first refusal, or
        EngineUnavailableError."""
        await asyncio.gather(*(engine.load_adapter(adapter) for engine in self._serving()))

    async def unload_adapter(self, digest: str) -> None:
        """Engines in which no request runs with it drop it now, others when they need the memory."""
        await asyncio.gather(*(engine.unload_adapter(digest) for engine in self._serving()))

    async def cache_shapes(self) -> list[tuple[int, CacheShape]]:
        """What the cache of each replica holds. Raises EngineUnavailableError."""
        replicas = [replica for replica in self._replicas if replica.ready]
        shapes = await asyncio.gather(*(engine.cache_shape() for engine in self._serving()))
        return [(replica.number, shape) for replica, shape in zip(replicas, shapes, strict=True)]

    @property
    def sleep_state(self) -> SleepState:
        """By the engines' last reports: asleep as long as one of them is."""
        states = [stats.sleep for _, stats in self.stats()]
        return max(states, key=lambda state: (state.level, len(state.missing)), default=AWAKE)

    async def sleep(self, level: int, mode: SleepMode | None, timeout_s: float) -> SleepOutcome:
        """Returns when all engines sleep. Raises the first refusal (the status of a BusyError is 409), or
        EngineUnavailableError; the engines are then as before."""
        engines = self._serving()
        asleep_before = [engine for engine in engines if engine.sleep_state.level]
        outcomes = await asyncio.gather(
            *(engine.sleep(level, mode, timeout_s) for engine in engines), return_exceptions=True
        )
        refusals = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if refusals:
            await asyncio.gather(
                *(
                    engine.wake_up(None)
                    for engine, outcome in zip(engines, outcomes, strict=True)
                    if isinstance(outcome, SleepOutcome) and engine not in asleep_before
                ),
                return_exceptions=True,
            )
            raise refusals[0]
        slept = [outcome for outcome in outcomes if isinstance(outcome, SleepOutcome)]
        self._asleep_level = level
        flushed = [outcome.flushed for outcome in slept if outcome.flushed is not None]
        return SleepOutcome(
            state=_deepest(slept),
            flushed=Flushed(sum(one.bytes for one in flushed), sum(one.tokens for one in flushed)),
        )

    async def wake_up(self, tags: list[Part] | None) -> SleepOutcome:
        """Returns when the parts are back everywhere. Raises the error of waking, or
        EngineUnavailableError."""
        outcomes = await asyncio.gather(*(engine.wake_up(tags) for engine in self._serving()))
        outcome = SleepOutcome(state=_deepest(outcomes))
        if not outcome.state.level:
            self._asleep_level = 0
        return outcome

    async def sleep_again(self, engine: EngineClient) -> None:
        """Of a process that has just started, or was reset: it sleeps if the fleet does, and only then."""
        if self._asleep_level:
            try:
                await engine.sleep(self._asleep_level, "abort", 0.0)
            except WeftError:
                if engine.death is None:
                    raise
        elif engine.sleep_state.level:
            await engine.wake_up(None)

    def _serving(self) -> list[EngineClient]:
        engines = [replica.engine for replica in self._replicas if replica.ready]
        if not engines:
            raise EngineUnavailableError(
                "no engine serves at the moment: " + "; ".join(replica.reason for replica in self._replicas)
            )
        return engines


def _deepest(outcomes: Sequence[SleepOutcome]) -> SleepState:
    return max((outcome.state for outcome in outcomes), key=lambda state: (state.level, len(state.missing)))
