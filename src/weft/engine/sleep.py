"""Sleep: what an engine gives back while nobody asks it anything, and what it is after waking.

                  weights              arena, cached prefixes     back by
    awake         where they compute   there
    level 1       in host memory       gone                       a copy, and an allocation
    level 2       gone                 gone                       reading the checkpoint, and an allocation

    sleep(level)   nothing runs? -> flush the prefix cache -> the executor lets go
    wake_up(parts) the executor takes hold again, part by part -> audit, once both are back

Everything else survives: counters, seeds, what the cache policy has learned, compiled grammars. ``Memory``
keeps its books and loses its contents (``Memory.lose``), so that what counts since the start never goes back:
after the flush no page and no slot is held by anybody, which is asserted, and every frame counts as never
used. An arena made anew has unspecified bytes, as at the start, and each frame is zeroed before its first use
(law L6) as if it were the first time.

Never with sequences on board: their states would have to go to the host and come back, and a client that
waits for a sleeping server is better told so. Who calls decides whether they are waited for or cancelled.

Rejected: a new ``Memory`` on waking (every counter would begin again, and the policy forget); sleeping with
pages kept on the host (what is cached is worth less than the weights, and may be larger).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

import msgspec

from weft.errors import AsleepError, BusyError, EngineUnavailableError, RequestError

if TYPE_CHECKING:
    from weft.engine.engine import EngineCore

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
"""In the order in which they are brought back. ``kv_cache``: the arena, recurrent states included."""
LEVELS = (1, 2)
_ABORTED = "the engine was put to sleep while it answered"


class SleepState(msgspec.Struct, frozen=True):
    """``level`` 0: awake, and nothing is ``missing``."""

    level: int = 0
    missing: tuple[Part, ...] = ()

    def check_awake(self) -> None:
        """Raises AsleepError."""
        if self.level:
            raise AsleepError(f"the engine is asleep (level {self.level}); POST /wake_up, or wake_up() in "
                              "Python, wakes it", code="asleep")


AWAKE = SleepState()


class Flushed(msgspec.Struct, frozen=True):
    """What the prefix cache held and has dropped: bytes of pages and states, tokens of prefixes."""

    bytes: int = 0
    tokens: int = 0


class Sleeper:
    """Puts one engine to sleep and wakes it. Between steps only."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def state(self) -> SleepState:
        return self._core.sleep_state

    def sleep(self, level: int = 1, *, abort: bool = False) -> Flushed:
        """Go to sleep; returns what of the prefix cache was dropped. From level 1 to 2 what is still held is
        dropped too; from 2 to 1 nothing changes.

        With ``abort``, what runs or waits ends as cancelled, and its last events come with the next ``step``.
        Raises BusyError, naming how many, where something runs and is not to be aborted; RequestError for
        another level; EngineUnavailableError where the engine has failed.
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
        flushed = Flushed(core.memory.usage().cached_bytes, core.memory.cached_tokens)
        core.memory.lose()
        if "weights" in self.state.missing:
            level = max(level, self.state.level)
        core.executor.sleep(level)
        core.sleep_state = SleepState(level, PARTS)
        return flushed

    def wake_up(self, parts: Collection[Part] | None = None) -> SleepState:
        """Bring ``parts`` back, or all. Awake once none is missing; what is there already is left alone.

        Raises RequestError for a part that there is none of; what reading the checkpoint raises, or
        EngineUnavailableError where the device has not enough memory: what is back then stays, and it can be
        tried again.
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


def check_level(level: int) -> None:
    """Raises RequestError for a level that there is none of."""
    if level not in LEVELS:
        raise RequestError(f"level is {level}; it may be 1 (weights go to host memory) or 2 (weights are "
                           "dropped, and read again on waking)", param="level")


def check_parts(parts: Collection[str] | None) -> Collection[str]:
    """``parts``, or all. Raises RequestError for one that there is none of."""
    for part in parts or ():
        if part not in PARTS:
            raise RequestError(f"tags has {part!r}; it may have {' and '.join(PARTS)}", param="tags")
    return parts or PARTS


def busy(count: int, waited_s: float | None = None) -> BusyError:
    """Why it does not sleep now, and what can be done."""
    runs = f"{count} sequence{' is' if count == 1 else 's are'} running or waiting"
    after = "" if waited_s is None else f" after {waited_s:g} s; nothing has changed"
    return BusyError(f"{runs}{after}: wait for them (mode=wait, timeout=SECONDS), or end them (mode=abort)",
                     param="mode", code="busy")
