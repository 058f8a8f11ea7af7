"""What the policy knows of each state that is there or was of late: columns of numbers, a row each.

Columns are numpy arrays where a sweep reads all rows at once, and lists where one row is asked for. Rows are
used again, the last one given up first, so the same run has the same rows.

    row   kind codes factor | born counted | rate | live | place node | uses gap
            what it is        age, waiting   gain   there?  where       what was seen

``heir``: a ghost further on, whose uses would come here: a conversation whose end was evicted goes on from
the state before it, so that one is now worth what was expected of the end.
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
        """Rows that were ever used; those beyond are untouched."""
        self._free: list[int] = []
        self.kinds = np.zeros(rows, np.int64)
        self.codes = np.zeros((rows, FEATURES_MAX), np.int64)
        self._codes: list[Codes] = []
        """The same, for who asks for one."""
        self.factors = np.ones(rows)
        self.tables = np.zeros(rows, np.int64)
        """Where the index of its kind and factor begins; for who knows the index, as the factor is."""
        self.born_s = np.zeros(rows)
        """When it was made, or used last."""
        self.counted_s = np.zeros(rows)
        """Up to when its waiting was counted."""
        self.rates = np.zeros(rows)
        """Seconds that a use saves, by byte that it alone holds."""
        self.heirs = np.full(rows, PAD, np.int64)
        self.live = np.zeros(rows, np.bool_)
        self.used = np.zeros(rows, np.bool_)
        """Rows that are taken; of a ghost too."""
        self.nodes: list[Node | None] = []
        """In the live tree."""
        self.places: list[Node | None] = []
        """In the history."""
        self.uses: list[int] = []
        self.gaps_s: list[float | None] = []
        """Moving average of the time between uses."""
        self.origins: list[Kind] = []
        """What it was when it was kept."""
        self.turns: list[int] = []
        """Of the conversation it was kept in: answers that were gone on from to come there."""

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
        """From now on it is this, and new. Its factor is for who knows the hazard."""
        self.kinds[row] = kind
        self.codes[row] = self._codes[row] = codes
        self.born_s[row] = self.counted_s[row] = now_s

    def codes_of(self, row: int) -> Codes:
        return self._codes[row]

    def remove(self, row: int) -> None:
        assert not self.live[row], f"record {row} is of a state that is there"
        self.used[row] = False
        self.heirs[self.heirs == row] = PAD
        self.places[row] = None
        self._free.append(row)

    def ghosts(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are of states that are gone."""
        return self.used[rows] & ~self.live[rows]

    def rows(self, first: int, end: int) -> Ints:
        """Those of [first, end) that are taken."""
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

