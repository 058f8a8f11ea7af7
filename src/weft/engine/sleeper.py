"""Puts an engine to sleep and wakes it: the arena, and with level 2 the weights, go back to the system.

    sleep(level)     live sequences? -> flush the prefix cache -> executor.sleep(level)
    wake_up(parts)   executor.wake(part) for each part -> audit, once no part is missing

Counters, seeds, compiled grammars and what the cache policy has learned survive. After the flush no sequence
holds a page or a slot, and every frame counts as never used: each is zeroed before its first use (law L6).
"""

from __future__ import annotations

from collections.abc import Collection

from weft.engine.engine import EngineCore
from weft.engine.stats import AWAKE, PARTS, Flushed, Part, SleepState, check_level, check_parts
from weft.errors import BusyError, EngineUnavailableError

STORE_SLEEP_S = 20.0
"""An engine that falls asleep writes snapshots to its store for at most this long."""
_ABORTED = "the engine was put to sleep while it answered"


class Sleeper:
    """Puts one engine to sleep and wakes it. Between steps only."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def state(self) -> SleepState:
        return self._core.sleep_state

    def sleep(self, level: int = 1, *, abort: bool = False) -> Flushed:
        """Sleep, and return what the prefix cache lost. From level 1 to 2 the weights are dropped too; from 2
        to 1 nothing changes.

        With ``abort``, live sequences end as cancelled, and their last events come with the next ``step``.
        Raises BusyError with the count of live sequences when there are any and ``abort`` is false;
        RequestError for an unknown level; EngineUnavailableError when the engine has failed.
        """
        core = self._core
        check_level(level)
        if core.live_count and not abort:
            raise busy(core.live_count)
        core.cancel_all(_ABORTED)
        events = []
        while core.has_work:
            events += core.step()
        core.hand_back(events)
        if core.failure is not None:
            raise EngineUnavailableError(f"the engine has failed: {core.failure!r}")
        core.write_all(STORE_SLEEP_S)
        flushed = Flushed(core.memory.usage().cached_bytes, core.memory.cached_tokens)
        core.memory.lose()
        core.pictures.forget()
        level = max(level, self.state.level)
        if level == 2:
            core.adapters.forget()
        core.sleep_state = SleepState(level, core.executor.sleep(level))
        return flushed

    def wake_up(self, parts: Collection[Part] | None = None) -> SleepState:
        """Bring back ``parts``, or all of them. The engine is awake once no part is missing; a part that is
        not missing is left alone.

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
                core.sleep_state = SleepState(self.state.level, left) if left else AWAKE
        if not self.state.level:
            core.audit()
        return self.state


def busy(count: int, waited_s: float | None = None) -> BusyError:
    """Why the engine does not sleep now, and the two ways out."""
    runs = f"{count} sequence{' is' if count == 1 else 's are'} running or waiting"
    after = "" if waited_s is None else f" after {waited_s:g} s; nothing has changed"
    return BusyError(
        f"{runs}{after}: wait for them (mode=wait, timeout=SECONDS), or end them (mode=abort)",
        param="mode",
        code="busy",
    )
