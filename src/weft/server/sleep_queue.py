"""Calls to sleep and to wake up, in the engine's process: done between two steps, or waited for.

    Sleep  nothing runs, or mode "abort"  -> at once
           something runs, no mode        -> refused: how many run, and what can be asked for
           something runs, mode "wait"    -> new requests are refused, steps go on
                                                '-> the last one ended: sleep      too late: refused, and
                                                                                   requests are taken again
    Wake   at once, also while a sleep waits (which is then refused)

While it sleeps or wakes, the process does nothing else: requests that come during a wake-up wait for its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.engine.engine import EngineCore
from weft.engine.sleep_state import Flushed, check_level, check_parts
from weft.engine.sleeper import Sleeper, busy
from weft.errors import AsleepError, BusyError, WeftError
from weft.server.messages import Refusal, Sleep, SleepNews, Wake


class SleepQueue:
    """``clock`` gives seconds. ``news`` is taken by whoever sends it."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._sleeper = Sleeper(core)
        self._clock = clock
        self._waiting: tuple[Sleep, float] | None = None
        self.news: list[SleepNews] = []

    def check_open(self) -> None:
        """Raises AsleepError while a sleep waits for what runs. (Asleep, the engine itself refuses.)"""
        if self._waiting is not None:
            raise AsleepError("the engine goes to sleep once what runs has ended, and takes no new requests",
                              code="asleep")

    def take(self, command: Sleep | Wake) -> None:
        try:
            if isinstance(command, Wake):
                check_parts(command.tags)
                self._give_up(BusyError("a call to wake up came before what ran had ended", code="busy"))
                self._sleeper.wake_up(command.tags)
                self._tell(command.number)
                return
            check_level(command.level)
            if self._waiting is not None:
                raise BusyError("another call waits for what runs to end, so that the engine can sleep",
                                code="busy")
            if command.mode == "wait" and self._core.live_count:
                self._waiting = command, self._clock() + command.timeout_s
            else:
                self._sleep(command)
        except WeftError as error:
            self._refuse(command.number, error)

    def look(self) -> None:
        """Between two steps: has what runs ended, or is it too late?"""
        if self._waiting is None:
            return
        command, deadline_s = self._waiting
        if not self._core.live_count:
            self._waiting = None
            try:
                self._sleep(command)
            except WeftError as error:
                self._refuse(command.number, error)
        elif self._clock() >= deadline_s:
            self._give_up(busy(self._core.live_count, command.timeout_s))

    def _sleep(self, command: Sleep) -> None:
        self._tell(command.number, self._sleeper.sleep(command.level, abort=command.mode == "abort"))

    def _tell(self, number: int, flushed: Flushed | None = None) -> None:
        self.news.append(SleepNews(number=number, state=self._sleeper.state, flushed=flushed))

    def _refuse(self, number: int, error: WeftError) -> None:
        self.news.append(SleepNews(number=number, state=self._sleeper.state, refusal=Refusal.of(error)))

    def _give_up(self, why: WeftError) -> None:
        if self._waiting is not None:
            command, _ = self._waiting
            self._waiting = None
            self._refuse(command.number, why)
