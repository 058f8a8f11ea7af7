"""The policy's records of states and their expectations: how soon a state is used, and the seconds per byte that a use
saves.

    row   kind codes factor | born counted | rate | live | place node | uses gap
          what it is          age, waiting   gain   in       where        observed
                                                    memory
    value = index x rate

    index   expected uses per second held, at the best time to give it up (hazard), of the record, or of its
            heir where that is larger
    rate    (seconds to compute from the snapshot above) / (slot bytes + KV bytes that only it needs)

Records are columns of numbers, a row each, in memory or evicted of late. A column is a numpy array if a sweep reads all
of its rows at once. Others are lists. Rows are reused, the last one freed first, so the same run has the same rows.
``heir``: a ghost further on the path. A conversation whose end was evicted resumes at the state before it, so that
state now has the expected uses of the end.

The hazard learns from uses and from waiting. Waiting is counted when a record changes (``count_waiting``) and for whole
slices of records in a sweep (``count_rows``). ``learn`` turns the counts into the table of indexes. Each method for one
record has a twin for many, over arrays: a loop over 4096 records would cost 50 times more.

Law: L11 (everything is a fixed table or a column of the records).
"""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.prefix.policy import PrefillCost, pages_alone, snapshot_above
from weft.memory.prefix.value.hazard import (
    CODE_COUNT,
    FACTOR_MAX,
    FEATURES_MAX,
    WIDTHS,
    Codes,
    Hazard,
    Kind,
    bin_of,
    bins_of,
    codes_of_used,
    index_table,
)
from weft.units import PAD

_ROWS_FIRST = 256

Ints = npt.NDArray[np.int64]


class Records:
    __slots__ = (
        "_codes",
        "_free",
        "born_s",
        "codes",
        "count",
        "counted_s",
        "factors",
        "gaps_s",
        "heirs",
        "kinds",
        "live",
        "nodes",
        "origins",
        "places",
        "rates",
        "tables",
        "turns",
        "used",
        "uses",
    )

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
        """Where the indexes of its kind and factor begin in the table of ``Prospects``, which also sets ``factors``."""
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
        """Change the kind and codes of a record; its age begins at 0. ``Prospects`` sets its factor."""
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
        """Return which of ``rows`` are ghosts."""
        return self.used[rows] & ~self.live[rows]

    def rows(self, first: int, end: int) -> Ints:
        """Return the rows of [first, end) with a record."""
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


Floats = npt.NDArray[np.float64]

_STEPS_PER_OCTAVE = 2
_OCTAVES = int(log2(FACTOR_MAX))
_STEPS = _OCTAVES * _STEPS_PER_OCTAVE
_FACTORS = 2.0 ** (np.arange(-_STEPS, _STEPS + 1) / _STEPS_PER_OCTAVE)
_GAP_MEMORY = 0.7
"""Weight of the old mean when a new gap between uses enters it."""


