"""The candidates for eviction, with values that stay current.

    records   [ . . . . . . . . . . . . . . . ]      up to tens of thousands
                    |--- sweep ---|                  the next SWEEP_ROWS of them, every SWEEP_EVERY requests
                           v
    pool      the POOL_ROWS lowest values            two sorted lists, valued again with each request

Values change with age, so no order stays right. Sorting all records at each eviction would cost milliseconds. So a
*sweep* values one slice of the records at a time, as arrays, and the pool keeps the lowest values seen. Between two
sweeps every request *refreshes* only the pool. A commit puts the rows that it changed into the pool at once. If fewer
than POOL_LOW candidates remain, the next update sweeps early.

Law: L11 (a sweep and a refresh touch a bounded number of rows).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.value.prospects import Prospects, Records

SWEEP_EVERY = 32
"""Number of requests between two sweeps."""
SWEEP_ROWS = 4096
POOL_ROWS = 256
POOL_LOW = 64

Ints = npt.NDArray[np.int64]


class Candidates:
    __slots__ = ("_opened_since", "_pool", "_prospects", "_records", "_refreshed_at", "_swept_rows")

    def __init__(self, records: Records, prospects: Prospects) -> None:
        self._records = records
        self._prospects = prospects
        self._pool = Pool()
        self._swept_rows = 0
        self._opened_since = 0
        """Requests since the last sweep."""
        self._refreshed_at = 0
        """``_opened_since`` at the last refresh."""

    def ranked(self) -> Iterator[tuple[float, int]]:
        """Return values and rows, the lowest value first; a copy."""
        return self._pool.ranked()

    def opened(self) -> None:
        """Note that a request began: the next ``update`` has work."""
        self._opened_since += 1

    def put(self, row: int, rate: float) -> None:
        """Put ``row``, whose state saves ``rate`` seconds per byte from now on, among the candidates."""
        self._records.rates[row] = rate
        self._pool.put(row, self._prospects.value(row, rate))

    def drop(self, row: int) -> None:
        self._pool.drop(row)

    def sweep_if_few(self, live_count: int) -> None:
        """Let the next ``update`` sweep, if too few of the ``live_count`` records are candidates."""
        if len(self._pool) < min(POOL_LOW, live_count):
            self._opened_since = SWEEP_EVERY

    def update(self) -> None:
        """Sweep or refresh at the end of a commit, if a request began since the last one."""
        if self._opened_since == self._refreshed_at:
            return
        if self._opened_since >= SWEEP_EVERY:
            self._opened_since = self._refreshed_at = 0
            self._sweep()
        else:
            self._refreshed_at = self._opened_since
            self._fill(self._pool.rows, len(self._pool))

    def _sweep(self) -> None:
        records = self._records
        first = self._swept_rows if self._swept_rows < records.count else 0
        self._swept_rows = first + SWEEP_ROWS
        rows = records.rows(first, min(self._swept_rows, records.count))
        self._prospects.count_rows(rows)
        self._prospects.learn()
        self._prospects.weigh_rows(rows)
        others = self._pool.rows
        others = others[(others < first) | (others >= self._swept_rows)]
        self._fill(np.concatenate([rows, others]), POOL_ROWS)

    def _fill(self, rows: Ints, most: int) -> None:
        rows = rows[self._records.live[rows]]
        self._pool.fill(rows, self._prospects.values(rows), most)


class Pool:
    __slots__ = ("_members", "_rows", "_values")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._rows: list[int] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def ranked(self) -> Iterator[tuple[float, int]]:
        """Return values and rows, the lowest value first; a copy."""
        return zip(self._values.copy(), self._rows.copy(), strict=True)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Int64 [rows], the lowest value first."""
        return np.array(self._rows, np.int64)

    def put(self, row: int, value: float) -> None:
        """Put ``row`` with ``value`` from now on; it becomes a candidate if it was none."""
        self.drop(row)
        self._members.add(row)
        index = bisect_right(self._values, value)
        self._values.insert(index, value)
        self._rows.insert(index, row)

    def drop(self, row: int) -> None:
        """Drop ``row``, which is not a candidate any more."""
        if row in self._members:
            self._members.remove(row)
            index = self._rows.index(row)
            del self._rows[index], self._values[index]

    def fill(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64], most: int) -> None:
        """Fill the pool with the ``most`` of ``rows`` with the lowest ``values``; both [rows]."""
        if values.size > most:
            low = np.argpartition(values, most)[:most]
            rows, values = rows[low], values[low]
        order = np.lexsort((rows, values))
        self._values = values[order].tolist()
        self._rows = rows[order].tolist()
        self._members = set(self._rows)
