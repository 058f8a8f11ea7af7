"""Virtual time: the engine's clock as a number that only the simulator moves."""

from __future__ import annotations


class VirtualClock:
    """Called, it tells the time in seconds, as the engine's ``clock``."""

    __slots__ = ("_now_s",)

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds

    def advance_to(self, when_s: float) -> None:
        self._now_s = max(self._now_s, when_s)
