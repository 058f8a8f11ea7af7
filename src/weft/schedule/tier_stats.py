"""What the store tier did since the start, as values. ``StoreTier.stats`` gives them.

They cross processes inside ``EngineStats``. The HTTP process shows them and never imports the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.memory.usage import StoreStats


@dataclass(slots=True)
class RestoreCounts:
    """Since the start; they only grow. ``saved_s``: what computing the restored tokens was estimated to take,
    less the time that their fetches took. ``late``: fetches that passed their deadline."""

    restores: int = 0
    restored_tokens: int = 0
    saved_s: float = 0.0
    damaged: int = 0
    late: int = 0


@dataclass(slots=True)
class WriteCounts:
    """Since the start; they only grow. ``skipped``: candidates that were not worth writing. ``lost``: evicted
    or compressed before they were copied, or pushed out of the queue."""

    written: int = 0
    dropped: int = 0
    skipped: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """What the tier did since the start, and the store's own numbers. ``buffer_bytes``: in use now."""

    restores: RestoreCounts
    writes: WriteCounts
    store: StoreStats
    waiting: int
    buffer_bytes: int
    buffer_bytes_max: int


NO_TIER = TierStats(RestoreCounts(), WriteCounts(), StoreStats("", False, 0, 0, 0, 0), 0, 0, 0)
"""The numbers of an engine without a store."""
