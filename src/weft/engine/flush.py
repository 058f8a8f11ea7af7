"""A flush of the prefix cache that waits until it is safe.

A step in flight may read the pages that a flush evicts. A flush asked for meanwhile is *due*, and runs when
no step is in flight. A sequence that has ended gives its pages to the cache in the next plan. A flush that
finds closing sequences therefore runs once more after that plan.
"""

from __future__ import annotations

from weft.memory.memory import Memory
from weft.schedule.scheduler import Scheduler


class CacheFlush:
    """``due``: a flush was asked for and is not complete."""

    def __init__(self, memory: Memory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self.due = False

    def run(self, *, in_flight: bool) -> None:
        """Flush now, or as soon as nothing is in flight."""
        if in_flight:
            self.due = True
            return
        self._memory.flush()
        self.due = self._scheduler.has_closing
