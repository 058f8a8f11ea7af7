"""Shortage as arithmetic: how much is missing, and whether moving is enough or something must be evicted.

    Room      what a draft can hand out now:  holes in frames of a kind, and frames free for either kind
    Demand    what would fit if everything were packed tightly:

                  frames >= ceil(pages / pages per frame) + ceil(slots / slots per frame)

Compaction lies between the two. If the demand is met and the room is not, free space is scattered: live pages
or slots move until a frame is empty (compaction.py). If the demand is not met, moving cannot help, and cached
data is evicted (eviction.py): exactly as much as it takes, wherever it lies.

So bytes of the wrong kind are never evicted for nothing, and eviction knows no frames. Which cached data goes
is a question of value. Where the rest lies is a question of copies.

Rejected: counting the shortage in bytes (eleven states of a frame of twelve free no page); choosing evictions
by the frame they lie in (it evicts valuable data because of its neighbours).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.units import ceil_div

SLOTS_AHEAD_MAX = 24
SLOTS_AHEAD_SHARE = 64
"""One slot in 64 is kept free ahead of need."""


def slots_ahead(slot_count: int) -> int:
    """Slots to keep free of ``slot_count``. A checkpoint without a free slot is skipped; a step may want
    several."""
    return min(SLOTS_AHEAD_MAX, ceil_div(slot_count, SLOTS_AHEAD_SHARE))


@dataclass(frozen=True, slots=True)
class Room:
    """Holes in frames in use, free frames, and items per frame. A kind with 0 per frame does not exist in the
    model and is never short."""

    pages: int
    slots: int
    frames: int
    pages_per_frame: int
    slots_per_frame: int

    def short(self, pages: int, slots: int) -> tuple[int, int]:
        """How many of ``pages`` and ``slots`` cannot be given, if the slots are given first."""
        frames = self.frames
        slots_short = pages_short = 0
        if self.slots_per_frame:
            more = max(0, slots - self.slots)
            claimed = min(frames, ceil_div(more, self.slots_per_frame))
            slots_short = max(0, more - claimed * self.slots_per_frame)
            frames -= claimed
        if self.pages_per_frame:
            pages_short = max(0, pages - self.pages - frames * self.pages_per_frame)
        return pages_short, slots_short

    def frames_to_empty(self, pages: int, slots: int) -> tuple[int, int]:
        """Frames of pages and frames of slots to empty by moves, so that ``pages`` and ``slots`` can be
        given; limited by the holes to spare."""
        if not self.pages_per_frame or not self.slots_per_frame:
            return 0, 0
        pages_short, slots_short = self.short(pages, slots)
        of_pages = min(ceil_div(slots_short, self.slots_per_frame),
                       max(0, self.pages - pages) // self.pages_per_frame)
        of_slots = min(ceil_div(pages_short, self.pages_per_frame),
                       max(0, self.slots - slots) // self.slots_per_frame)
        return of_pages, of_slots


@dataclass(frozen=True, slots=True)
class Demand:
    """``pages`` and ``slots`` are held or wanted and have to fit into ``frames``."""

    frames: int
    pages_per_frame: int
    slots_per_frame: int
    pages: int
    slots: int

    def met(self, pages_freed: int = 0, slots_freed: int = 0) -> bool:
        """Whether they fit once ``pages_freed`` and ``slots_freed`` are free."""
        return self.frames_needed(pages_freed, slots_freed) <= self.frames

    def frames_needed(self, pages_freed: int, slots_freed: int) -> int:
        """Frames that they need once ``pages_freed`` and ``slots_freed`` are free. Negative arguments are
        extra demand."""
        frames = self._frames_of_slots(slots_freed)
        if self.pages_per_frame:
            frames += ceil_div(max(0, self.pages - pages_freed), self.pages_per_frame)
        return frames

    def pages_missing(self, pages_freed: int, slots_freed: int) -> int:
        """Pages that have to go besides, if no more slots do."""
        room = (self.frames - self._frames_of_slots(slots_freed)) * self.pages_per_frame
        return max(0, self.pages - pages_freed - room)

    def slots_to_a_frame(self, slots_freed: int) -> int:
        """Slots that have to go besides until the slots need one frame less."""
        per_frame = self.slots_per_frame
        return max(1, self.slots - slots_freed) % per_frame or per_frame if per_frame else 1

    def _frames_of_slots(self, slots_freed: int) -> int:
        return ceil_div(max(0, self.slots - slots_freed), self.slots_per_frame) if self.slots_per_frame else 0


UNMEETABLE = Demand(frames=-2**60, pages_per_frame=1, slots_per_frame=1, pages=0, slots=0)
"""No eviction meets it."""
