"""Embedding rows of a step: one call of a kernel on a CPU, else a gather of torch. Only these rows of a coded table
are dequantised. Steady decodes pass the same tensor in each step and get the same memory, because new memory would take
more time than the rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.ops.linear import Matrix
from weft.tensor.weights.tiles import native_rows, table_rows


class Lookup(Protocol):
    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return rows [T, D] of the embedding for int64 [T]."""


class Embedding:
    """Embedding with one buffer of rows. ``table``: [vocab, D]."""

    __slots__ = ("_asked", "_room", "table")

    def __init__(self, table: Matrix) -> None:
        self.table = table
        self._asked: torch.Tensor | None = None
        self._room: torch.Tensor | None = None

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return rows [T, D] for int64 [T], valid until the next call with the same tensor. Raises IndexError for a
        token beyond the table.
        """
        table, room = self.table, self._room if tokens_T is self._asked else None
        if not isinstance(table, torch.Tensor):
            rows_TD = table.rows_at(tokens_T, room)
        elif native.fits(table):
            rows_TD = table_rows(native_rows(table), table.dtype, tokens_T, room)
        else:
            return F.embedding(tokens_T, table)
        self._asked, self._room = tokens_T, rows_TD
        return rows_TD
