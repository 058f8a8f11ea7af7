"""The facade: five verbs over one arena, and the numbers about it.

    match (reads only)      what of a prompt is there already
    open  extend  save  close        on a draft, which changes nothing (transaction.py)
    commit                  the only writer

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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.memory.audit import audit
from weft.memory.lease import Lease
from weft.memory.plan import ArenaPlan
from weft.memory.transaction import Books, Draft, Match, Reservation, apply
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

    @property
    def used_share(self) -> float:
        """Share of the arena that is not free for either kind."""
        return 1 - self.free_bytes / self.arena_bytes if self.arena_bytes else 0.0


class Memory:
    """The memory of one rank. ``plan`` is its geometry; not thread safe, as one engine owns it."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self._books = Books(plan)
        self._pages_held_max = 0
        self._slots_held_max = 0
        self._frames_used_max = 0

    def match(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, salt: str) -> Match:
        """What is cached of ``tokens`` for ``salt``; reads only. No checkpoint is ever kept yet, so it
        is nothing, and nothing is lost."""
        return Match(cached_tokens=0, lost_tokens=0, lost_reason="no_checkpoint")

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

    def lease(self, seq: SeqId) -> Lease:
        """What ``seq`` holds. AssertionError where it has no lease."""
        lease = self._books.leases.get(seq)
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def usage(self) -> MemoryUsage:
        plan, books = self.plan, self._books
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
        )

    def audit(self) -> None:
        """Recount everything from the owners (law L1). AssertionError names the first thing wrong."""
        audit(self._books)
