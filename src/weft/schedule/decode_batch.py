"""Who decodes, as arrays in run order: made once for as long as nobody joins and nobody leaves.

    rows     4  0  7  2        seqs   9  3  12  5         best rank first
    slots    1  6  0  3        lengths, fresh, samples    the same for every decode

A plan of decodes alone takes these arrays as they are, and so does the next one: they are frozen, and whoever
sees the same array again knows that nothing in it has changed (``runner.decodes``). What does change in every
step, positions and tokens, is read from the row table.

Two things that may be due for a decode are far away in nearly every step: it has computed all that it ever
will, or it has come to where its answer leaves a state. Each decode moves on by at most one position a step,
so the nearest of them is a lower bound in steps, and until then nobody looks (``Countdown``).
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
        """In how many steps each of them is due at the earliest; one that is due now keeps it over."""
        self._left = int(distances.min(initial=np.iinfo(np.int32).max))

    def step(self, steps: int) -> None:
        self._left -= steps


class DecodeBatch:
    """``rows`` and ``slots``: int32 [decodes], ``seqs``: whose they are. Read only."""

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
        """So many steps more are computed: nobody is further than by as many positions."""
        self.ends.step(steps)
        self.states.step(steps)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values
