"""The rows of an embedding that a step asks for.

    tokens_T --torch--> [T, D]            any table, any device
             --numpy--> [T, D], kept      few tokens on a CPU, beside kernels of C++: one gather of bytes
             --C++----> [T, D], kept      a 12-bit table
             --torch--> [T, D]            codes: the rows alone are dequantised

For tiled tables torch takes four operators, each of which costs the host of a small step more than the rows
do. Kept: the memory of a step of decodes that go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.tensor import native
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import TILE_ROWS, InTiles, TiledWeight, TwelveBitWeight

TOKENS_MAX = 256
"""Tokens of a step that are gathered by numpy."""
_BYTES: dict[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
"""Elements of other dtypes as numpy takes them."""


@dataclass(frozen=True, slots=True)
class CodedTable:
    """An embedding that stays in int8, int6 or int4. ``dtype``: of its rows."""

    weight: QuantizedWeight
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


Table = torch.Tensor | InTiles | CodedTable


class Embedding:
    """``table``: [vocab, D], or the same in tiles or codes."""

    __slots__ = ("_asked", "_at", "_bytes", "_room", "_rows", "_tokens", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self._at = 0
        self._bytes: npt.NDArray[Any] = np.empty(0)
        self._asked: torch.Tensor | None = None
        self._tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._room: npt.NDArray[Any] = np.empty(0)
        self._rows = torch.empty(0)

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, D]. Valid until the same tensor asks again."""
        table = self.table
        if isinstance(table, CodedTable):
            return table.weight.rows_at(tokens_T, table.dtype)
        if isinstance(table, TwelveBitWeight):
            return self._twelve_bit_rows(table, tokens_T)
        weight = table.tiles if isinstance(table, TiledWeight) else table
        if (not (weight.is_cpu and native.in_use()) or tokens_T.shape[0] > TOKENS_MAX
                or weight.itemsize not in _BYTES):
            if isinstance(table, TiledWeight):
                return table.rows_at(tokens_T)
            return torch.nn.functional.embedding(tokens_T, table)
        # The runner keeps one tensor of tokens while the same decodes go on; weights move when a server
        # sleeps.
        if tokens_T is not self._asked or weight.data_ptr() != self._at:
            self._make_room(tokens_T, weight)
        if isinstance(table, TiledWeight):
            tiles, lanes = np.divmod(self._tokens, TILE_ROWS)
            self._room[...] = self._bytes[tiles, :, lanes]
        else:
            # Into memory that is kept: new memory costs page faults in each step.
            self._bytes.take(self._tokens, axis=0, out=self._room)
        return self._rows

    def _twelve_bit_rows(self, table: TwelveBitWeight, tokens_T: torch.Tensor) -> torch.Tensor:
        """By one kernel, into memory that is kept as well."""
        if tokens_T is not self._asked:
            self._asked = tokens_T
            self._rows = torch.empty((tokens_T.shape[0], table.columns), dtype=table.dtype)
        return table.rows_at(tokens_T, self._rows)

    def _make_room(self, tokens_T: torch.Tensor, weight: torch.Tensor) -> None:
        assert not isinstance(self.table, CodedTable)
        self._at = weight.data_ptr()
        self._asked, self._tokens = tokens_T, tokens_T.numpy()
        if isinstance(self.table, TiledWeight):
            wide, word = self.table.columns, torch.int32
            self._bytes = weight.view(word).squeeze(3).numpy()   # a pack is one word: [tiles, packs, 16]
        else:
            wide, word = weight.shape[1], _BYTES[weight.itemsize]
            self._bytes = weight.view(word).numpy()
        self._rows = torch.empty((tokens_T.shape[0], wide), dtype=weight.dtype)
        self._room = self._rows.view(word).numpy()
