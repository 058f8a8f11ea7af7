"""KV pages: one owner each.

``owners[page]`` is the owner of a page (law L1; owners.py): the pool, a lease that may write it, or the
prefix tree, whose pages are full and read only (law L7). Sharing is no count here: a lease that reads the
tree's pages holds the node where they end (prefix/tree.py). ``indexes[page]`` is which page of its sequence
it is, from the front; compaction needs it. ``packing`` decides which page is next.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.frames.owners import FREE
from weft.memory.frames.packing import Packing
from weft.memory.values import FrameKind
from weft.units import FrameId, PageId


class Pages:
    __slots__ = ("indexes", "owners", "packing")

    def __init__(self, pages_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[PageId] = Packing(FrameKind.PAGES, pages_per_frame)
        self.owners = [FREE] * (pages_per_frame * frame_count)
        self.indexes = [0] * (pages_per_frame * frame_count)

    def take(self, pages: Sequence[PageId]) -> None:
        """Free pages leave the pool; ``give`` sets their owner."""
        self.packing.pop(pages)
        for page in pages:
            assert self.owners[page] == FREE, f"page {page} is held and was drafted as free"

    def give(self, pages: Sequence[PageId], owner: int, first_index: int) -> None:
        """``owner`` gets ``pages`` as its pages number ``first_index``, ``first_index + 1``, ..."""
        for index, page in enumerate(pages, start=first_index):
            self.owners[page] = owner
            self.indexes[page] = index

    def drop(self, pages: Sequence[PageId]) -> list[FrameId]:
        """``pages`` become free. Returns emptied frames."""
        for page in pages:
            assert self.owners[page] != FREE, f"page {page} is free and was given back"
            self.owners[page] = FREE
        return self.packing.push(pages)
