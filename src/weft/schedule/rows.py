"""Rows of the page table, and the planner's numbers for the sequence in each: arrays, one element a row.

    row        0    1    2    3   ...  rows_max-1
    seq       [7]  [.]  [9]  [4]                    Sequence or None
    computed  130        64   17                    positions [0, computed) are in memory
    target    120       300   17                    known tokens when admitted; decoding from there on
    limit     170       420   18                    positions that are ever computed; the last token is not
    capacity  144       304   32                    positions that its pages hold, if its model has pages
    slot        3         1    0                    state slot, PAD without recurrent layers

A decode is planned only from these arrays. Python code runs per sequence only for those that cross into a new page.

Law: L5 (``release`` wipes a row, and the plan that does this lists it in ``rows_cleared``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from weft.memory.reservation import SlotPatch, TablePatch
from weft.schedule.plan import Bools, Int32s
from weft.schedule.restores import LOAD_SEQS_FROM
from weft.schedule.sequence import UNBOUNDED, SeqState, Sequence
from weft.units import PAD, PAGE_TOKENS, RowId, SeqId, SlotId

Patch = TypeVar("Patch", SlotPatch, TablePatch)


class RowTable:
    def __init__(self, rows_max: int) -> None:
        assert rows_max > 0
        self.seqs: list[Sequence | None] = [None] * rows_max
        self.known: list[Int32s | None] = [None] * rows_max
        """Tokens of the prefill in progress, by row; None once it is done."""
        self.wanted: list[list[int]] = [[] for _ in range(rows_max)]
        """Positions at which the sequence should leave its state, by row; see ``snapshots``."""
        self.computed = np.zeros(rows_max, dtype=np.int32)
        self.target = np.zeros(rows_max, dtype=np.int32)
        self.limit = np.zeros(rows_max, dtype=np.int32)
        self.capacity = np.zeros(rows_max, dtype=np.int32)
        self.pages_held = np.zeros(rows_max, dtype=np.int32)
        self.slots = np.full(rows_max, PAD, dtype=np.int32)
        self.last_token = np.full(rows_max, PAD, dtype=np.int32)
        self.seq_ids = np.full(rows_max, PAD, dtype=np.int64)
        self._row_of: dict[int, RowId] = {}

    def row_of(self, seq: Sequence) -> RowId:
        return self._row_of[seq.id]

    def of_patches(self, patches: Iterable[Patch]) -> Iterator[tuple[RowId, Patch]]:
        """Yield each patch with its row. Pages of a load move too, and a load has no row."""
        return ((self._row_of[patch.seq], patch) for patch in patches if patch.seq < LOAD_SEQS_FROM)

    def free_rows(self) -> list[RowId]:
        """Return the free rows in ascending order."""
        return [RowId(row) for row, seq in enumerate(self.seqs) if seq is None]

    def assign(self, row: RowId, seq: Sequence, *, known: Int32s, computed: int, slot: SlotId) -> None:
        """Assign an empty row to ``seq`` with ``computed`` of its tokens already in memory; its pages are added by
        ``add_pages``."""
        assert self.seqs[row] is None, f"row {row} still holds {self.seqs[row]}"
        self.seqs[row] = seq
        self.known[row] = known
        self._row_of[seq.id] = row
        self.computed[row] = computed
        self.target[row] = known.size
        self.limit[row] = seq.computed_max
        self.capacity[row] = UNBOUNDED
        self.pages_held[row] = 0
        self.slots[row] = slot
        self.last_token[row] = PAD
        self.seq_ids[row] = seq.id

    def add_pages(self, rows: Int32s, indexes: Int32s) -> None:
        """Add page number ``indexes[i]`` to ``rows[i]``, which has all pages before it. A row may repeat, with its
        ``indexes`` in ascending order."""
        counts = indexes + 1
        self.pages_held[rows] = counts  # where a row repeats, the last one counts
        self.capacity[rows] = counts * PAGE_TOKENS

    def release(self, seq: Sequence) -> RowId:
        row = self._row_of.pop(seq.id)
        assert self.seqs[row] is seq
        self.seqs[row] = None
        self.known[row] = None
        self.wanted[row] = []
        self.computed[row] = self.target[row] = self.limit[row] = 0
        self.capacity[row] = self.pages_held[row] = 0
        self.slots[row] = self.last_token[row] = self.seq_ids[row] = PAD
        return row

    def decoding(self, row: RowId) -> bool:
        return bool(self.computed[row] >= self.target[row])

    def ends_in_flight(self, rows: Int32s) -> Bools:
        """Return which of these decodes have computed all that they ever will: their last token is in flight."""
        return self.computed[rows] >= self.limit[rows]

    def advance(self, rows: Int32s, ends: Int32s, tokens: Int32s | int) -> None:
        """Advance ``rows``, computed up to ``ends``, with ``tokens`` (PAD where none, or not known yet)."""
        self.computed[rows] = ends
        self.last_token[rows] = tokens

    def audit(self, running: Iterable[Sequence], in_flight: Container[SeqId] = ()) -> None:
        """Recount from the owners: each running sequence has exactly its row, and no other row is used. ``in_flight``:
        those with a run whose token is not known yet."""
        expected = {seq.id for seq in running}
        assert expected == set(self._row_of), "rows and running sequences differ"
        for row, seq in enumerate(self.seqs):
            if seq is None:
                assert self.seq_ids[row] == self.slots[row] == PAD, f"row {row} was not wiped"
                assert self.pages_held[row] == 0, f"row {row} was not wiped"
                continue
            assert self._row_of[seq.id] == row, f"{seq} is not in row {row}"
            assert self.seq_ids[row] == seq.id, f"{seq} is not in row {row}"
            assert 0 <= self.computed[row] <= self.capacity[row]
            if seq.state is not SeqState.RUNNING:
                continue  # it ended while a step was in flight: positions without tokens are fine
            if self.decoding(RowId(row)):
                expected_computed = seq.known_count - 1 + (seq.id in in_flight)
                assert self.computed[row] == expected_computed, f"{seq}: {self.computed[row]} computed"
            else:
                assert self.target[row] == seq.known_count, f"{seq}: prefill of {self.target[row]}"


class Countdown:
    """A count of steps until something can be due at the earliest: each decode moves by at most one position a step, so
    until the nearest event nothing is checked."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    @property
    def over(self) -> bool:
        return self._left <= 0

    def start(self, distances: Int32s) -> None:
        """Start the count. ``distances``: steps until each event, at the earliest. An event that is due now keeps the
        count at 0."""
        self._left = int(distances.min(initial=np.iinfo(np.int32).max))

    def step(self, steps: int) -> None:
        self._left -= steps


