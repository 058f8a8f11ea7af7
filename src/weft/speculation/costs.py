"""What a step costs by its rows, in seconds: the price of a draft.

    rows     1     2     4     8     16    32 ...       decodes and drafted tokens of one step together
    s        26.8  27.4  28.9  32.2  40.1                measured; between two of them on a straight line

A step reads all weights once, whatever its rows. So a few rows more cost little, until the products cost more
than the reading. Where that begins depends on the machine, the weights and the kernels: it is measured. The
table begins with a guess or a measurement at start, and each step of decodes corrects it. A figure beyond
the measured ones follows the nearest of them, in the proportion of the guess.

Contexts grow and machines get busy, so old measurements fade: behind the first ten, a new one counts a tenth.

Rejected: a model of the machine (bandwidth and flops are wrong by two on shared cores); a table by context
length (all rows of a step share its growth, and a ratio is what decides).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

ROWS: tuple[int, ...] = tuple(1 << power for power in range(11))
"""Rows whose cost is in the table; a step between two of them corrects the nearer one."""
_NEW_SHARE = 0.1
"""Least weight of a new measurement."""
_TRUSTED_COUNT = 3
"""Measurements after which an outlier is left out."""
_GUESSED_ROW_SHARE = 0.05
"""Seconds of one more row over those of a step with one row."""
_GUESS = [1 + _GUESSED_ROW_SHARE * (rows - 1) for rows in ROWS]
_OUTLIER = 3.0
"""A step that took this many times its cost says nothing: a compilation, another process."""


class StepCosts:
    """``measured``: seconds by rows, as far as they are known."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._measured: list[float | None] = [None] * len(ROWS)
        self._counts = [0] * len(ROWS)
        """Measurements of each figure."""
        self._known: list[int] = []
        """Figures that were measured."""
        self._figures = list(_GUESS)
        for rows, seconds in (measured or {}).items():
            self._learn(_nearest(rows), seconds)
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
        if rows < 1 or rows > ROWS[-1]:
            return
        at = _nearest(rows)
        expected = self.seconds(rows)
        known = self._measured[at]
        if known is None:
            self._learn(at, seconds)
        elif seconds > _OUTLIER * expected and self._counts[at] >= _TRUSTED_COUNT:
            return
        else:
            # The step has other rows than the figure: the figure moves by the same share.
            # A first one that was far too long (a compilation) gives way to the second.
            share = 1.0 if self._counts[at] == 1 and seconds * _OUTLIER < expected else max(
                _NEW_SHARE, 1 / (self._counts[at] + 1))
            self._measured[at] = known * (1 + share * (seconds / expected - 1))
        self._counts[at] += 1
        self._fill()

    def table(self) -> dict[int, float]:
        """Measured seconds by rows."""
        return {rows: seconds for rows, seconds in zip(ROWS, self._measured, strict=True)
                if seconds is not None}

    def _learn(self, at: int, seconds: float) -> None:
        """``seconds`` is the first measurement of figure ``at``."""
        self._measured[at] = seconds
        self._known = [other for other, figure in enumerate(self._measured) if figure is not None]

    def _fill(self) -> None:
        """``_figures`` from the measured ones. They never fall: noise makes steps longer, so a figure above
        one for more rows is cut to that. Between two measured ones they lie on a line, beyond them they
        follow the guess."""
        if not self._known:
            return
        figures, most = self._figures, float("inf")
        for at in reversed(self._known):
            most = figures[at] = min(self._measured[at] or most, most)
        for low, high in pairwise(self._known):
            for at in range(low + 1, high):
                share = (ROWS[at] - ROWS[low]) / (ROWS[high] - ROWS[low])
                figures[at] = figures[low] + share * (figures[high] - figures[low])
        first, last = self._known[0], self._known[-1]
        for at in range(first):
            figures[at] = figures[first] * _GUESS[at] / _GUESS[first]
        for at in range(last + 1, len(ROWS)):
            figures[at] = figures[last] * _GUESS[at] / _GUESS[last]


def _nearest(rows: int) -> int:
    at = rows.bit_length() - 1
    return at + 1 if 2 * rows >= 3 * ROWS[at] and at + 1 < len(ROWS) else at
