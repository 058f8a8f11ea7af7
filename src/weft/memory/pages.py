"""KV pages: one owner each.

``holders[page]`` is 0 or 1 (law L1): a page belongs to the pool, to a lease that may write it, or to a node
of the prefix tree, whose pages are full and read only (law L7). Sharing is no count here: a lease that reads
the tree's pages holds the node where they end (tree.py). Where pages come from is ``packing``.
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
        """Free pages get an owner."""
        self.packing.pop(pages)
        for page in pages:
            assert self.holders[page] == 0, f"page {page} is held and was drafted as free"
            self.holders[page] = 1

    def drop(self, pages: Sequence[PageId]) -> list[FrameId]:
        """The owner lets go of ``pages``. Returns emptied frames."""
        for page in pages:
            assert self.holders[page] == 1, f"page {page} is free and was given back"
            self.holders[page] = 0
        return self.packing.push(pages)
