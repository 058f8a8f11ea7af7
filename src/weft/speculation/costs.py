"""What a step costs by its rows, in seconds: the price of a draft.

    rows     1     2     4     8     16    32 ...       decodes and drafted tokens of one step together
    s        26.8  27.4  28.9  32.2  40.1                measured; between two of them on a straight line

A step reads all weights once, whatever its rows. So a few rows more cost little, until the products cost more
than the reading. Where that begins depends on the machine, the weights and the kernels: it is measured. A
figure beyond the measured ones follows the nearest of them, in the proportion of the guess.

The number of drafts depends on ratios of these figures alone, and a busy machine makes all steps longer. So a
step corrects two things apart:

    the pace       its seconds over its figure      all figures move by a tenth of it
    the shape      behind a step of other rows      its figure moves SHAPE_STEP up or down, against the
                   that other step as the measure   figure of the step before

Two steps in a row see the same machine. A correction has the same size however far off a step is. So a figure
goes to the median of the measurements, and a step that waited for another process counts once. Of the first
measurements of a figure the least one counts, as noise only makes steps longer.

Rejected: averages (one step that waits 10 ms spoils the figure of a model whose steps take 1 ms); figures
apart from each other (plain steps become rare, their figure grows old, and a slower machine makes drafts look
bad); a model of the machine (bandwidth and flops are wrong by two on shared cores).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

ROWS: tuple[int, ...] = tuple(1 << power for power in range(11))
"""Rows whose cost is in the table; a step between two of them corrects the nearer one."""
SHAPE_STEP = 1.03
_PACE_SHARE = 0.1
_PACE_MAX = 3.0
"""A step that took this many times its figure counts as one that took this many times."""
_FIRST_COUNT = 3
"""Measurements of which the least one is the figure."""
_GUESSED_ROW_SHARE = 0.05
"""Seconds of one more row over those of a step with one row."""
_GUESS = [1 + _GUESSED_ROW_SHARE * (rows - 1) for rows in ROWS]


class StepCosts:
    """``measured``: seconds by rows, as far as they are known."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._measured: list[float | None] = [None] * len(ROWS)
        self._counts = [0] * len(ROWS)
        """Measurements of each figure, up to FIRST_COUNT."""
        self._figures = list(_GUESS)
        self._before: tuple[int, float] | None = None
        """The last step: its place in the table, and its seconds there."""
        for rows, seconds in (measured or {}).items():
            at = _nearest(rows)
            self._measured[at], self._counts[at] = seconds, _FIRST_COUNT
        self._fill()

    def seconds(self, rows: int) -> float:
        """Of a step of ``rows`` rows; beyond the table in proportion."""
        last = ROWS[-1]
        if rows >= last:
            return self._figures[-1] * rows / last
        at = rows.bit_length() - 1
        low, high = self._figures[at], self._figures[at + 1]
        return low + (high - low) * (rows - ROWS[at]) / ROWS[at]

    def measured(self, rows: int) -> bool:
        """Whether the figure for ``rows`` was measured, and is no guess."""
        return self._measured[_nearest(min(rows, ROWS[-1]))] is not None

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows, without prefills, took ``seconds``."""
        if rows < 1 or rows > ROWS[-1] or seconds <= 0:
            return
        at = _nearest(rows)
        seconds *= self._figures[at] / self.seconds(rows)   # of a step with the rows of the figure
        before, self._before = self._before, (at, seconds)
        known = self._measured[at]
        if known is None or self._counts[at] < _FIRST_COUNT:
            self._counts[at] += 1
            self._measured[at] = seconds if known is None else min(known, seconds)
            self._fill()
            return
        pace = min(max(seconds / known, 1 / _PACE_MAX), _PACE_MAX) ** _PACE_SHARE
        self._measured = [None if one is None else one * pace for one in self._measured]
        self._correct_shape(at, seconds, before)
        self._fill()

    def pace(self, rows: int) -> float:
        """Seconds of ``rows`` rows at the pace of the last step noted, which may be a slow one."""
        if self._before is None:
            return self.seconds(rows)
        at, seconds = self._before
        return self.seconds(rows) * seconds / self._figures[at]

    def table(self) -> dict[int, float]:
        """Measured seconds by rows."""
        return {rows: seconds for rows, seconds in zip(ROWS, self._measured, strict=True)
                if seconds is not None}

    def _correct_shape(self, at: int, seconds: float, before: tuple[int, float] | None) -> None:
        figure = self._measured[at]
        if before is None or before[0] == at or figure is None:
            return
        other = self._measured[before[0]]
        if other is not None and self._counts[before[0]] >= _FIRST_COUNT:
            higher = seconds / before[1] > figure / other
            self._measured[at] = figure * SHAPE_STEP if higher else figure / SHAPE_STEP

    def _fill(self) -> None:
        """``_figures`` from the measured ones. They never fall: noise makes steps longer, so a figure above
        one for more rows is cut to that. Between two measured ones they lie on a line, beyond them they
        follow the guess."""
        known = [at for at, figure in enumerate(self._measured) if figure is not None]
        if not known:
            return
        figures, most = self._figures, float("inf")
        for at in reversed(known):
            most = figures[at] = min(self._measured[at] or most, most)
        for low, high in pairwise(known):
            for at in range(low + 1, high):
                share = (ROWS[at] - ROWS[low]) / (ROWS[high] - ROWS[low])
                figures[at] = figures[low] + share * (figures[high] - figures[low])
        first, last = known[0], known[-1]
        for at in range(first):
            figures[at] = figures[first] * _GUESS[at] / _GUESS[first]
        for at in range(last + 1, len(ROWS)):
            figures[at] = figures[last] * _GUESS[at] / _GUESS[last]


def _nearest(rows: int) -> int:
    at = rows.bit_length() - 1
    return at + 1 if 2 * rows >= 3 * ROWS[at] and at + 1 < len(ROWS) else at
