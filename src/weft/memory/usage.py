"""Contents and counters of memory, its prefix cache and the store, as values.

``Memory.usage``, ``Memory.cache_shape`` and ``Store.stats`` compute them. They cross processes inside
``EngineStats``. The HTTP process shows them and never imports the memory itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from weft.memory.values import Lost


@dataclass(slots=True)
class CacheCounts:
    """Counters since the start; they only grow. ``lost``: tokens that opened sequences could not use. Leases that load
    are not counted as opened."""

    opened: int = 0
    hits: int = 0
    hit_tokens: int = 0
    lost: Lost = Lost()
    published: int = 0
    evicted_states: int = 0
    """Evicted states, tails included."""
    evicted_pages: int = 0
    """Bare KV, and one page for each tail."""
    evicted_tails: int = 0
    """Snapshots inside a page, where a request had ended."""
    compressed: int = 0
    """Snapshots that were compressed."""
    restored: int = 0
    """Leases that opened on a compressed snapshot."""
    compressed_pages: int = 0
    """Pages of KV that were compressed."""
    restored_pages: int = 0
    """Compressed pages that were restored again."""
    hits_inexact: int = 0
    """Leases that opened on data that was compressed once, or was computed from such data."""
    loaded: int = 0
    """Snapshots that came from a store."""
    loaded_tokens: int = 0
    """Tokens that those snapshots added to the cache."""

    def numbers(self) -> dict[str, int]:
        """Return the counters by name; those of ``lost`` are ``lost_*``."""
        counts: dict[str, int] = {}
        for name, count in asdict(self).items():
            counts |= {f"lost_{why}": tokens for why, tokens in count.items()} if name == "lost" else {name: count}
        return counts


STORE_COUNTS = frozenset({"lost_stored", "lost_damaged", "lost_store_busy", "loaded", "loaded_tokens"})
"""Counters that stay 0 without a store."""


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
    pages_cached: int = 0
    """Pages of the prefix tree among ``pages_held``; the others are private to one sequence."""
    pages_shared: int = 0
    """Pages that running sequences read among ``pages_cached``; they cannot be evicted."""
    slots_cached: int = 0
    """Snapshots of the prefix tree among ``slots_held``; compressed ones are in pages."""
    states_compressed: int = 0
    compressed_bytes: int = 0
    """Bytes of the pages, among ``pages_cached``, of the ``states_compressed`` snapshots."""
    pages_compressed: int = 0
    """Pages of cached KV that are compressed, in ``compressed_kv_bytes`` of the pages among ``pages_cached``."""
    compressed_kv_bytes: int = 0
    compressed_kv_dtype: str | None = None
    """The dtype of compressed KV; None: KV is never compressed."""
    cached_bytes: int = 0
    """Bytes of ``pages_cached`` and ``slots_cached``."""
    evictable_bytes: int = 0
    pinned_bytes: int = 0
    """KV and states of pinned snapshots that are evicted last."""
    cache_nodes: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    moves: MoveCounts = field(default_factory=MoveCounts)

    @property
    def used_share(self) -> float:
        """Share of the arena that is not free for either kind."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else 0.0


@dataclass(slots=True, kw_only=True)
class StoreCounts:
    """Counters of a store since it was opened. ``damaged`` and ``dropped`` are by reason."""

    damaged: dict[str, int] = field(default_factory=Counter)
    dropped: dict[str, int] = field(default_factory=Counter)
    matches: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    puts: int = 0
    written_bytes: int = 0
    evicted: int = 0
    read_bytes_per_second: float = 0.0
    read_latency_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StoreStats(StoreCounts):
    """Counters and present contents of a store; it crosses processes in ``EngineStats``.

    ``snapshots``: of this namespace; ``others``: of other models in the same directory. ``notes``: sentences
    about the state of the store that an operator reads, such as that another process holds the lock."""

    path: str = ""
    writable: bool = False
    snapshots: int = 0
    kv_records: int = 0
    stored_bytes: int = 0
    capacity_bytes: int = 0
    queued_bytes: int = 0
    remote: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    """Bytes of packed records, before and after packing."""
    bucket_fault: str = ""
    """Why the bucket does not answer now; empty while it does."""
    unreachable_s: float = 0.0
    """Seconds in which the bucket did not answer."""


@dataclass(slots=True)
class ShapeSum:
    """Sums over a set of nodes. ``youngest_s`` and ``oldest_s`` are ages in seconds."""

    nodes: int = 0
    pages: int = 0
    snapshots: int = 0
    inexact: int = 0
    """Nodes whose KV or snapshot was compressed once, or was computed from compressed data."""
    bytes: int = 0
    hits: int = 0
    youngest_s: float = 0.0
    oldest_s: float = 0.0

    def add(self, *, pages: int, snapshot: bool, inexact: bool, node_bytes: int, hits: int, age_s: float) -> None:
        """Add one node."""
        self.youngest_s = age_s if not self.nodes else min(self.youngest_s, age_s)
        self.oldest_s = max(self.oldest_s, age_s)
        self.nodes += 1
        self.pages += pages
        self.snapshots += snapshot
        self.inexact += inexact
        self.bytes += node_bytes
        self.hits += hits


@dataclass(slots=True)
class SaltShape:
    """The shape of one salt. ``number`` from 1, in the order of size; ``salted``: it has a name."""

    number: int
    salted: bool
    total: ShapeSum


@dataclass(slots=True)
class SizeClass:
    """Nodes whose position or length, in tokens, is above the class before and at most ``tokens_max``."""

    tokens_max: int
    total: ShapeSum = field(default_factory=ShapeSum)


@dataclass(slots=True)
class PrefixShape:
    """One place in the tree. ``tokens``: from the root to the place. ``hits``, ``tokens_saved`` and
    ``bytes``: its own and of all nodes below. ``age_s``: since the last use of any of them. ``branches``: its
    children. ``readers``: leases that run now. ``salt``: by number, 0 if it is not listed."""

    digest: str
    head: list[int]
    tokens: int
    tokens_saved: int
    bytes: int
    hits: int
    branches: int
    readers: int
    snapshot: bool
    age_s: float
    salt: int


@dataclass(slots=True)
class CacheShape:
    """The shape of the tree. ``cut_off``: the tree has more nodes than were looked at."""

    salts: list[SaltShape]
    salt_count: int
    depths: list[SizeClass]
    lengths: list[SizeClass]
    prefixes: list[PrefixShape]
    cut_off: bool
