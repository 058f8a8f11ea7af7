"""Calls to sleep and to wake up, in the engine's process: done between two steps, or waited for.

    Sleep  no live sequences, or mode "abort"  -> at once
           live sequences, no mode             -> refused, with their count and the modes
           live sequences, mode "wait"         -> new requests are refused, steps go on
                                                     '-> the last one ended: sleep      too late: refused, and
                                                                                        requests are accepted
    Wake   at once; a sleep that waits is refused then

While the engine sleeps or wakes, the process does nothing else: requests that come during a wake-up wait for
its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.engine.engine import EngineCore
from weft.engine.sleeper import Sleeper, busy
from weft.engine.stats import Flushed, check_level, check_parts
from weft.errors import AsleepError, BusyError, WeftError
from weft.rpc.messages import Reply, Sleep, SleepOutcome, Wake


class SleepQueue:
    """``clock`` gives seconds. ``take`` and ``look`` return the replies that are ready."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._sleeper = Sleeper(core)
        self._clock = clock
        self._waiting: tuple[Sleep, float] | None = None

    def check_open(self) -> None:
        """Raises AsleepError while a sleep waits for live sequences. (Asleep, the engine itself refuses.)"""
        if self._waiting is not None:
            raise AsleepError("the engine goes to sleep once what runs has ended, and takes no new requests",
                              code="asleep")

    def take(self, command: Sleep | Wake) -> list[Reply]:
        try:
            if isinstance(command, Wake):
                check_parts(command.tags)
                refused = self._refuse_waiting(BusyError("a call to wake up came before what ran had ended",
                                                         code="busy"))
                return [*refused, self._wake(command)]
            check_level(command.level)
            if self._waiting is not None:
                raise BusyError("another call waits for what runs to end, so that the engine can sleep",
                                code="busy")
            if command.mode == "wait" and self._core.live_count:
                self._waiting = command, self._clock() + command.timeout_s
                return []
            return [self._sleep(command)]
        except WeftError as error:
            return [Reply.refused(command.number, error)]

    def look(self) -> list[Reply]:
        """Between two steps: have the live sequences ended, or is it too late?"""
        if self._waiting is None:
            return []
        command, deadline_s = self._waiting
        if not self._core.live_count:
            self._waiting = None
            return [self._sleep(command)]
        if self._clock() >= deadline_s:
            return self._refuse_waiting(busy(self._core.live_count, command.timeout_s))
        return []

    def forget(self) -> None:
        """A sleep that waits will not be: its caller is gone."""
        self._waiting = None

    def _sleep(self, command: Sleep) -> Reply:
        try:
            flushed = self._sleeper.sleep(command.level, abort=command.mode == "abort")
        except WeftError as error:
            return Reply.refused(command.number, error)
        return self._outcome(command.number, flushed)

    def _wake(self, command: Wake) -> Reply:
        try:
            self._sleeper.wake_up(command.tags)
        except WeftError as error:
            return Reply.refused(command.number, error)
        return self._outcome(command.number)

    def _outcome(self, number: int, flushed: Flushed | None = None) -> Reply:
        return Reply.of(number, SleepOutcome(state=self._sleeper.state, flushed=flushed))

    def _refuse_waiting(self, error: WeftError) -> list[Reply]:
        if self._waiting is None:
            return []
        command, _ = self._waiting
        self._waiting = None
        return [Reply.refused(command.number, error)]
