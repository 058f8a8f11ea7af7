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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from weft.memory.audit import audit
from weft.memory.books import Books
from weft.memory.cache import CacheCounts
from weft.memory.draft import Draft
from weft.memory.lease import Lease
from weft.memory.plan import ArenaPlan
from weft.memory.reservation import Match, Reservation
from weft.memory.transaction import apply
from weft.units import SeqId


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
    """Of ``slots_held``, checkpoints in the prefix tree."""
    cached_bytes: int = 0
    """``pages_cached`` and ``slots_cached``."""
    evictable_bytes: int = 0
    cache_nodes: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)

    @property
    def used_share(self) -> float:
        """Share of the arena that is not free for either kind."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else 0.0


class Memory:
    """The memory of one rank. ``plan`` is its geometry; not thread safe, as one engine owns it."""

    def __init__(self, plan: ArenaPlan, *, cache: bool = False) -> None:
        self.plan = plan
        self._books = Books(plan, cache=cache)
        self._pages_held_max = 0
        self._slots_held_max = 0
        self._frames_used_max = 0

    @property
    def caches(self) -> bool:
        """Whether anything is kept for later sequences."""
        return self._books.cache.enabled

    def match(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, salt: str) -> Match:
        """What is cached of ``tokens`` for ``salt``; reads only. At least the last token is left to compute.
        With the cache off it is nothing, and nothing is lost."""
        books = self._books
        return books.cache.match(np.asarray(tokens, dtype=np.int32), salt, books.version)

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
        self._pages_held_max = max(self._pages_held_max, pages_held)
        self._slots_held_max = max(self._slots_held_max, slots_held)
        self._frames_used_max = max(self._frames_used_max, frames_used)

    def flush(self) -> None:
        """Drop whatever is cached and no sequence reads. A commit of its own: between steps only."""
        draft = self.draft()
        draft.flush()
        self.commit(draft.seal())

    def lease(self, seq: SeqId) -> Lease:
        """What ``seq`` holds. AssertionError where it has no lease."""
        lease = self._books.leases.get(seq)
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def usage(self) -> MemoryUsage:
        plan, books, tree = self.plan, self._books, self._books.cache.tree
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
            pages_cached=tree.page_count,
            pages_shared=tree.held_page_count,
            slots_cached=tree.slot_count,
            cached_bytes=tree.page_count * plan.page_bytes + tree.slot_count * plan.slot_stride_bytes,
            evictable_bytes=books.cache.evictable_bytes,
            cache_nodes=len(tree.by_id),
            cache=replace(books.cache.counts),
        )

    def audit(self) -> None:
        """Recount everything from the owners (law L1). AssertionError names the first thing wrong."""
        audit(self._books)
