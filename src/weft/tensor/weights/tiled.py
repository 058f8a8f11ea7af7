"""A float matrix in the order of the C++ kernel.

    tile 0 | column 0 of rows 0..15 | column 1 of rows 0..15 | ...        64 bytes each
    tile 1 | ...                      (bfloat16: columns 0-1, columns 2-3, ...)

Sixteen rows are the lanes of a vector: one instruction multiplies a column of them (bfloat16: a pair) by a
number of x and adds. Nothing is added across lanes, and a row of x gives the same bits whatever rows are
beside it. Tiles are also operands of a matrix unit (AMX): it multiplies many rows, and vectors multiply few
in its order (csrc/matrix_products.inl). Tiles replace the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.weights import large_pages

TILE_ROWS = 16
_FORMS = {torch.bfloat16: 4, torch.float32: 5}
"""Dtype -> its number among the forms of csrc/kernels.hpp."""
TILED_ELEMENTS_MIN = 1 << 14
"""Smallest weight, in elements, whose order matters."""


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """``tiles`` [tiles, columns / pack, 16, pack], float32 (pack 1) or bfloat16 (pack 2); rows are padded to
    whole tiles."""

    tiles: torch.Tensor
    rows: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tiles.dtype

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def body(self) -> torch.Tensor:
        """The tensor with nearly all of the bytes."""
        return self.tiles

    @property
    def held_bytes(self) -> int:
        """Excludes the padding of the last tile."""
        return self.rows * self.columns * self.tiles.itemsize

    def native(self) -> tuple[int, ...]:
        """The arguments of the extension."""
        assert self.tiles.is_contiguous()
        form = _FORMS[self.dtype]
        return self.tiles.data_ptr(), form, self.columns, self.rows, 0, False, 0, self.columns, 0

    def dense(self) -> torch.Tensor:
        """[rows, columns], a copy."""
        return self.tiles.transpose(1, 2).reshape(-1, self.columns)[:self.rows].contiguous()

    def rows_at(self, rows_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> those rows, [T, columns]."""
        return self.tiles[rows_T // TILE_ROWS, :, rows_T % TILE_ROWS].flatten(1)


def tiled(weight: torch.Tensor, *, copies: int = 1) -> TiledWeight | None:
    """``weight`` [rows, columns] in tiles; None where that order is not the faster one. ``copies``: matrices
    of this size that a layer has (experts)."""
    rows, columns = weight.shape
    if not can_be_tiled(weight.device, weight.dtype, copies * rows, columns):
        return None
    if weight.dtype == torch.bfloat16:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        return bf16_tiles((rows_of(weight),))
    padded = F.pad(weight, (0, 0, 0, -rows % TILE_ROWS))
    tiles = padded.view(-1, TILE_ROWS, columns, 1).transpose(1, 2)
    return TiledWeight(large_pages.copied(tiles), rows, columns)


def can_be_tiled(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether a matrix of that dtype and size goes into tiles."""
    return (device.type == "cpu" and rows * columns >= TILED_ELEMENTS_MIN and serves(dtype)
            and not columns % (4 // dtype.itemsize))


def bf16_tiles(parts: Sequence[MatrixRows]) -> TiledWeight:
    """Matrices one below the other in tiles."""
    rows, columns = sum(len(part.addresses) for part in parts), parts[0].columns
    addresses = row_addresses(parts, TILE_ROWS)
    count = addresses.numel() // TILE_ROWS
    tiles = large_pages.empty((count, columns // 2, TILE_ROWS, 2), torch.bfloat16)
    native.extension().pack_tiles(addresses.data_ptr(), count, columns, tiles.data_ptr())
    return TiledWeight(tiles, rows, columns)


class MatrixRows(NamedTuple):
    """Rows of bfloat16 where they lie, in a tensor or a mapped file. ``owner`` keeps them alive.
    ``addresses``: int64 [rows]."""

    owner: object
    addresses: torch.Tensor
    columns: int

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> MatrixRows:
        """``order``: of rows [rows, anything]."""
        return self._replace(addresses=order(self.addresses[:, None]).flatten())


def rows_of(weight: torch.Tensor) -> MatrixRows:
    assert weight.dtype == torch.bfloat16
    assert weight.stride(1) == 1
    return rows_from(weight, weight.data_ptr(), weight.shape[0], weight.shape[1], 2 * weight.stride(0))


def rows_from(owner: object, address: int, rows: int, columns: int, stride_bytes: int) -> MatrixRows:
    """``rows`` at equal distances from ``address`` on."""
    return MatrixRows(owner, address + torch.arange(rows) * stride_bytes, columns)


def row_addresses(parts: Sequence[MatrixRows], multiple: int) -> torch.Tensor:
    """Where the rows of ``parts`` begin, with zeros behind up to a ``multiple`` of them."""
    each = [part.addresses for part in parts]
    return F.pad(torch.cat(each), (0, -sum(map(len, each)) % multiple))


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernel is the faster one for ``dtype`` on this CPU."""
    if not native.in_use() or dtype not in _FORMS or native.extension().instruction_set() == "portable":
        return False
    # On a CPU with AMX that these kernels cannot use, oneDNN uses it.
    return dtype == torch.float32 or native.matrix_unit() != "none" or not torch.cpu._is_amx_tile_supported()
