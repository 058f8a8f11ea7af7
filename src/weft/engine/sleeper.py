"""Sleep, wake-up and pause of an engine, and the replacement of its weights.

    pause            no step is computed; live sequences stay, end, or give up their memory
    sleep(level)     live sequences? -> flush the prefix cache -> executor.sleep(level)
    wake_up(parts)   executor.wake(part) for each part -> audit, once no part is missing
    refit(directory) sleep(2), the next directory, wake_up: a sleep that live sequences may outlast

After level 2, the files may have other weights than before. The digest of the weights that were read shows this, and
then no result of the old weights is used again. The sleep has dropped the prefix tree and the rows of pictures. The
store goes on under another namespace, and engines that send each other records refuse the old ones. The answers from
which drafts are taken are dropped.

Counters, seeds, compiled grammars and the statistics of the cache policy survive. After the flush no sequence holds a
page or a slot, and every frame counts as never used: each is zeroed before its first use (law L6).
"""

from __future__ import annotations

from collections.abc import Collection

from weft.adapters import Adapter
from weft.engine.engine import EngineCore
from weft.engine.stats import AWAKE, PARTS, Flushed, Part, SleepState, WeightsState, check_level, check_parts
from weft.errors import BusyError, EngineUnavailableError, UserError, WeftError

STORE_SLEEP_S = 20.0
"""Seconds that an engine may write snapshots to its store when it falls asleep."""
_ASLEEP = "the engine was put to sleep while it answered"
_PAUSED = "the engine was paused while it answered"
_REPLACED = "the weights of the engine were replaced while it answered"
_PICTURES = f"{_REPLACED}, and the pictures of the request would have to be encoded again: send it again"


class Sleeper:
    """The sleep and wake-up of one engine. Called between steps only."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._adapters: list[Adapter] = []
        """Adapters of live sequences, while the weights are gone."""

    @property
    def state(self) -> SleepState:
        return self._core.sleep_state

    def sleep(self, level: int = 1, *, abort: bool = False) -> Flushed:
        """Put the engine to sleep, and return the losses of the prefix cache. From level 1 to 2 the weights are dropped
        too; from 2 to 1 nothing changes.

        With ``abort``, live sequences end as cancelled, and their last events come with the next ``step``.
        Raises BusyError with the count of live sequences when there are any and ``abort`` is false;
        RequestError for an unknown level; EngineUnavailableError when the engine has failed.
        """
        core = self._core
        check_level(level)
        if core.live_count and not abort:
            raise busy(core.live_count)
        self.end_all(_ASLEEP)
        return self._fall_asleep(level)

    def _fall_asleep(self, level: int, *, write_s: float = STORE_SLEEP_S) -> Flushed:
        """Flush the cache and free the parts. No sequence holds memory."""
        core = self._core
        if core.failure is not None:
            raise EngineUnavailableError(f"the engine has failed: {core.failure!r}")
        if write_s:
            core.write_all(write_s)
        flushed = Flushed(core.memory.usage().cached_bytes, core.memory.cached_tokens)
        core.memory.lose()
        core.pictures.forget()
        level = max(level, self.state.level)
        if level == 2:
            self._adapters = core.adapters.forget()
        core.sleep_state = SleepState(level, core.executor.sleep(level))
        return flushed

    def wake_up(self, parts: Collection[Part] | None = None) -> SleepState:
        """Bring back ``parts``, or all of them. The engine is awake once no part is missing; a part that is present
        stays as it is.

        Raises RequestError for an unknown part, the errors of reading the checkpoint, or
        EngineUnavailableError when the device has too little memory. Parts that are back stay, and the call
        can be repeated.
        """
        core = self._core
        wanted = check_parts(parts)
        for part in PARTS:
            if part in wanted and part in self.state.missing:
                core.executor.wake(part)
                left = tuple(other for other in self.state.missing if other != part)
                if not left:
                    self._renew(core.weights.version)
                core.sleep_state = SleepState(self.state.level, left) if left else AWAKE
        if not self.state.level:
            while self._adapters:
                core.adapters.load(self._adapters.pop())
            core.audit()
        return self.state

    def _renew(self, version: str) -> None:
        """Drop all results of the old weights if the files had other weights than before."""
        core = self._core
        if core.source is None:
            return
        digest = core.source.digest()
        if digest == core.weights.digest:
            return
        if core.store is not None:
            core.store.forget()
            core.store.renew()
        if core.drafter is not None:
            core.drafter.forget()
        core.weights = WeightsState(version, digest, core.weights.updates + 1)

    def end_all(self, why: str) -> None:
        """End live sequences as cancelled, and free their memory; ``why`` is in their last events."""
        core = self._core
        core.paused, paused = False, core.paused
        core.cancel_all(why)
        events = []
        while core.has_work:
            events += core.step()
        core.hand_back(events)
        core.paused = paused

    def pause(self, *, abort: bool, flush: bool) -> Flushed | None:
        """Compute no further step until ``paused`` is false again. Live sequences stay as they are, or end with
        ``abort``. With ``flush``, they give up their memory and the prefix cache is emptied; they are computed again
        later. Returns the losses of the prefix cache."""
        core = self._core
        if abort:
            self.end_all(_PAUSED)
        core.paused = True
        if not flush:
            return None
        core.retract_all()
        flushed = Flushed(core.memory.usage().cached_bytes, core.memory.cached_tokens)
        core.flush_cache()
        return flushed

    def refit(self, directory: str, version: str, *, abort: bool = False) -> Flushed:
        """Replace the weights by those in ``directory``, and return the losses of the prefix cache. Live sequences wait
        and are computed again from their tokens, with the new weights; with ``abort`` they end.

        Raises CheckpointError or ConfigError where the new weights cannot be served: the old ones are then
        read again, and answer. Raises EngineUnavailableError when the engine has failed, or sleeps."""
        core = self._core
        core.sleep_state.check_awake()
        if core.source is None:
            raise EngineUnavailableError(
                "this engine was made from a model in memory: no checkpoint can take its place"
            )
        before = core.source.place
        core.source.check(directory)
        if abort:
            self.end_all(_REPLACED)
        for seq in core.pictures.begun:
            core.streams.cancel([core.streams.by_seq[seq]], _PICTURES)
        core.retract_all()
        flushed = self._fall_asleep(2, write_s=0.0)
        core.executor.read_from(directory)
        try:
            self.wake_up()
        except (WeftError, UserError, OSError):
            core.executor.read_from(before)
            self.wake_up()
            raise
        core.weights = WeightsState(version, core.weights.digest, core.weights.updates)
        return flushed


def busy(count: int, waited_s: float | None = None) -> BusyError:
    """Return an error that says why the engine does not sleep now, and the two ways out."""
    runs = f"{count} sequence{' is' if count == 1 else 's are'} running or waiting"
    after = "" if waited_s is None else f" after {waited_s:g} s; nothing has changed"
    return BusyError(
        f"{runs}{after}: wait for them (mode=wait, timeout=SECONDS), or end them (mode=abort)",
        param="mode",
        code="busy",
    )
