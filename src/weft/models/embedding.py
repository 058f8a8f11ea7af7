"""The rows of an embedding that a step asks for: a gather of torch, or of the kernel of a 12-bit table. Of a
table in codes the rows alone are dequantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import InTiles


class Lookup(Protocol):
    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D] of the embedding."""


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


@dataclass(frozen=True, slots=True)
class Embedding:
    """``table``: [vocab, D], or the same in tiles or codes."""

    table: Table

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]. Raises IndexError for a token beyond the table."""
        if isinstance(self.table, torch.Tensor):
            return F.embedding(tokens_T, self.table)
        return self.table.rows_at(tokens_T)
