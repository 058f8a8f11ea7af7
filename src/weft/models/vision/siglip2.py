"""SigLIP2's tower in its NaFlex form, with the projector of LFM2-VL behind it.

    patches [n, 768] 8 bits -> scaled, normalised -> product + positions of this grid        x [n, C]
    each layer:   x += out(attention(qkv(norm(x))))         every patch of a tile sees every other one
                  x += down(gelu(into(norm(x))))
    x [rows, columns, C] -> norm -> 2 x 2 neighbours side by side [n / 4, 4 C] -> projector   rows [n / 4, D]

Positions are a square table, interpolated to the tile's grid with antialiasing, in float32 whatever the
weights are in. Tiles have no padding, so there is no mask. Weights are read in the model's dtype and never
quantised: a tower is a tenth of its model, and quantised releases leave it as it is.

Sources: transformers ``siglip2`` and ``lfm2_vl``. Rejected: all tiles of a picture as one batch. A piece
would take as many times as long, and a lone tile's products fill two cores.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weft.families.tensors import Table, vision_ends, vision_layer, vision_projector
from weft.families.vision import Projector, VisionTower
from weft.images.picture import Picture, Tile
from weft.images.settings import ImageSettings
from weft.models.block_readers import TableReader
from weft.models.blocks.linear import Linear
from weft.models.vision.encoder import LayerNorm, TileAttention, gelu, piece_slices
from weft.models.weights import TensorSource

_GRIDS_MAX = 4
"""Grids whose positions are kept: tiles of one picture share theirs."""


@dataclass(slots=True)
class TowerLayer:
    norm: LayerNorm
    qkv: Linear
    out: Linear
    feed_norm: LayerNorm
    into: Linear
    down: Linear


@dataclass(slots=True)
class RowProjector:
    """Two products; ``norm`` over the neighbours side by side."""

    shape: Projector
    norm: LayerNorm | None
    into: Linear
    down: Linear

    def joined(self, x_RCD: torch.Tensor) -> torch.Tensor:
        """[rows, columns, C] of a tile -> neighbours side by side [rows of the text, factor squared C]."""
        factor = self.shape.downsample_factor
        rows, columns, width = x_RCD.shape
        square = x_RCD.view(rows // factor, factor, columns // factor, factor, width).transpose(1, 2)
        return square.reshape(-1, factor * factor * width)

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        """-> [rows of the text, D]."""
        if self.norm is not None:
            joined = self.norm(joined)
        return self.down(gelu(self.into(joined), self.shape.activation))


class Siglip2Encoder:
    """A ``VisionEncoder``. ``patches``: the product of the patches; ``positions``: [positions, C]."""

    def __init__(self, tower: VisionTower, settings: ImageSettings, *, patches: Linear,
                 positions: torch.Tensor, layers: list[TowerLayer], norm: LayerNorm,
                 project: RowProjector) -> None:
        self._tower = tower
        self._patches = patches
        self._layers = layers
        self._norm = norm
        self._project = project
        self._positions = positions
        self._of_grid: dict[tuple[int, int], torch.Tensor] = {}
        device, each = positions.device, tower.patch_values // tower.channels
        scale = 1 / settings.rescale_factor
        self._mean = torch.tensor(settings.mean, device=device).mul(scale).repeat(each)
        self._std = torch.tensor(settings.std, device=device).mul(scale).repeat(each)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Generator[None, None, torch.Tensor]:
        rows = []
        for tile in picture.tiles:
            x_PC = self._embedded(tile)
            yield
            for layer in self._layers:
                yield from self._through(layer, x_PC)
            joined = self._project.joined(self._norm(x_PC).view(tile.rows, tile.columns, -1))
            each = self._tower.projector.downsample_factor ** 2
            for piece in piece_slices(len(joined), joined.device, each):
                rows.append(self._project(joined[piece]))
                yield
        return torch.cat(rows)

    def _embedded(self, tile: Tile) -> torch.Tensor:
        """[patches, C] in memory of its own."""
        pixels = torch.tensor(tile.patches, device=self._positions.device).float()
        normal = pixels.sub_(self._mean).div_(self._std).to(self._positions.dtype)
        return self._patches(normal) + self._positions_of(tile.rows, tile.columns)

    def _positions_of(self, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, C]."""
        known = self._of_grid.get((rows, columns))
        if known is None:
            side = round(len(self._positions) ** 0.5)
            # float32: torch has no antialiasing in 16 bits on a CPU, and a GPU is to have the same numbers
            table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
            known = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False,
                                  antialias=True)
            known = known[0].flatten(1).t().to(self._positions.dtype).contiguous()
            while len(self._of_grid) >= _GRIDS_MAX:
                self._of_grid.pop(next(iter(self._of_grid)))
            self._of_grid[rows, columns] = known
        return known

    def _through(self, layer: TowerLayer, x_PC: torch.Tensor) -> Generator[None, None, None]:
        """One layer, in place."""
        count, width = x_PC.shape
        heads = self._tower.heads
        pieces = list(piece_slices(count, x_PC.device))
        qkv = torch.empty(count, 3 * width, dtype=x_PC.dtype, device=x_PC.device)
        for piece in pieces:
            qkv[piece] = layer.qkv(layer.norm(x_PC[piece]))
            yield
        queries, keys, values = qkv.view(count, 3, heads, width // heads).permute(1, 2, 0, 3).unbind(0)
        attend = TileAttention(keys, values)
        for piece in pieces:
            seen = attend(queries[:, piece])
            x_PC[piece] += layer.out(seen.transpose(0, 1).reshape(-1, width))
            yield
        for piece in pieces:
            inner = gelu(layer.into(layer.feed_norm(x_PC[piece])), self._tower.activation)
            x_PC[piece] += layer.down(inner)
            yield


def build_siglip2(tower: VisionTower, text_hidden: int, settings: ImageSettings, source: TensorSource, *,
                  vision: str, projector: str) -> Siglip2Encoder:
    """Read every tensor of the tower from ``source``. ``vision``, ``projector``: where both lie."""
    ends = TableReader(source, vision_ends(tower), vision)
    table = vision_layer(tower)
    patches, positions = ends.linear("patches"), ends.tensor("positions")
    layers = [_read_layer(source, table, f"{vision}.encoder.layers.{index}", tower.eps)
              for index in range(tower.layer_count)]
    norm = _layer_norm(ends, "norm", tower.eps)
    after = TableReader(source, vision_projector(tower, text_hidden), projector)
    shape = tower.projector
    project = RowProjector(shape, _layer_norm(after, "norm", shape.norm_eps) if shape.norm else None,
                           after.linear("into"), after.linear("down"))
    return Siglip2Encoder(tower, settings, patches=patches, positions=positions, layers=layers, norm=norm,
                          project=project)


def _read_layer(source: TensorSource, table: Table, name: str, eps: float) -> TowerLayer:
    read = TableReader(source, table, name)
    parts: dict[str, Any] = {role: read.linear(role) for role in ("qkv", "out", "into", "down")}
    return TowerLayer(norm=_layer_norm(read, "norm", eps), feed_norm=_layer_norm(read, "feed_norm", eps),
                      **parts)


def _layer_norm(read: TableReader, role: str, eps: float) -> LayerNorm:
    return LayerNorm(read.tensor(role), read.tensor(f"{role}.bias"), eps)
