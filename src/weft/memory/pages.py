"""KV pages: who holds them is a count.

``holders[page]`` is how many owners a page has: 0 is free, 1 is a page that its owner may write, more is
a shared one that nobody may write (law L7). Owners are leases; the count is what lets a page have several
of them without a flag, and what ``audit`` recounts (law L1). Where pages come from is ``packing``.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.arena import FrameKind
from weft.memory.packing import Packing
from weft.units import FrameId, PageId


class Pages:
    __slots__ = ("holders", "packing")

    def __init__(self, pages_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[PageId] = Packing(FrameKind.PAGES, pages_per_frame)
        self.holders = [0] * (pages_per_frame * frame_count)

    def take(self, pages: Sequence[PageId]) -> None:
        """Free pages get their first holder."""
        self.packing.pop(pages)
        for page in pages:
            assert self.holders[page] == 0, f"page {page} is held and was drafted as free"
            self.holders[page] = 1

    def drop(self, pages: Sequence[PageId]) -> list[FrameId]:
        """One holder lets go of ``pages``; those without another become free. Returns emptied frames."""
        freed = []
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free and was given back"
            self.holders[page] -= 1
            if not self.holders[page]:
                freed.append(page)
        return self.packing.push(freed)
