"""``Extents``: which 4 KiB blocks of the volumes are free. Memory only.

    volume 0  | header | record | record |  free   | record |      free      |
    volume 1  | header | record |                free                        |

A record takes consecutive blocks of one volume. The smallest free run that fits is taken (best fit), and
neighbours grow together again when a record goes. A volume that does not exist yet is a free run as long as
the store may grow.

Law: L1 (a block is free or has one record); ``take_known`` refuses what overlaps.

Rejected: slots of fixed sizes. Records of 16 to 256 tokens beside states would need a dozen classes, and
space of one class is lost to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

BLOCK_BYTES = 4096


def blocks_for(payload_bytes: int) -> int:
    return -(-payload_bytes // BLOCK_BYTES)


@dataclass(slots=True)
class Extents:
    """Free runs of blocks, by volume and by length. Block 0 of a volume is its header."""

    free_blocks: int = 0
    total_blocks: int = 0
    _by_length: list[tuple[int, int, int]] = field(default_factory=list)
    """(length, volume, first block), sorted."""
    _by_start: dict[tuple[int, int], int] = field(default_factory=dict)
    _by_end: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_volume(self, volume: int, blocks: int) -> None:
        self.total_blocks += blocks - 1
        self._insert(volume, 1, blocks - 1)

    def take(self, blocks: int) -> tuple[int, int] | None:
        """(volume, first block) of ``blocks`` free blocks, or None."""
        at = bisect_left(self._by_length, (blocks, -1, -1))
        if at == len(self._by_length):
            return None
        length, volume, first = self._by_length[at]
        self._remove(volume, first, length)
        if length > blocks:
            self._insert(volume, first + blocks, length - blocks)
        return volume, first

    def give(self, volume: int, first: int, blocks: int) -> None:
        before = self._by_end.get((volume, first))
        if before is not None:
            length = first - before
            self._remove(volume, before, length)
            first, blocks = before, blocks + length
        after = self._by_start.get((volume, first + blocks))
        if after is not None:
            self._remove(volume, first + blocks, after)
            blocks += after
        self._insert(volume, first, blocks)

    def take_known(self, volume: int, used: list[tuple[int, int]]) -> None:
        """Takes (first, blocks) runs of a volume that is wholly free. ``used`` is sorted and without
        overlaps; the caller has dropped what overlaps."""
        length = self._by_start[volume, 1]
        self._remove(volume, 1, length)
        at, end = 1, 1 + length
        for first, blocks in [*used, (end, 0)]:
            assert first >= at, "records overlap"
            if first > at:
                self._insert(volume, at, first - at)
            at = first + blocks

    def drop_volume(self, volume: int, blocks: int) -> None:
        """Forgets the volume's free runs: nothing is placed there any more."""
        for length, _, first in [run for run in self._by_length if run[1] == volume]:
            self._remove(volume, first, length)
        self.total_blocks -= blocks - 1

    @property
    def longest_run(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    def wholly_free(self, volume: int, blocks: int) -> bool:
        return self._by_start.get((volume, 1)) == blocks - 1

    def _insert(self, volume: int, first: int, length: int) -> None:
        if length <= 0:
            return
        insort(self._by_length, (length, volume, first))
        self._by_start[volume, first] = length
        self._by_end[volume, first + length] = first
        self.free_blocks += length

    def _remove(self, volume: int, first: int, length: int) -> None:
        del self._by_length[bisect_left(self._by_length, (length, volume, first))]
        del self._by_start[volume, first]
        del self._by_end[volume, first + length]
        self.free_blocks -= length