class DecodeBatch:
    """All decoding rows as arrays in run order, best rank first; rebuilt when a sequence joins or leaves. ``rows`` and
    ``slots``: int32 [decodes], ``seqs``: their sequences.

    A plan of only decodes has these arrays themselves, and so does the next one. They are frozen: a reader that sees
    the same array again knows that nothing in it has changed (``runner.decodes``)."""

    __slots__ = ("ends", "fresh", "lengths", "rows", "samples", "seqs", "slots", "states")

    def __init__(self, rows: Int32s, seqs: Iterable[SeqId], slots: Int32s) -> None:
        self.rows: Int32s = _frozen(rows)
        self.slots: Int32s = _frozen(slots)
        self.seqs = tuple(seqs)
        self.lengths: Int32s = _frozen(np.ones(rows.size, np.int32))
        self.fresh: Bools = _frozen(np.zeros(rows.size, np.bool_))
        self.samples: Bools = _frozen(np.ones(rows.size, np.bool_))
        self.ends = Countdown()
        """Countdown to the decodes that have computed all that they ever will."""
        self.states = Countdown()
        """Countdown to the decodes whose answer leaves a state at this position."""

    def step(self, steps: int = 1) -> None:
        """Count ``steps`` more steps; no decode has moved further than this."""
        self.ends.step(steps)
        self.states.step(steps)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values