class Prospects:
    """Prospects of all records. ``cost``: of computing a prompt; ``now_s``: the time at which values hold. The policy
    sets both."""

    __slots__ = ("_hazard", "_page_bytes", "_records", "_slot_bytes", "_table", "_tables", "cost", "now_s")

    def __init__(self, plan: ArenaPlan, cost: PrefillCost, records: Records, now_s: float) -> None:
        self.cost = cost
        self.now_s = now_s
        self._records = records
        self._page_bytes = plan.page_bytes
        self._slot_bytes = plan.slot_stride_bytes
        self._hazard = Hazard(len(Kind), CODE_COUNT)
        self._tables: Floats = np.zeros(0)
        self._table: list[float] = []
        """The index by kind, step of the factor and age, in that order; both hold the same numbers: the array serves
        many records at once, the list one."""
        self.learn()

    # ------------------------------------------------------------------ learning

    def use(self, row: int) -> None:
        """Count a request that began at the state of ``row``, or would have if the state were still in memory."""
        records = self._records
        age_s = self.now_s - records.born_s.item(row)
        self.count_waiting(row)
        self._hazard.used(records.kinds.item(row), records.codes_of(row), age_s)
        before = records.gaps_s[row]
        records.gaps_s[row] = age_s if before is None else _GAP_MEMORY * before + (1 - _GAP_MEMORY) * age_s
        records.uses[row] += 1
        codes = codes_of_used(
            uses=records.uses[row], mean_gap_s=records.gaps_s[row], origin=records.origins[row], turn=records.turns[row]
        )
        records.become(row, Kind.USED, codes, self.now_s)
        self.weigh(row, Kind.USED, codes)

    def count_waiting(self, row: int) -> None:
        """Count the time that ``row`` was not used, up to now."""
        records, now_s = self._records, self.now_s
        born_s = records.born_s.item(row)
        self._hazard.one_waited(
            records.kinds.item(row),
            records.codes_of(row),
            records.factors.item(row),
            records.counted_s.item(row) - born_s,
            now_s - born_s,
        )
        records.counted_s[row] = now_s

    def count_rows(self, rows: Ints) -> None:
        """Count the waiting of many rows."""
        records = self._records
        born = records.born_s[rows]
        self._hazard.waited(
            records.kinds[rows],
            records.codes[rows],
            records.factors[rows],
            records.counted_s[rows] - born,
            self.now_s - born,
        )
        records.counted_s[rows] = self.now_s

    def learn(self) -> None:
        """Take the counts in, and rebuild the table of indexes."""
        self._hazard.learn()
        self._tables = np.concatenate([index_table(rates, WIDTHS, _FACTORS).ravel() for rates in self._hazard.rates])
        self._table = self._tables.tolist()

    def weigh(self, row: int, kind: Kind, codes: Codes) -> None:
        """Look up the factor of ``row`` again, whose features changed."""
        self._records.factors[row] = factor = self._hazard.factor_of(codes)
        step = round((log2(factor) + _OCTAVES) * _STEPS_PER_OCTAVE)
        self._records.tables[row] = (kind * len(_FACTORS) + step) * len(WIDTHS)

    def weigh_rows(self, rows: Ints) -> None:
        """Look up the factors of many rows, as ``weigh`` does."""
        records = self._records
        records.factors[rows] = factors = self._hazard.factors_of(records.codes[rows])
        steps = np.rint((np.log2(factors) + _OCTAVES) * _STEPS_PER_OCTAVE).astype(np.int64)
        records.tables[rows] = (records.kinds[rows] * len(_FACTORS) + steps) * len(WIDTHS)

    # ------------------------------------------------------------------ valuing

    def rate(self, node: Node) -> float:
        """Return the seconds that a use of the state at ``node`` saves, per byte that only it needs."""
        above = snapshot_above(node)
        saved = self.cost.between(above.end if above is not None else 0, node.end)
        return saved / (self._slot_bytes + pages_alone(node) * self._page_bytes)

    def value(self, row: int, rate: float) -> float:
        heir = self.heir(row)
        index = self.index(row)
        return (index if heir == PAD else max(index, self.index(heir))) * rate

    def values(self, rows: Ints) -> Floats:
        """Return the values of many rows, with the rate that each row has in its record."""
        records = self._records
        values = self._indexes(rows)
        heirs = records.heirs[rows]
        inherits = np.flatnonzero(heirs != PAD)
        inherits = inherits[records.ghosts(heirs[inherits])]
        values[inherits] = np.maximum(values[inherits], self._indexes(heirs[inherits]))
        return values * records.rates[rows]

    def heir(self, row: int) -> int:
        """Return the ghost of which ``row`` has the prospects; PAD without one."""
        heir: int = self._records.heirs.item(row)
        return heir if heir != PAD and self._records.nodes[heir] is None else PAD

    def index(self, row: int) -> float:
        records = self._records
        return self._table[records.tables.item(row) + bin_of(self.now_s - records.born_s.item(row))]

    def uses(self, row: int) -> float:
        """Return the expected uses of ``row`` or its heir within the ages that the hazard knows, from now on."""
        heir = self.heir(row)
        return max(self._uses(record) for record in ((row,) if heir == PAD else (row, heir)))

    def _uses(self, row: int) -> float:
        records = self._records
        return self._hazard.uses_from(
            records.kinds.item(row), self.now_s - records.born_s.item(row), records.factors.item(row)
        )

    def _indexes(self, rows: Ints) -> Floats:
        records = self._records
        indexes: Floats = self._tables[records.tables[rows] + bins_of(self.now_s - records.born_s[rows])]
        return indexes
