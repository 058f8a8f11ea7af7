"""A bfloat16 matrix in 12 bits per weight, lossless.

    bfloat16   s e e e e e e e | e m m m m m m m    sixteen upper bytes make up nearly all of a tile's weights

    unit       lower bytes, columns 0-3 | lower bytes, columns 4-7 | codes of the upper bytes
               of 8 columns of 16 rows, 64 bytes each; units of two tiles alternate
    odd        the weights with another upper byte than their tile's sixteen, whole

The time of a step of few rows is the time to read the weights: three quarters of the bytes are three quarters
of the time. The kernel (csrc/twelve_bit.inl) unpacks in registers, and its sums have the bits of the tiles'
sums. Weights of a trained layer lie within sixteen powers of two, except one in some ten thousand.

Rejected: an entropy code (11 bits, DFloat11, arXiv 2504.11651), which decodes weights one after the other,
not 64 at a time. One table per matrix: rows of an embedding differ by powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.tensor import native
from weft.tensor.weights import large_pages
from weft.tensor.weights.tiled import (
    TILE_ROWS,
    MatrixRows,
    TiledWeight,
    can_be_tiled,
    row_addresses,
    rows_of,
    tiled,
)

UNIT_COLUMNS = 8
TWELVE_BIT_SIZE_MIN = 1 << 19
"""Smallest weight, in elements, that is read from memory and not from a cache."""
ODD_MOST = 1 / 256
"""Largest share of odd weights in a matrix: each costs a separate write."""
_FORM = 7
"""The form's number in csrc/kernels.hpp."""


@dataclass(frozen=True, slots=True)
class TwelveBitWeight:
    """``units`` uint8 [tiles / 2, columns / 8, 2, 3, 64], for an even number of tiles. ``highs`` uint8
    [tiles, 16]: the upper bytes that codes stand for. ``odd`` int64 [tiles + n] begins with an index per
    tile: where the tile's entries begin in ``odd``. The entries follow: place in the tile << 16 | bits,
    ordered by place. A last entry beyond all places ends each tile."""

    units: torch.Tensor
    highs: torch.Tensor
    odd: torch.Tensor
    rows: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def body(self) -> torch.Tensor:
        return self.units

    @property
    def form(self) -> str:
        return "bfloat16 in 12 bits"

    @property
    def held_bytes(self) -> int:
        """Without what fills the last tile."""
        return self.rows * self.columns * 3 // 2 + self.highs.numel() + self.odd.numel() * 8

    def native(self) -> tuple[int, ...]:
        """As the extension takes it."""
        return (self.units.data_ptr(), _FORM, self.columns, self.rows, self.highs.data_ptr(), False, 0,
                self.columns, self.odd.data_ptr())

    def tiled(self) -> TiledWeight:
        """The tiles that were packed."""
        by_tile = self.units.transpose(1, 2).flatten(0, 1)
        tiles, units = by_tile.shape[:2]
        codes = torch.stack((by_tile[:, :, 2] & 15, by_tile[:, :, 2] >> 4), 2)
        highs = self.highs.gather(1, codes.view(tiles, -1).long()).view_as(codes)
        # 64 bytes are 4 x 4 rows, each with both pairs of columns, 2 columns per pair.
        words = torch.stack((by_tile[:, :, :2], highs), -1).view(tiles, units, 2, 4, 2, 4, 2, 2)
        plain = words.permute(0, 1, 2, 4, 3, 5, 6, 7).contiguous().view(torch.int16).view(tiles, -1)
        for tile, begin in enumerate(self.odd[:tiles].tolist()):
            end = int(self.odd[tile + 1]) if tile + 1 < tiles else self.odd.shape[0]
            own = self.odd[begin:end - 1]
            plain[tile, own >> 16] = own.to(torch.int16)
        whole = plain.view(torch.bfloat16).view(tiles, -1, TILE_ROWS, 2)
        return TiledWeight(whole[:-(-self.rows // TILE_ROWS)], self.rows, self.columns)

    def dense(self) -> torch.Tensor:
        """[rows, columns], a copy."""
        return self.tiled().dense()

    def rows_at(self, rows_T: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [T] -> those rows, [T, columns]. Raises IndexError for a row beyond the table."""
        if not native.in_use():
            return self.dense()[rows_T]
        rows_T = rows_T.contiguous()
        assert rows_T.dtype == torch.int64
        if out is None:
            out = torch.empty((rows_T.shape[0], self.columns), dtype=torch.bfloat16)
        if not native.extension().twelve_bit_rows(self.native(), rows_T.data_ptr(), rows_T.shape[0],
                                                  out.data_ptr()):
            raise IndexError(f"rows {rows_T.tolist()} of a table of {self.rows}")
        return out


InTiles = TiledWeight | TwelveBitWeight


def in_best_tiles(weight: torch.Tensor, *, twelve_bit: bool = True, copies: int = 1) -> InTiles | None:
    """``weight`` [rows, columns] in the kernels' order; None where another order is faster. ``copies``: see
    ``tiled``."""
    rows, columns = weight.shape
    if twelve_bit and gains_by_twelve_bits(weight.device, weight.dtype, copies * rows, columns):
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        packed = to_twelve_bit((rows_of(weight),))
        if packed is not None:
            return packed
    return tiled(weight, copies=copies)


def gains_by_twelve_bits(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether a matrix of that dtype and size goes into 12 bits, odd weights aside."""
    return (dtype == torch.bfloat16 and can_be_tiled(device, dtype, rows, columns)
            and rows * columns >= TWELVE_BIT_SIZE_MIN and columns % UNIT_COLUMNS == 0
            and bool(native.extension().has_twelve_bit_products()))


def to_twelve_bit(parts: Sequence[MatrixRows], *, finite: bool = False) -> TwelveBitWeight | None:
    """Matrices with whole units, one below the other, in 12 bits. None if they have too many odd weights, or
    with ``finite`` a NaN or infinite one."""
    rows, columns = sum(len(part.addresses) for part in parts), parts[0].columns
    assert columns % UNIT_COLUMNS == 0
    addresses = row_addresses(parts, 2 * TILE_ROWS)
    extension, tiles = native.extension(), addresses.numel() // TILE_ROWS
    highs = torch.empty((tiles, 16), dtype=torch.uint8)
    units = large_pages.empty((tiles // 2, columns // UNIT_COLUMNS, 2, 3, 64), torch.uint8)
    odd_words = extension.pack_twelve_bit(addresses.data_ptr(), tiles, columns,
                                          int(ODD_MOST * tiles * TILE_ROWS * columns), finite,
                                          highs.data_ptr(), units.data_ptr())
    if odd_words is None:
        large_pages.give_back(units)
        return None
    odd = torch.empty(odd_words.size(), dtype=torch.int64)
    odd_words.write(odd.data_ptr())
    return TwelveBitWeight(units, highs, odd, rows, columns)
