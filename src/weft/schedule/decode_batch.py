"""The decode batch: all decoding rows as arrays in run order, rebuilt only when a sequence joins or leaves.

    rows     4  0  7  2        seqs   9  3  12  5         best rank first
    slots    1  6  0  3        lengths, fresh, samples    the same for every decode

A plan of decodes alone has these arrays themselves, and so does the next one. They are frozen: a reader that
sees the same array again knows that nothing in it has changed (``runner.decodes``). Positions and tokens
change in every step, and are read from the row table.

Two events are rare for a decode: it has computed its last token, or it has arrived where its answer saves a
state. Each decode moves by at most one position a step. So the nearest event is a lower bound in steps, and
until then nothing is checked (``Countdown``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.schedule.plan import Bools, Int32s
from weft.units import SeqId


class Countdown:
    """Steps until something can be due at the earliest."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0

    @property
    def over(self) -> bool:
        return self._left <= 0

    def start(self, distances: Int32s) -> None:
        """``distances``: steps until each event, at the earliest. An event that is due now keeps the count at
        0."""
        self._left = int(distances.min(initial=np.iinfo(np.int32).max))

    def step(self, steps: int) -> None:
        self._left -= steps


class DecodeBatch:
    """``rows`` and ``slots``: int32 [decodes], ``seqs``: their sequences. Read only."""

    __slots__ = ("ends", "fresh", "lengths", "rows", "samples", "seqs", "slots", "states")

    def __init__(self, rows: Int32s, seqs: Sequence[SeqId], slots: Int32s) -> None:
        self.rows: Int32s = _frozen(rows)
        self.slots: Int32s = _frozen(slots)
        self.seqs = tuple(seqs)
        self.lengths: Int32s = _frozen(np.ones(rows.size, np.int32))
        self.fresh: Bools = _frozen(np.zeros(rows.size, np.bool_))
        self.samples: Bools = _frozen(np.ones(rows.size, np.bool_))
        self.ends = Countdown()
        """Of decodes that have computed all they ever will."""
        self.states = Countdown()
        """Of decodes that have come to where their answer leaves a state."""

    def step(self, steps: int = 1) -> None:
        """``steps`` more steps are computed; no decode has moved further than this."""
        self.ends.step(steps)
        self.states.step(steps)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values
