"""Records: what the policy knows of each state, in memory or evicted of late. Columns of numbers, a row each.

    row   kind codes factor | born counted | rate | live | place node | uses gap
          what it is          age, waiting   gain   in       where        observed
                                                    memory

A column is a numpy array if a sweep reads all of its rows at once. It is a list if rows are read one at a
time. Rows are reused, the last one freed first, so the same run has the same rows.

``heir``: a ghost further on the path. A conversation whose end was evicted resumes at the state before it, so
that state is now worth what was expected of the end.

Rejected: an object per record (a sweep would touch thousands of them).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.edge import Node
from weft.memory.prefix.value.features import FEATURES_MAX, Codes, Kind
from weft.units import PAD

_ROWS_FIRST = 256

Ints = npt.NDArray[np.int64]


class Records:
    __slots__ = ("_codes", "_free", "born_s", "codes", "count", "counted_s", "factors", "gaps_s", "heirs",
                 "kinds", "live", "nodes", "origins", "places", "rates", "tables", "turns", "used", "uses")

    def __init__(self) -> None:
        rows = _ROWS_FIRST
        self.count = 0
        """Rows in use at any time so far; those beyond are untouched."""
        self._free: list[int] = []
        self.kinds = np.zeros(rows, np.int64)
        self.codes = np.zeros((rows, FEATURES_MAX), np.int64)
        self._codes: list[Codes] = []
        """The same as tuples, for single rows."""
        self.factors = np.ones(rows)
        self.tables = np.zeros(rows, np.int64)
        """Where the indexes of its kind and factor begin in the table of ``Prospects``, which also sets
        ``factors``."""
        self.born_s = np.zeros(rows)
        """Time of creation, or of the last use."""
        self.counted_s = np.zeros(rows)
        """Time up to which its waiting is counted."""
        self.rates = np.zeros(rows)
        """Seconds that a use saves, per byte that only this state needs."""
        self.heirs = np.full(rows, PAD, np.int64)
        self.live = np.zeros(rows, np.bool_)
        self.used = np.zeros(rows, np.bool_)
        """Rows with a record, ghosts included."""
        self.nodes: list[Node | None] = []
        """Its node in the live tree; None for a ghost."""
        self.places: list[Node | None] = []
        """Its node in the history."""
        self.uses: list[int] = []
        self.gaps_s: list[float | None] = []
        """Moving average of the time between uses."""
        self.origins: list[Kind] = []
        """Its kind at creation."""
        self.turns: list[int] = []
        """The turn of its conversation at creation: answers before it."""

    def add(self, kind: Kind, codes: Codes, turn: int, place: Node, now_s: float) -> int:
        if self._free:
            row = self._free.pop()
        else:
            row = self.count
            self.count += 1
            if row == len(self.kinds):
                self._grow()
            self._codes.append(codes)
            self.nodes.append(None)
            self.places.append(None)
            self.uses.append(0)
            self.gaps_s.append(None)
            self.origins.append(kind)
            self.turns.append(turn)
        self.used[row], self.live[row], self.heirs[row], self.rates[row] = True, False, PAD, 0.0
        self.places[row], self.uses[row], self.gaps_s[row] = place, 0, None
        self.origins[row], self.turns[row] = kind, turn
        self.become(row, kind, codes, now_s)
        return row

    def become(self, row: int, kind: Kind, codes: Codes, now_s: float) -> None:
        """The record changes its kind and codes, and its age begins at 0. ``Prospects`` sets its factor."""
        self.kinds[row] = kind
        self.codes[row] = self._codes[row] = codes
        self.born_s[row] = self.counted_s[row] = now_s

    def codes_of(self, row: int) -> Codes:
        return self._codes[row]

    def remove(self, row: int) -> None:
        assert not self.live[row], f"record {row} is of a state in memory"
        self.used[row] = False
        self.heirs[self.heirs == row] = PAD
        self.places[row] = None
        self._free.append(row)

    def ghosts(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are ghosts."""
        return self.used[rows] & ~self.live[rows]

    def rows(self, first: int, end: int) -> Ints:
        """The rows of [first, end) with a record."""
        return first + np.flatnonzero(self.used[first:end])

    def _grow(self) -> None:
        more = len(self.kinds)
        self.kinds = np.append(self.kinds, np.zeros(more, np.int64))
        self.codes = np.append(self.codes, np.zeros((more, FEATURES_MAX), np.int64), axis=0)
        self.factors = np.append(self.factors, np.ones(more))
        self.tables = np.append(self.tables, np.zeros(more, np.int64))
        self.born_s = np.append(self.born_s, np.zeros(more))
        self.counted_s = np.append(self.counted_s, np.zeros(more))
        self.rates = np.append(self.rates, np.zeros(more))
        self.heirs = np.append(self.heirs, np.full(more, PAD, np.int64))
        self.live = np.append(self.live, np.zeros(more, np.bool_))
        self.used = np.append(self.used, np.zeros(more, np.bool_))

