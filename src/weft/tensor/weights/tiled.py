"""A float matrix in the order of the C++ kernel.

    tile 0 | column 0 of rows 0..15 | column 1 of rows 0..15 | ...        64 bytes each
    tile 1 | ...                      (bfloat16: columns 0-1, columns 2-3, ...)

Sixteen rows are the lanes of a vector. One instruction multiplies a column of them (bfloat16: a pair of
columns) by a number of x and adds. The weights are one stream from memory. Nothing is added across lanes, and
a row of x gives the same bits whatever rows are beside it. Few rows of x run at the speed of memory, many as
fast as with oneDNN (``python -m benchmarks.linear``).

float32 is tiled wherever the kernels know the CPU's vectors. bfloat16 is tiled where the CPU multiplies pairs
(AVX512-BF16) and has no matrix unit (AMX), with which oneDNN's order is faster for prompts. Tiles replace the
rows. An embedding that is also the head is tiled too: a token's row is a gather.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def tiled(weight: torch.Tensor, *, to_stay: bool = True) -> TiledWeight | None:
    """``weight`` [rows, columns] in tiles; None where that order is not the faster one. ``to_stay``: allocate
    memory for long-lived tensors."""
    if weight.device.type != "cpu" or weight.numel() < TILED_ELEMENTS_MIN or not serves(weight.dtype):
        return None
    rows, columns = weight.shape
    pack = 4 // weight.itemsize
    if columns % pack:
        return None
    padded = F.pad(weight, (0, 0, 0, -rows % TILE_ROWS))
    tiles = padded.view(-1, TILE_ROWS, columns // pack, pack).transpose(1, 2)
    return TiledWeight(large_pages.copied(tiles) if to_stay else tiles.contiguous(), rows, columns)


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernel is the faster one for ``dtype`` on this CPU."""
    if not native.in_use():
        return False
    if dtype == torch.bfloat16:
        return bool(native.extension().has_bf16_products()) and not torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32 and native.extension().instruction_set() != "portable"
