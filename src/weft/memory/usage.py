"""What the memory holds and has done, as one value of numbers. ``Memory.usage`` computes it.

It crosses processes inside ``EngineStats``. The HTTP process shows it and never imports the memory itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.prefix.cache_counts import CacheCounts


@dataclass(slots=True)
class MoveCounts:
    """The cost of compaction and of frames that changed kind, since the start. ``bytes``: copied by moves.
    ``frames_converted``: frames that became the other kind and were zeroed for it."""

    pages: int = 0
    slots: int = 0
    bytes: int = 0
    frames_converted: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes and counts. ``page_bytes + slot_bytes + open_bytes + free_bytes == arena_bytes``: held as pages,
    held as slots, free inside frames in use (for that kind only), free for either kind. ``*_max`` are
    high-water marks since the start."""

    arena_bytes: int
    page_bytes: int
    slot_bytes: int
    open_bytes: int
    free_bytes: int
    frame_count: int
    frames_free: int
    frames_of_pages: int
    frames_of_slots: int
    pages_held: int
    slots_held: int
    pages_available: int
    slots_available: int
    leases: int
    pages_held_max: int
    slots_held_max: int
    frames_used_max: int
    pages_cached: int = 0
    """Pages of the prefix tree among ``pages_held``; the others are private to one sequence."""
    pages_shared: int = 0
    """Pages that running sequences read among ``pages_cached``; they cannot be evicted."""
    slots_cached: int = 0
    """Checkpoints of the prefix tree among ``slots_held``; compressed ones lie in pages."""
    states_compressed: int = 0
    compressed_bytes: int = 0
    """Bytes of the pages, among ``pages_cached``, of the ``states_compressed`` checkpoints."""
    pages_compressed: int = 0
    """Pages of cached KV that are compressed, in ``compressed_kv_bytes`` of the pages among
    ``pages_cached``."""
    compressed_kv_bytes: int = 0
    compressed_kv_dtype: str | None = None
    """The dtype of compressed KV; None: KV is never compressed."""
    cached_bytes: int = 0
    """Bytes of ``pages_cached`` and ``slots_cached``."""
    evictable_bytes: int = 0
    cache_nodes: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    moves: MoveCounts = field(default_factory=MoveCounts)

    @property
    def used_share(self) -> float:
        """Share of the arena that is not free for either kind."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else 0.0
