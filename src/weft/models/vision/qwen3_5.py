"""Places of patches in Qwen3.5's tower: a table between corners, and angles of rows and columns. LFM3-VL's tower has
only the angles.

    added     table [side, side, C], bilinear, its corners on the grid's corners: no antialiasing
    angles    row r    r f0, r f1, ... \\ a quarter of the head's dims each, and the same again: dim i turns
              col c    c f0, c f1, ... /  with dim i + half
    numbers   red 16 x 16 of both frames | green | blue         a picture is two equal frames

The patch merger after the tower has its norm before the neighbours are joined. So that norm is the tower's last one,
and the projector has none.

Sources: transformers ``qwen3_5`` (``Qwen3_5VisionModel``) and ``vision_utils``.
"""

from __future__ import annotations

import torch

from weft.families.vision import VisionTower
from weft.models.table_reader import TableReader

BAND_PATCHES = 4096
"""Patches whose additions are computed at once, in float32."""


class TurnedPlaces:
    """Places with angles: ``PatchPlaces`` of ``table`` [positions, C]. ``head_dim``: of queries and keys; ``theta``:
    the base of their angles, on ``device``.
    """

    def __init__(
        self, table: torch.Tensor | None, head_dim: int, theta: float, frames: int, device: torch.device
    ) -> None:
        self._table = table
        self._frames = frames
        quarter = head_dim // 4
        # Computed on the CPU for every device: everywhere the same bits.
        exponents = torch.arange(0, 2 * quarter, 2, dtype=torch.float32) / (2 * quarter)
        self._frequencies = (1.0 / theta**exponents).to(device)

    @classmethod
    def of(cls, tower: VisionTower, ends: TableReader) -> TurnedPlaces:
        return cls(
            ends.get("positions"), tower.hidden_size // tower.heads, tower.theta, tower.frames, ends.source.device
        )

    def numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        by_channel = pixels.transpose(2, 3).transpose(1, 2)
        return by_channel.expand(-1, -1, self._frames, -1).flatten(1)

    def added(self, rows: int, columns: int) -> torch.Tensor | None:
        if self._table is None:
            return None
        side, device = round(len(self._table) ** 0.5), self._table.device
        table = self._table.float().view(side, side, -1)
        first_R, second_R, share_R = _between(rows, side, device)
        first_C, second_C, share_C = _between(columns, side, device)
        grid = self._table.new_empty((rows, columns, table.shape[2]))
        band = max(1, BAND_PATCHES // columns)
        for begin in range(0, rows, band):
            places = slice(begin, begin + band)
            share_B = share_R[places, None, None]
            by_row = table[first_R[places]] * (1 - share_B) + table[second_R[places]] * share_B
            grid[places] = by_row[:, first_C] * (1 - share_C[:, None]) + by_row[:, second_C] * share_C[:, None]
        return grid.flatten(0, 1)

    def angles(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._frequencies.device
        by_row = torch.arange(rows, device=device).float()[:, None, None] * self._frequencies
        by_column = torch.arange(columns, device=device).float()[:, None] * self._frequencies
        half = torch.cat((by_row.expand(-1, columns, -1), by_column.expand(rows, -1, -1)), -1).flatten(0, 1)
        whole = torch.cat((half, half), -1)
        return whole.cos(), whole.sin()


def _between(count: int, side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each of ``count`` places, the entries of the table on both sides of it, and the second's share."""
    position = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(count - 1, 1)
    first = position.floor()
    return first.long(), (first.long() + 1).clamp(max=side - 1), position - first
