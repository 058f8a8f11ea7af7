"""The pool of candidates for eviction: a few hundred rows in order of value, the lowest first.

    values   0.1  0.4  0.4  0.9 ...      two lists side by side, always sorted
    rows      17    3   40    8 ...

A row that changes is taken out and inserted at its new place. A refresh values all rows again at once, as
arrays. Reading walks a list, so ranking costs a plan nothing.

Rejected: a heap (a tuple for each entry, outdated entries, and each reader takes a copy apart).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class Pool:
    __slots__ = ("_members", "_rows", "_values")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._rows: list[int] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def ranked(self) -> Iterator[tuple[float, int]]:
        """Values and rows, the lowest value first; a snapshot."""
        return zip(self._values.copy(), self._rows.copy(), strict=True)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 [rows], the lowest value first."""
        return np.array(self._rows, np.int64)

    def put(self, row: int, value: float) -> None:
        """``row`` has ``value`` from now on; it becomes a candidate if it was none."""
        self.drop(row)
        self._members.add(row)
        at = bisect_right(self._values, value)
        self._values.insert(at, value)
        self._rows.insert(at, row)

    def drop(self, row: int) -> None:
        """``row`` is not a candidate any more."""
        if row in self._members:
            self._members.remove(row)
            at = self._rows.index(row)
            del self._rows[at], self._values[at]

    def fill(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64], most: int) -> None:
        """The candidates become the ``most`` of ``rows`` with the lowest ``values``; both [rows]."""
        if values.size > most:
            low = np.argpartition(values, most)[:most]
            rows, values = rows[low], values[low]
        order = np.lexsort((rows, values))
        self._values = values[order].tolist()
        self._rows = rows[order].tolist()
        self._members = set(self._rows)
