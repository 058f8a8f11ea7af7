"""Memory for the logits of a step, written again and again on a CPU.

    step of 3 rows    [ row 0 | row 1 | row 2 |       ...       ]    float32 [rows of the widest step, vocab]

New memory comes page by page, and the faults take longer than what is written to it. On a GPU torch's own
allocator reuses blocks, so there is none of this there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class LogitsRoom(NamedTuple):
    """float32 [rows, vocab] of steps of one size. ``host_XV``: the same memory."""

    rows: int
    logits_XV: torch.Tensor
    host_XV: npt.NDArray[np.float32]

    @staticmethod
    def of(rows: int, vocab_size: int) -> LogitsRoom:
        logits_XV = torch.empty((rows, vocab_size))
        return LogitsRoom(rows, logits_XV, logits_XV.numpy())

    def first(self, rows: int) -> LogitsRoom:
        return self if rows == self.rows else LogitsRoom(rows, self.logits_XV[:rows], self.host_XV[:rows])
