"""Shares of API keys in a resource: the key that has used fewest seconds of it is next.

    engine       steps         ``weft.schedule.fair_queue``
    workers      jobs          ``weft.text.workers``: templates, pictures, videos, large bodies

Deficit round robin by measured seconds: a key that asks for much of a resource waits for longer. A key that comes back
begins where the others are: time without requests gives no credit, so none can be saved for an attack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TURN_S = 0.05
"""Assumed seconds of a sequence before any has ended."""
_KEYS_MAX = 4096
"""Most keys whose seconds are remembered while they have no sequences (law L11)."""


class KeyShares:
    """Seconds that each key has used, and those of an average sequence."""

    def __init__(self) -> None:
        self.used_s: dict[str, float] = {}
        self._total_s = 0.0
        self._ended = 0

    @property
    def turn_s(self) -> float:
        return self._total_s / self._ended if self._ended else _TURN_S

    def arrive(self, key: str, active: Iterable[str]) -> None:
        """Note that ``key``, which had no sequences, has one; the keys of ``active`` have some."""
        others = [self.used_s.get(other, 0.0) for other in active if other != key]
        if others:
            self.used_s[key] = max(self.used_s.get(key, 0.0), min(others))
        if len(self.used_s) > _KEYS_MAX:
            self.used_s = {other: self.used_s.get(other, 0.0) for other in {key, *active}}

    def charge(self, seconds: Mapping[str, float]) -> None:
        for key, used_s in seconds.items():
            self.used_s[key] = self.used_s.get(key, 0.0) + used_s
            self._total_s += used_s

    def ended(self, *, parted: bool) -> None:
        """Note the end of a sequence. ``parted``: it ran together with those of other keys; seconds are measured only
        then."""
        self._ended += parted
