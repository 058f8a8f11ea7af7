"""Layers of LFM3-VL's tower: convolutions over the grid of patches, and attention with grouped heads.

    norm(x) [n, C] -> three products      gate | out gate | values               [rows, columns, C] each
    gate values --3 x 3 of each channel, zeros around the tile--> times out gate -> product -> x += ...

Other layers attend, with norms of queries and keys, which turn by row and column as in ``qwen3_5``. Places add nothing
to a patch; a norm follows the first product. In a video each tile is convolved by itself, as it attends by itself.

A piece of the convolution is a band of full rows of the grid, and reads the neighbouring rows unchanged. Bands depend
only on the tile, so bits depend on nothing else.

Source: transformers ``lfm3_vl``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.families.vision import VisionTower
from weft.models.blocks.linear import Linear
from weft.models.table_reader import TableReader
from weft.models.vision.encoder import TowerNorm, piece_slices
from weft.models.vision.tower import AttendedTile, Grid, TileMixer, read_norm


@dataclass(slots=True)
class ConvolvedTile:
    """Convolution over the grid of a tile. ``kernel``: [C, 1, side, side]."""

    inner: Linear
    kernel: torch.Tensor
    out: Linear

    def mix(self, norm: TowerNorm, x_PC: torch.Tensor, grid: Grid) -> Generator[None, None, None]:
        count, width = x_PC.shape
        gated_PC, gates_PC = torch.empty_like(x_PC), torch.empty_like(x_PC)
        for piece in piece_slices(count, x_PC.device):
            gate, gates_PC[piece], values = self.inner(norm(x_PC[piece])).chunk(3, -1)
            torch.mul(gate, values, out=gated_PC[piece])
            yield
        gated_RSC = gated_PC.view(grid.rows, grid.columns, width)
        for band in piece_slices(grid.rows, x_PC.device, grid.columns):
            piece = slice(band.start * grid.columns, band.stop * grid.columns)
            x_PC[piece] += self.out(self._convolved(gated_RSC, band.start, band.stop) * gates_PC[piece])
            yield

    def _convolved(self, gated_RSC: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of the grid, [patches, C]."""
        beside, (rows, _, width) = self.kernel.shape[-1] // 2, gated_RSC.shape
        top, bottom = max(first - beside, 0), min(last + beside, rows)
        band = gated_RSC[top:bottom].permute(2, 0, 1)[None]
        missing = (beside - (first - top), beside - (bottom - last))
        padded = F.pad(band, (0, 0, *missing)) if any(missing) else band
        seen = F.conv2d(padded, self.kernel, padding=(0, beside), groups=width)
        return seen[0].permute(1, 2, 0).reshape(-1, width)


def read_mixer(read: TableReader, tower: VisionTower) -> TileMixer:
    assert tower.grid_layers is not None
    if "conv" in read.table:
        return ConvolvedTile(read.linear("inner"), read.tensor("conv"), read.linear("out"))
    return AttendedTile(
        tower.heads,
        tower.grid_layers.kv_heads,
        read.linear("qkv"),
        read.linear("out"),
        *(read_norm(read, f"{part}_norm", tower.eps) for part in "qk"),
    )
