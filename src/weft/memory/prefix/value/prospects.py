"""What is expected of each record: how soon it is used, and what a use saves per byte.

    value = index x rate

    index   expected uses per second held, at the best time to give it up     gittins, hazard, features
            of the record, or of its heir where that is larger
    rate    (seconds to compute from the checkpoint above) / (slot bytes + KV bytes that only it needs)

    tables   [kind, step of the factor, age bin] -> index, all combinations at once

The hazard learns from uses and from waiting. Waiting is counted when a record changes (``count_waiting``) and
for whole slices of records in a sweep (``count_rows``). ``learn`` turns the counts into the table of indexes.
A value is then one lookup in that table times the rate.

Each method for one record has a twin for many, over arrays: a loop over 4096 records would cost 50 times as
much.

Laws: L11 (everything is a fixed table or a column of the records).
"""

from __future__ import annotations

from math import log2

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.prefix.holdings import checkpoint_above, pages_alone
from weft.memory.prefix.policy import PrefillCost
from weft.memory.prefix.value.features import CODE_COUNT, Codes, Kind, codes_of_used
from weft.memory.prefix.value.hazard import FACTOR_MAX, WIDTHS, Hazard, bin_of, bins_of, index_table
from weft.memory.prefix.value.records import Records
from weft.units import PAD

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STEPS_PER_OCTAVE = 2
_OCTAVES = int(log2(FACTOR_MAX))
_STEPS = _OCTAVES * _STEPS_PER_OCTAVE
_FACTORS = 2.0 ** (np.arange(-_STEPS, _STEPS + 1) / _STEPS_PER_OCTAVE)
_GAP_MEMORY = 0.7
"""Weight of the old mean when a new gap between uses enters it."""


class Prospects:
    """``cost``: of computing a prompt; ``now_s``: the time at which values hold. The policy sets both."""

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
        """The index by kind, step of the factor and age, in that order. Both hold the same numbers: the array
        serves many records at once, the list one."""
        self.learn()

    # ------------------------------------------------------------------ learning

    def use(self, row: int) -> None:
        """A request began at the state of ``row``, or would have if the state were still in memory."""
        records = self._records
        age_s = self.now_s - records.born_s.item(row)
        self.count_waiting(row)
        self._hazard.used(records.kinds.item(row), records.codes_of(row), age_s)
        before = records.gaps_s[row]
        records.gaps_s[row] = age_s if before is None else _GAP_MEMORY * before + (1 - _GAP_MEMORY) * age_s
        records.uses[row] += 1
        codes = codes_of_used(uses=records.uses[row], mean_gap_s=records.gaps_s[row],
                              origin=records.origins[row], turn=records.turns[row])
        records.become(row, Kind.USED, codes, self.now_s)
        self.weigh(row, Kind.USED, codes)

    def count_waiting(self, row: int) -> None:
        """Count the time that ``row`` was not used, up to now."""
        records, now_s = self._records, self.now_s
        born_s = records.born_s.item(row)
        self._hazard.one_waited(records.kinds.item(row), records.codes_of(row), records.factors.item(row),
                                records.counted_s.item(row) - born_s, now_s - born_s)
        records.counted_s[row] = now_s

    def count_rows(self, rows: Ints) -> None:
        """``count_waiting`` of many rows."""
        records = self._records
        born = records.born_s[rows]
        self._hazard.waited(records.kinds[rows], records.codes[rows], records.factors[rows],
                            records.counted_s[rows] - born, self.now_s - born)
        records.counted_s[rows] = self.now_s

    def learn(self) -> None:
        """Take the counts in, and rebuild the table of indexes."""
        self._hazard.learn()
        self._tables = np.concatenate([index_table(rates, WIDTHS, _FACTORS).ravel()
                                       for rates in self._hazard.rates])
        self._table = self._tables.tolist()

    def weigh(self, row: int, kind: Kind, codes: Codes) -> None:
        """The features of ``row`` changed: look up its factor again."""
        self._records.factors[row] = factor = self._hazard.factor_of(codes)
        step = round((log2(factor) + _OCTAVES) * _STEPS_PER_OCTAVE)
        self._records.tables[row] = (kind * len(_FACTORS) + step) * len(WIDTHS)

    def weigh_rows(self, rows: Ints) -> None:
        """``weigh`` of many rows."""
        records = self._records
        records.factors[rows] = factors = self._hazard.factors_of(records.codes[rows])
        steps = np.rint((np.log2(factors) + _OCTAVES) * _STEPS_PER_OCTAVE).astype(np.int64)
        records.tables[rows] = (records.kinds[rows] * len(_FACTORS) + steps) * len(WIDTHS)

    # ------------------------------------------------------------------ valuing

    def rate(self, node: Node) -> float:
        """Seconds that a use of the state at ``node`` saves, per byte that only it needs."""
        above = checkpoint_above(node)
        saved = self.cost.between(above.end if above is not None else 0, node.end)
        return saved / (self._slot_bytes + pages_alone(node) * self._page_bytes)

    def value(self, row: int, rate: float) -> float:
        heir = self.heir(row)
        index = self.index(row)
        return (index if heir == PAD else max(index, self.index(heir))) * rate

    def values(self, rows: Ints) -> Floats:
        """``value`` of many rows, with the rate that each row has in its record."""
        records = self._records
        values = self._indexes(rows)
        heirs = records.heirs[rows]
        inherits = np.flatnonzero(heirs != PAD)
        inherits = inherits[records.ghosts(heirs[inherits])]
        values[inherits] = np.maximum(values[inherits], self._indexes(heirs[inherits]))
        return values * records.rates[rows]

    def heir(self, row: int) -> int:
        """The ghost of which ``row`` has the prospects; PAD without one."""
        heir: int = self._records.heirs.item(row)
        return heir if heir != PAD and self._records.nodes[heir] is None else PAD

    def index(self, row: int) -> float:
        records = self._records
        return self._table[records.tables.item(row) + bin_of(self.now_s - records.born_s.item(row))]

    def uses(self, row: int) -> float:
        """Uses expected of ``row`` or its heir within the ages that the hazard knows, from now on."""
        heir = self.heir(row)
        return max(self._uses(one) for one in ((row,) if heir == PAD else (row, heir)))

    def _uses(self, row: int) -> float:
        records = self._records
        return self._hazard.uses_from(records.kinds.item(row), self.now_s - records.born_s.item(row),
                                      records.factors.item(row))

    def _indexes(self, rows: Ints) -> Floats:
        records = self._records
        indexes: Floats = self._tables[records.tables[rows] + bins_of(self.now_s - records.born_s[rows])]
        return indexes
