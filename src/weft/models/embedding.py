"""Embedding rows of a step: one call of a kernel on a CPU, else a gather of torch. Only these rows of a coded table
are dequantised. Steady decodes pass the same tensor in each step and get the same memory, because new memory would take
more time than the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import CodedTiles, InTiles, native_rows, table_rows


class Lookup(Protocol):
    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return rows [T, D] of the embedding for int64 [T]."""


@dataclass(frozen=True, slots=True)
class CodedTable:
    """An embedding that stays in int8, int6 or int4. ``dtype``: of its rows."""

    weight: QuantizedWeight
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return self.weight.rows_at(tokens_T, self.dtype)


Table = torch.Tensor | InTiles | CodedTable


class Embedding:
    """Embedding with one buffer of rows. ``table``: [vocab, D], or the same in tiles or codes."""

    __slots__ = ("_asked", "_room", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self._asked: torch.Tensor | None = None
        self._room: torch.Tensor | None = None

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return rows [T, D] for int64 [T], valid until the next call with the same tensor. Raises IndexError for a
        token beyond the table.
        """
        table, room = self.table, self._room if tokens_T is self._asked else None
        if isinstance(table, CodedTable | CodedTiles):
            return table.rows_at(tokens_T)
        if not isinstance(table, torch.Tensor):
            rows_TD = table.rows_at(tokens_T, room)
        elif native.fits(table):
            rows_TD = table_rows(native_rows(table), table.dtype, tokens_T, room)
        else:
            return F.embedding(tokens_T, table)
        self._asked, self._room = tokens_T, rows_TD
        return rows_TD
