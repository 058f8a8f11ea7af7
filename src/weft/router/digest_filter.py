"""Which of a prompt's digests a table may have, without a lookup for each of them.

    digests of a prompt   d0 d1 d2 d3 ...   one for each page
                           |  |  |  |
    low bits       cells [ 0  0  3  0  1 ... ]     0: no entry has these bits     --> positions worth a lookup

A table of 100,000 entries lies in main memory. A lookup for each page of a prompt waits for memory each time,
and most lookups miss. Here numpy reads one byte for each page, and most bytes are 0.

A cell counts the entries with its low bits. There are at least CELLS_PER_ENTRY cells for each entry, so at
most one absent digest in sixteen is looked up in vain. A cell that is full stays full: it costs lookups and
hides no entry. The cells are counted again when their number grows.

Law L11: bounded by the table, which has a bound.

Rejected: a sorted array of all digests (an insertion moves half of it); digests of every fourth page only
(a request ends between two of them, and its state is the next turn's checkpoint).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from weft.prefix_digests import Digests

CELLS_MIN = 1 << 16
CELLS_PER_ENTRY = 16
_FULL = 255


class DigestFilter:
    """``entries`` of the table are passed in when the cells are counted again."""

    def __init__(self) -> None:
        self._count = 0
        self._resize(CELLS_MIN)

    def add(self, digest: int, entries: Collection[int]) -> None:
        """``digest`` is a new one, and already among ``entries``."""
        self._count += 1
        if self._count * CELLS_PER_ENTRY > len(self._cells):
            self._recount(2 * len(self._cells), entries)
            return
        cell = digest & self._mask
        if self._cells[cell] < _FULL:
            self._cells[cell] += 1

    def remove(self, digest: int) -> None:
        self._count -= 1
        cell = digest & self._mask
        if self._cells[cell] < _FULL:
            self._cells[cell] -= 1

    def candidates(self, digests: Digests) -> list[int]:
        """Indices of ``digests`` that the table may have, ascending."""
        indices: list[int] = np.flatnonzero(self._view[digests & self._mask_word]).tolist()
        return indices

    def _recount(self, size: int, entries: Collection[int]) -> None:
        self._resize(size)
        digests = np.fromiter(entries, dtype=np.uint64, count=len(entries))
        counts = np.bincount((digests & self._mask_word).astype(np.intp), minlength=size)
        self._view[:] = np.minimum(counts, _FULL)

    def _resize(self, size: int) -> None:
        self._cells = bytearray(size)
        self._view = np.frombuffer(self._cells, dtype=np.uint8)
        self._mask = size - 1
        self._mask_word = np.uint64(self._mask)
