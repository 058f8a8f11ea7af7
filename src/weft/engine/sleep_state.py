"""Sleep as values: what an engine may give back, and how much of it is missing now.

                weights              arena, cached prefixes   back by
    awake       where they compute   in memory
    level 1     in host memory       gone                     a copy, and an allocation
    level 2     gone                 gone                     reading the checkpoint, and an allocation

These values cross between processes and stand below the executor. ``weft.engine.sleeper`` acts on them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from weft.errors import AsleepError, RequestError

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
"""In the order of waking. ``kv_cache`` is the arena, recurrent states included."""
LEVELS = (1, 2)


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


def check_level(level: int) -> None:
    """Raises RequestError for an unknown level."""
    if level not in LEVELS:
        raise RequestError(f"level is {level}; it may be 1 (weights go to host memory) or 2 (weights are "
                           "dropped, and read again on waking)", param="level")


def check_parts(parts: Collection[str] | None) -> Collection[str]:
    """``parts``, or all of them. Raises RequestError for an unknown part."""
    for part in parts or ():
        if part not in PARTS:
            raise RequestError(f"tags has {part!r}; it may have {' and '.join(PARTS)}", param="tags")
    return parts or PARTS
