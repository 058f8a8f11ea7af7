"""Pins of an engine process, which are set at once and answered once their states are stored.

    PinPrefixes    --> Pinning.pin ... look, look --> Reply(states)     each state is stored, or will not be
    UnpinPrefixes  --> Pinning.unpin --> Reply(count)

A write takes several steps and time of the disk. The reply waits for the write for at most PIN_WRITE_S; requests do not
wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.engine.engine import EngineCore
from weft.engine.pinning import PIN_WRITE_S, STEPS_TO_CLOSE, Pinning
from weft.rpc.messages import PinPrefixes, Reply, UnpinPrefixes


@dataclass(slots=True)
class _Waiting:
    command: PinPrefixes
    step: int
    deadline_s: float
    has_come: bool = False
    """Whether requests that ended before the command are in the prefix tree by now."""


class PinQueue:
    """The queue of pins. ``clock`` returns seconds. ``take`` and ``look`` return the replies that are ready."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._clock = core, clock
        self._pinning = Pinning(core)
        self._waiting: list[_Waiting] = []

    def take(self, command: PinPrefixes | UnpinPrefixes, step: int) -> list[Reply]:
        """Carry out ``command``. ``step``: steps of the engine so far."""
        if isinstance(command, UnpinPrefixes):
            return [Reply.of(command.number, self._pinning.unpin(command.names))]
        self._pinning.pin(command.named)
        if not command.waits:
            return [self._reply(command)]
        self._waiting.append(_Waiting(command, step, self._clock() + PIN_WRITE_S))
        return []

    def look(self, step: int) -> list[Reply]:
        """Return the replies that are ready. Call this between two steps."""
        ended = []
        for waiting in list(self._waiting):
            named = waiting.command.named
            if not waiting.has_come and (step >= waiting.step + STEPS_TO_CLOSE or not self._core.has_work):
                waiting.has_come = True
                self._pinning.offer_again(named)
            is_safe = waiting.has_come and self._pinning.is_settled(named)
            if is_safe or self._clock() >= waiting.deadline_s:
                self._waiting.remove(waiting)
                ended.append(self._reply(waiting.command))
        return ended

    def forget(self) -> None:
        """Drop the questions of a server that has gone; the pins stay."""
        self._waiting.clear()

    def _reply(self, command: PinPrefixes) -> Reply:
        return Reply.of(command.number, self._pinning.states(command.named))
