"""Seconds of a step by its number of rows, which are the price of a draft.

    rows       1     2     4     8     16    32 ...
    plain      26.8        28.4        38.9              sequences of a step without drafts
    verify           27.4  28.9  32.2  40.1              decodes and drafted tokens of a step together

A step reads all weights once, whatever its rows. So a few rows more cost little, until the products cost more than the
reading. Where that begins depends on the machine, the weights and the kernels: it is measured.

Steps that verify drafts have separate figures: states are computed again, and the step may leave the path of steady
decodes or of CUDA graphs. A curve without a measurement borrows the other one. The profile run has one sequence; drafts
of several sequences cost more, because each verify run is computed by itself.

    32 sequences    plain 2.8 ms    1 draft 3.8    4 drafts 4.0    16 drafts 5.1    32 drafts 6.3
    estimate                                3.9             4.1              5.0              6.5

The number of drafts depends only on ratios of these figures, and a busy machine makes all steps longer. So a step
corrects two things apart:

    the pace       its seconds over its figure      all figures move by a tenth of it
    the shape      after a step of other rows       its figure moves SHAPE_STEP up or down, against the
                   that other step as the measure   figure of the step before
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

ROWS: tuple[int, ...] = tuple(1 << power for power in range(11))
"""Rows whose cost is in the table; a step between two of them corrects the nearer one."""
SHAPE_STEP = 1.03
_PACE_SHARE = 0.1
_PACE_MAX = 3.0
"""Largest factor by which one step moves the pace, before the exponent."""
_FIRST_COUNT = 8
"""Number of first measurements of a figure, of which the least counts: the first steps of a batch may take several
times as long.
"""
_MEASURED_COUNT = 3
"""Measurements that a figure needs before drafts are chosen by it."""
_CROWD = 1.5
"""Factor: drafts of several sequences cost up to this many times the same number of drafts of one sequence, on top of
a plain step.
"""
_CROWD_SEQUENCES = 7
"""Number of sequences beyond the first at which drafts cost the full _CROWD factor."""
_GUESSED_ROW_SHARE = 0.05
"""Seconds of one more row over those of a step with one row."""
_GUESS = [1 + _GUESSED_ROW_SHARE * (rows - 1) for rows in ROWS]
_ROWS_BEYOND = [[further - rows for further in ROWS[index + 1 :]] for index, rows in enumerate(ROWS)]
"""For each index, how many more rows each later index has."""


class RowCosts:
    """Costs of steps by rows. ``plain``, ``verify``: measured seconds by rows, as far as they are known. Without
    ``verify`` both kinds of steps cost the same."""

    def __init__(self, plain: Mapping[int, float] | None = None, verify: Mapping[int, float] | None = None) -> None:
        self._pace = 1.0
        """Factor from figures to seconds."""
        self._measured: list[float | None] = [None] * (2 * len(ROWS))
        """Figures of plain steps, then of steps that verify drafts."""
        self._counts = [0] * len(self._measured)
        """Number of measurements of each figure, up to _FIRST_COUNT."""
        self._plain, self._verify = list(_GUESS), list(_GUESS)
        self._curve: list[float] = []
        """``verify_figures`` computed since the figures last changed."""
        self._before: tuple[int, float] | None = None
        """The last step: its index in ``_measured``, and its seconds."""
        for first, measured in ((0, plain), (len(ROWS), plain if verify is None else verify)):
            for rows, seconds in (measured or {}).items():
                index = first + _nearest(rows)
                self._measured[index], self._counts[index] = seconds, _FIRST_COUNT
        self._fill()

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of ``rows`` sequences without drafts."""
        return self._pace * _between(self._plain, rows)

    def verify_seconds(self, decodes: int, drafted: int) -> float:
        """Return the seconds of a step of ``decodes`` sequences that verifies ``drafted`` tokens: by all of its rows,
        and at least a plain step plus the drafts.
        """
        by_rows = _between(self._verify, decodes + drafted)
        if decodes == 1:
            return self._pace * by_rows
        alone = _between(self._verify, 1 + drafted) - self._plain[0]
        crowd = 1 + (_CROWD - 1) * min(1.0, (decodes - 1) / _CROWD_SEQUENCES)
        return self._pace * max(by_rows, _between(self._plain, decodes) + crowd * alone)

    def figure(self, rows: int) -> float:
        """Return ``seconds`` at a pace of 1."""
        return _between(self._plain, rows)

    def verify_figures(self, most: int) -> list[float]:
        """Return ``verify_seconds`` of one sequence and 1, 2, ... drafts, at a pace of 1: at least ``most`` figures, in
        a list that the caller must not change.
        """
        curve, figures = self._curve, self._verify
        while len(curve) < most:  # up to the next figure
            first = len(curve) + 2
            index = first.bit_length() - 1
            if index + 1 == len(ROWS):
                return curve + [_between(figures, rows) for rows in range(first, 2 + most)]
            low, slope = figures[index], (figures[index + 1] - figures[index]) / first
            curve += [low + slope * over for over in range(first)]
        return curve

    def measured(self, rows: int) -> bool:
        """Return whether the figure of ``rows`` sequences was measured, not guessed."""
        return self._counts[self.place(rows)] >= _MEASURED_COUNT

    def place(self, rows: int) -> int:
        """Return the index of the figure that a plain step of ``rows`` sequences corrects."""
        return _NEAREST[rows] if 0 <= rows < len(_NEAREST) else len(ROWS) - 1

    def note(self, rows: int, seconds: float) -> None:
        """Record that a step of ``rows`` sequences, without drafts or prefills, took ``seconds``."""
        self._note(rows, seconds, verifies=False)

    def note_verify(self, decodes: int, drafted: int, seconds: float) -> None:
        """Record that a step of ``decodes`` sequences that verified ``drafted`` tokens took ``seconds``. It corrects
        the figure of the same number of drafts of one sequence.
        """
        alone_s = self._pace * _between(self._verify, 1 + drafted)
        self._note(1 + drafted, seconds * alone_s / self.verify_seconds(decodes, drafted), verifies=True)

    def _note(self, rows: int, seconds: float, *, verifies: bool) -> None:
        if rows < 1 or rows > ROWS[-1] or seconds <= 0:
            return
        figures, nearest = self._verify if verifies else self._plain, _NEAREST[rows]
        index = nearest + len(ROWS) * verifies
        if rows != ROWS[nearest]:
            seconds *= figures[nearest] / _between(figures, rows)  # scaled to the rows of the figure
        before, self._before = self._before, (index, seconds)
        known = self._measured[index]
        if known is None or self._counts[index] < _FIRST_COUNT:
            self._counts[index] += 1
            figure = seconds / self._pace
            self._measured[index] = figure if known is None else min(known, figure)
            self._fill()
            return
        share = seconds / (known * self._pace)
        self._pace *= min(max(share, 1 / _PACE_MAX), _PACE_MAX) ** _PACE_SHARE
        if before is not None and before[0] != index:
            self._correct_shape(index, seconds, before)

    def pace(self, rows: int) -> float:
        """Return the seconds of ``rows`` sequences at the pace of the last step noted, which may be a slow one."""
        if self._before is None:
            return self.seconds(rows)
        index, seconds = self._before
        return _between(self._plain, rows) * seconds / (self._plain + self._verify)[index]

    def table(self) -> dict[int, float]:
        """Return the measured seconds of plain steps by sequences."""
        return {
            rows: figure * self._pace for rows, figure in zip(ROWS, self._measured, strict=False) if figure is not None
        }

    def _correct_shape(self, index: int, seconds: float, before: tuple[int, float]) -> None:
        figure, other = self._measured[index], self._measured[before[0]]
        if figure is not None and other is not None and self._counts[before[0]] >= _FIRST_COUNT:
            higher = seconds / before[1] > figure / other
            # A step of fixed size moves the figure to the median, so that a step that waited for another process
            # counts once.
            self._measured[index] = figure * SHAPE_STEP if higher else figure / SHAPE_STEP
            self._fill(index)

    def _fill(self, changed: int | None = None) -> None:
        """Compute both curves again. ``changed``: the index of the only measurement that changed; None: all may have
        changed.
        """
        plain, verify = self._measured[: len(ROWS)], self._measured[len(ROWS) :]
        borrowed = not any(plain) or not any(verify)
        if changed is None or changed < len(ROWS) or borrowed:
            _fill(self._plain, plain, verify)
        if changed is None or changed >= len(ROWS) or borrowed:
            self._curve = []
            _fill(self._verify, verify, plain)


