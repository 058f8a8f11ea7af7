"""The store tier in a step plan and in the counters: frozen values, and numbers since the start.

``store_tier`` makes a ``StoreStep`` true when its plan is committed. ``TierStats`` crosses processes inside
``EngineStats``. The HTTP process shows it and never imports the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft.memory.usage import StoreStats
from weft.units import SeqId

if TYPE_CHECKING:
    from weft.memory.prefix_store import StoredPrefix  # numpy, which the HTTP process does not import


@dataclass(slots=True)
class RestoreCounts:
    """Counts of restores since the start; they only grow. ``saved_s``: estimated seconds of computing the restored
    tokens, less the time that their fetches took. ``late``: fetches that passed their deadline."""

    restores: int = 0
    restored_tokens: int = 0
    saved_s: float = 0.0
    damaged: int = 0
    late: int = 0


@dataclass(slots=True)
class WriteCounts:
    """Counts of writes since the start; they only grow. ``skipped``: candidates that were not worth writing. ``lost``:
    evicted or compressed before they were copied, or pushed out of the queue."""

    written: int = 0
    dropped: int = 0
    skipped: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of the tier since the start, and those of the store. ``buffer_bytes``: in use now."""

    restores: RestoreCounts
    writes: WriteCounts
    store: StoreStats
    waiting: int
    buffer_bytes: int


NO_TIER = TierStats(RestoreCounts(), WriteCounts(), StoreStats(), 0, 0)
"""The numbers of an engine without a store."""


class FetchKey(NamedTuple):
    """A stored snapshot of one salt."""

    salt: str
    snapshot: int


class FetchWish(NamedTuple):
    """A wish of a plan: ``seq`` waits for ``prefix`` from the commit of this plan on; ``start``: KV from there on is
    read. ``others``: requests that run or wait besides ``seq``."""

    seq: SeqId
    key: FetchKey
    prefix: StoredPrefix
    start: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class StoreStep:
    """The store's part of a step plan. ``wishes``: fetches that begin, or that one more request waits for. ``loads``:
    fetches whose bytes this step loads. ``closed``: loads that have ended, whose leases close."""

    wishes: tuple[FetchWish, ...] = ()
    loads: tuple[FetchKey, ...] = ()
    closed: tuple[FetchKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wishes or self.loads or self.closed)


NO_STORE_STEP = StoreStep()
