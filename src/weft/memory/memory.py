"""The facade: five verbs over one arena, and the numbers about it.

    match (reads only)               what of a prompt is there already
    open  extend  save  close        on a draft, which changes nothing (draft.py)
      '- publish: a close that goes on; reclaim: what to do when open or extend said no
    commit                           the only writer (transaction.py)

    memory = Memory(plan_arena(spec, memory_bytes))
    draft = memory.draft()
    if draft.open(seq, memory.match(tokens, salt=""), len(tokens)):
        ...                                  # a plan is made from draft.new_pages(seq), draft.slot_of(seq)
    memory.commit(draft.seal())              # or drop the draft: nothing has happened

Everything a caller may know is a return value here: pressure is False or None (law L3), a bug is an
assert. Nobody outside this folder sees frames, except as the ids to zero (law L6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from weft.memory.audit import audit
from weft.memory.books import Books
from weft.memory.draft import Draft
from weft.memory.frames.plan import ArenaPlan
from weft.memory.lease import Lease
from weft.memory.prefix.cache import CacheCounts
from weft.memory.prefix.namespaces import with_lost_to_salt
from weft.memory.prefix.policy import Policy
from weft.memory.prefix.shape import CacheShape, shape_of
from weft.memory.reservation import Reservation
from weft.memory.transaction import apply
from weft.memory.values import NOTHING_RECALLED, Match
from weft.units import SeqId


@dataclass(slots=True)
class MoveCounts:
    """What compaction and changes of kind have cost since the start; they only grow. ``bytes``: copied for
    moves; ``frames_converted``: frames that became the other kind, and were zeroed for it."""

    pages: int = 0
    slots: int = 0
    bytes: int = 0
    frames_converted: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes and counts. ``page_bytes + slot_bytes + open_bytes + free_bytes == arena_bytes``: held by
    pages, held by slots, free inside frames in use (each kind can have its own), free for either kind.
    ``*_max`` are high-water marks since the start."""

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
    """Of ``pages_held``, those that belong to the prefix tree; the others are private to one sequence."""
    pages_shared: int = 0
    """Of ``pages_cached``, those that running sequences read: they cannot be evicted."""
    slots_cached: int = 0
    """Of ``slots_held``, checkpoints in the prefix tree; those that are compressed are in pages."""
    states_compressed: int = 0
    compressed_bytes: int = 0
    """Of the pages, among ``pages_cached``, that ``states_compressed`` checkpoints lie in."""
    pages_compressed: int = 0
    """Pages of cached KV that are compressed, in ``compressed_kv_bytes`` of the pages among
    ``pages_cached``."""
    compressed_kv_bytes: int = 0
    compressed_kv_dtype: str | None = None
    """What KV is compressed in; None: it never is."""
    cached_bytes: int = 0
    """``pages_cached`` and ``slots_cached``."""
    evictable_bytes: int = 0
    cache_nodes: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    moves: MoveCounts = field(default_factory=MoveCounts)

    @property
    def used_share(self) -> float:
        """Share of the arena that is not free for either kind."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else 0.0


class Memory:
    """The memory of one rank. ``plan`` is its geometry; not thread safe, as one engine owns it."""

    def __init__(self, plan: ArenaPlan, *, cache: bool = False, policy: Policy | None = None,
                 count_salt: bool = False) -> None:
        """``cache``: prefixes are kept; ``policy``: what of them goes first, None for least recently used;
        ``count_salt``: what only other namespaces have is looked for, and counted as lost (see
        ``namespaces``)."""
        self.plan = plan
        self.counts_salt = count_salt
        self._books = Books(plan, cache=cache, policy=policy)
        self._pages_held_max = 0
        self._slots_held_max = 0
        self._frames_used_max = 0
        self._moved = MoveCounts()

    @property
    def caches(self) -> bool:
        """Whether anything is kept for later sequences."""
        return self._books.cache.enabled

    def match(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, salt: str) -> Match:
        """What is cached of ``tokens`` for ``salt``; reads only. At least the last token is left to compute.
        With the cache off it is nothing, and nothing is lost."""
        books = self._books
        asked = np.asarray(tokens, dtype=np.int32)
        match = books.cache.match(asked, salt, books.version)
        if self.caches:
            recall = books.cache.policy.recall(salt, asked[:-1].tobytes())
            match = match if recall is NOTHING_RECALLED else replace(match, recall=recall)
        return with_lost_to_salt(books.cache, asked, match) if self.counts_salt else match

    def draft(self) -> Draft:
        """A transaction to fill; see ``Draft`` for open, extend, save, close and seal."""
        return Draft(self._books)

    def commit(self, reservation: Reservation) -> None:
        """Make ``reservation`` true. AssertionError where it was drafted on another version."""
        books = self._books
        # What it takes and what it closes are held at once: the peak of a step is before it gives back.
        pages_held = books.pages.packing.held_count + len(reservation.pages)
        slots_held = books.slots.packing.held_count + len(reservation.slots)
        frames_used = self.plan.frame_count - books.arena.free_count + len(reservation.frames)
        apply(books, reservation)
        books.cache.policy.committed()
        self._count_moves(reservation)
        self._pages_held_max = max(self._pages_held_max, pages_held)
        self._slots_held_max = max(self._slots_held_max, slots_held)
        self._frames_used_max = max(self._frames_used_max, frames_used)

    def _count_moves(self, reservation: Reservation) -> None:
        pages, slots, counts = len(reservation.moves.pages), len(reservation.moves.slots), self._moved
        counts.pages += pages
        counts.slots += slots
        counts.bytes += pages * self.plan.page_bytes + slots * self.plan.slot_stride_bytes
        counts.frames_converted += sum(claim.held not in (None, claim.kind) for claim in reservation.frames)

    def flush(self) -> None:
        """Drop whatever is cached and no sequence reads. A commit of its own: between steps only."""
        draft = self.draft()
        draft.flush()
        self.commit(draft.seal())

    def lose(self) -> None:
        """The arena's bytes are given up: drop what is cached, and take every frame for one that was never
        used, so that each is zeroed before its first use again (law L6). Counters and what the policy has
        learned stay. Nobody may hold anything."""
        self.flush()
        books = self._books
        held = (len(books.leases), books.pages.packing.held_count, books.slots.packing.held_count)
        assert held == (0, 0, 0), f"leases, pages and slots are held while the arena goes: {held}"
        books.arena.forget()

    @property
    def version(self) -> int:
        """Commits so far."""
        return self._books.version

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prefixes that are cached, each once. Looks at every node."""
        return sum(node.end - node.start for node in self._books.cache.tree.nodes())

    def cache_shape(self, seconds_since: Callable[[int], float]) -> CacheShape:
        """What the prefix tree looks like: sizes and uses, no tokens. ``seconds_since``: how long ago a
        version was. Looks at each node once, up to a bound."""
        return shape_of(self._books.cache, seconds_since)

    def lease(self, seq: SeqId) -> Lease:
        """What ``seq`` holds. AssertionError where it has no lease."""
        lease = self._books.leases.get(seq)
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def usage(self) -> MemoryUsage:
        plan, books, tree, compressed = self.plan, self._books, self._books.cache.tree, self._books.cache.compressed_states
        pages_cached, compressed_kv = books.cache.page_count, books.cache.compressed_kv
        pages, slots = books.pages.packing, books.slots.packing
        free = books.arena.free_count
        page_bytes = pages.held_count * plan.page_bytes
        slot_bytes = slots.held_count * plan.slot_stride_bytes
        return MemoryUsage(
            arena_bytes=plan.arena_bytes,
            page_bytes=page_bytes,
            slot_bytes=slot_bytes,
            open_bytes=plan.arena_bytes - page_bytes - slot_bytes - free * plan.frame_bytes,
            free_bytes=free * plan.frame_bytes,
            frame_count=plan.frame_count,
            frames_free=free,
            frames_of_pages=len(pages.stacks),
            frames_of_slots=len(slots.stacks),
            pages_held=pages.held_count,
            slots_held=slots.held_count,
            pages_available=pages.free_count + free * plan.pages_per_frame,
            slots_available=slots.free_count + free * plan.slots_per_frame,
            leases=len(books.leases),
            pages_held_max=self._pages_held_max,
            slots_held_max=self._slots_held_max,
            frames_used_max=self._frames_used_max,
            pages_cached=pages_cached,
            pages_shared=tree.held_page_count,
            slots_cached=tree.slot_count,
            states_compressed=len(compressed),
            compressed_bytes=compressed.page_count * plan.page_bytes,
            pages_compressed=compressed_kv.record_count,
            compressed_kv_bytes=compressed_kv.page_count * plan.page_bytes,
            compressed_kv_dtype=plan.compressed_kv_dtype if plan.compressed_kv_bytes else None,
            cached_bytes=pages_cached * plan.page_bytes + tree.slot_count * plan.slot_stride_bytes,
            evictable_bytes=books.cache.evictable_bytes,
            cache_nodes=len(tree.by_id),
            cache=replace(books.cache.counts),
            moves=replace(self._moved),
        )

    def audit(self) -> None:
        """Recount everything from the owners (law L1). AssertionError names the first thing wrong."""
        audit(self._books)