def _between(figures: list[float], rows: int) -> float:
    """Return the figure of ``rows`` between two measured ones; rows beyond the table are in proportion."""
    last = ROWS[-1]
    if rows >= last:
        return figures[-1] * rows / last
    index = rows.bit_length() - 1
    low, high = figures[index], figures[index + 1]
    return low + (high - low) * (rows - ROWS[index]) / ROWS[index]


def _fill(figures: list[float], measured: list[float | None], others: list[float | None]) -> None:
    """Fill ``figures`` from the ``measured`` ones; from ``others`` if nothing was measured. Figures never fall as rows
    rise: noise makes steps longer, so a figure above one for more rows is lowered to that one. Figures between two
    measured ones are on the line between them; those beyond the last are on a line as steep as the last two, or as the
    guess.
    """
    known = [index for index, figure in enumerate(measured) if figure is not None]
    if not known:
        measured = others
        known = [index for index, figure in enumerate(measured) if figure is not None]
        if not known:
            return
    most = float("inf")
    for index in reversed(known):
        most = figures[index] = min(measured[index] or most, most)
    for low, high in pairwise(known):
        if high > low + 1:
            rise = (figures[high] - figures[low]) / (ROWS[high] - ROWS[low])
            for index in range(low + 1, high):
                figures[index] = figures[low] + rise * (ROWS[index] - ROWS[low])
    first, last = known[0], known[-1]
    for index in range(first):
        figures[index] = figures[first] * _GUESS[index] / _GUESS[first]
    before = known[-2] if len(known) > 1 else None
    slope = 0.0 if before is None else (figures[last] - figures[before]) / (ROWS[last] - ROWS[before])
    slope = max(slope, figures[last] * _GUESSED_ROW_SHARE / _GUESS[last])
    end = figures[last]
    figures[last + 1 :] = [end + slope * over for over in _ROWS_BEYOND[last]]


def _nearest(rows: int) -> int:
    index = rows.bit_length() - 1
    return index + 1 if 2 * rows >= 3 * ROWS[index] and index + 1 < len(ROWS) else index


_NEAREST = [0, *map(_nearest, range(1, ROWS[-1] + 1))]
"""Nearest index by number of rows."""
