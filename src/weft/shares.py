"""Fair shares of API keys in a resource: the next turn goes to the key that has used the fewest seconds.

    engine       steps         ``weft.schedule.fair_queue``
    workers      jobs          ``weft.text.workers``: templates, pictures, videos, large bodies

Deficit round robin by measured seconds: a key that uses much of a resource waits longer. A key that returns starts
level with the others: idle time gives no credit, so credit cannot be saved for an attack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TURN_S = 0.05
"""Assumed seconds of a sequence, before the first one has ended."""
_KEYS_MAX = 4096
"""Most remembered keys without sequences (law L11)."""


class KeyShares:
    """Seconds used by each key, and seconds of an average sequence."""

    def __init__(self) -> None:
        self.used_s: dict[str, float] = {}
        self._total_s = 0.0
        self._ended = 0

    @property
    def turn_s(self) -> float:
        return self._total_s / self._ended if self._ended else _TURN_S

    def arrive(self, key: str, active: Iterable[str]) -> None:
        """Note the first sequence of ``key``. ``active``: the keys that have sequences."""
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
        """Note the end of a sequence. ``parted``: whether it ran together with sequences of other keys; only then are
        seconds measured."""
        self._ended += parted
