"""``StoreStats``: what a store holds and has done, as one value. ``Store.stats`` gives it.

It crosses processes inside ``EngineStats``. The values with arrays are in ``store.values``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and what it holds now.

    ``checkpoints``: of this namespace; ``others``: of other models in the same directory.
    ``damaged``, ``dropped``: counts by reason. ``notes``: sentences about the state of the store that an
    operator reads, such as that another process holds the lock."""

    path: str
    writable: bool
    checkpoints: int
    kv_records: int
    stored_bytes: int
    capacity_bytes: int
    matches: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    puts: int = 0
    written_bytes: int = 0
    queued_bytes: int = 0
    evicted: int = 0
    read_bytes_per_second: float = 0.0
    read_latency_s: float = 0.0
    damaged: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    remote: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    """Of records that went through packing: before and after."""
