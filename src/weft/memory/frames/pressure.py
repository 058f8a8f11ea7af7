"""When memory is short: by how much, and whether moving is enough or something must go. Numbers only.

    Room      what a draft can hand out right now:  holes in frames of a kind, and frames free for either
    Demand    what would fit if everything were packed tightly:

                  frames >= ceil(pages / pages per frame) + ceil(slots / slots per frame)

Between the two lies compaction. Where the demand is met and the room is not, things lie badly: live pages
or slots move until a frame is empty (compaction.py). Where the demand is not met, no moving helps and cached
things have to go (eviction.py), exactly as many as it takes, wherever they lie.

So bytes of the wrong kind are never evicted for nothing, and eviction need not know frames: which cached
thing goes is a question of its worth, and where the others end up is a question of copying.

Rejected: counting what is short in bytes (eleven states of a frame of twelve are worth no page); choosing
what to evict by the frame it lies in (throws away good things for lying beside bad ones).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.units import ceil_div

SLOTS_AHEAD_MAX = 24
SLOTS_AHEAD_SHARE = 64
"""One slot in so many is free ahead of need."""


def slots_ahead(slot_count: int) -> int:
    """Slots to have free of ``slot_count``: a state that finds none is not kept; a step may want several."""
    return min(SLOTS_AHEAD_MAX, ceil_div(slot_count, SLOTS_AHEAD_SHARE))


@dataclass(frozen=True, slots=True)
class Room:
    """Holes in frames in use, free frames, and how many items make a frame: 0 of a kind that the model does
    not have, and which is never short."""

    pages: int
    slots: int
    frames: int
    pages_per_frame: int
    slots_per_frame: int

    def short(self, pages: int, slots: int) -> tuple[int, int]:
        """How many of ``pages`` and ``slots`` cannot be given, when the slots are given first."""
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
        """Frames of pages and frames of slots to empty by moving what is in them, so that ``pages`` and
        ``slots`` can be given: as far as there are holes to spare."""
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
    """``pages`` and ``slots`` are held or wanted, and should fit into ``frames``."""

    frames: int
    pages_per_frame: int
    slots_per_frame: int
    pages: int
    slots: int

    def met(self, pages_freed: int = 0, slots_freed: int = 0) -> bool:
        """Whether they do once so many are free."""
        return self.frames_taken(pages_freed, slots_freed) <= self.frames

    def frames_taken(self, pages_freed: int, slots_freed: int) -> int:
        """Frames that they need once so many are free; fewer than none are those that are wanted besides."""
        taken = self._frames_of_slots(slots_freed)
        if self.pages_per_frame:
            taken += ceil_div(max(0, self.pages - pages_freed), self.pages_per_frame)
        return taken

    def pages_missing(self, pages_freed: int, slots_freed: int) -> int:
        """Pages that have to go besides, if nothing else does."""
        room = (self.frames - self._frames_of_slots(slots_freed)) * self.pages_per_frame
        return max(0, self.pages - pages_freed - room)

    def slots_to_a_frame(self, slots_freed: int) -> int:
        """Slots that have to go besides until they need a frame less."""
        per_frame = self.slots_per_frame
        return max(1, self.slots - slots_freed) % per_frame or per_frame if per_frame else 1

    def _frames_of_slots(self, slots_freed: int) -> int:
        return ceil_div(max(0, self.slots - slots_freed), self.slots_per_frame) if self.slots_per_frame else 0


UNMEETABLE = Demand(frames=-2**60, pages_per_frame=1, slots_per_frame=1, pages=0, slots=0)
"""Whatever goes is not enough."""
