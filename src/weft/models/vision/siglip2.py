"""Places of patches in SigLIP2's tower in its NaFlex form: a square table, interpolated to the tile's grid.

    table [P, C] -> [side, side, C] --bilinear, with antialiasing--> [rows, columns, C] added to the patches

The table is interpolated in float32, independent of the weights' dtype. There are no angles. The projector after the
tower is that of LFM2-VL.

Sources: transformers ``siglip2`` and ``lfm2_vl``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.families.vision import VisionTower
from weft.models.table_reader import TableReader


class InterpolatedPlaces:
    """Interpolated places: ``PatchPlaces`` of ``table`` [positions, C]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    @classmethod
    def of(cls, tower: VisionTower, ends: TableReader) -> InterpolatedPlaces:
        return cls(ends.tensor("positions"))

    def numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.flatten(1)

    def added(self, rows: int, columns: int) -> torch.Tensor:
        side = round(len(self._table) ** 0.5)
        # float32: torch has no antialiasing in 16 bits on a CPU, and a GPU is to have the same numbers
        table = self._table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return grid[0].flatten(1).t().to(self._table.dtype).contiguous()

    def angles(self, rows: int, columns: int) -> None:
        return None
