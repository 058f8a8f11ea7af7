"""A tower of attention without a mask, with the projector behind it: what the kinds of towers share.

    patches [n, 768] 8 bits -> scaled, normalised -> product + positions of this grid        x [n, C]
    each layer:   x += out(attention(qkv(norm(x))))         every patch of a tile sees every other one
                  x += down(gelu(into(norm(x))))
    x [rows, columns, C] -> norm -> 2 x 2 neighbours side by side [n / 4, 4 C] -> projector   rows [n / 4, D]

What differs is a ``PatchPlaces``: the numbers of a patch, what its place adds to it, and by what angles its
queries and keys turn. Patches stand row by row in every kind; only the projector asks for neighbours.

Tiles have no padding, so there is no mask. Weights are read in the model's dtype and never quantised: a tower
is a tenth of its model, and quantised releases leave it as it is.

Rejected: all tiles of a picture as one batch. A piece would take as many times as long, and a lone tile's
products fill two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.families.tensors import Table, vision_ends, vision_layer, vision_projector
from weft.families.vision import Projector, TowerKind, VisionTower
from weft.images.picture import Picture, Tile
from weft.images.settings import ImageSettings
from weft.models.block_readers import TableReader
from weft.models.blocks.linear import Linear
from weft.models.vision.encoder import PIECE_PATCHES, LayerNorm, TileAttention, gelu, piece_slices
from weft.models.weights import TensorSource
from weft.tensor.gpu.host_memory import ring_for
from weft.tensor.ops.elementwise import rotary

LAYERS: dict[TowerKind, str] = {"siglip2": "encoder.layers", "qwen3_5": "blocks"}
TILE_PATCHES = 1024
"""Of the largest tile of towers that cut pictures into tiles. Larger pictures get fewer queries in a piece:
its scores take time and memory by the number of keys."""
_GRIDS_MAX = 4
"""Grids whose positions are kept: tiles of one picture share theirs."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [patches, head dim]; both halves carry the same angles."""


class PatchPlaces(Protocol):
    """What the place of a patch is in one kind of tower."""

    def numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised pixels [patches, frames, pixels, 3], a picture's with one frame, -> what the first
        product reads."""
        ...

    def added(self, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, C], of a grid."""
        ...

    def angles(self, rows: int, columns: int) -> Angles | None:
        """By which queries and keys turn; None for a tower that adds positions alone."""
        ...


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


class TowerEncoder:
    """A ``VisionEncoder``. ``patches``: the product of the patches."""

    def __init__(self, tower: VisionTower, settings: ImageSettings, places: PatchPlaces, *, patches: Linear,
                 layers: list[TowerLayer], norm: LayerNorm, project: RowProjector) -> None:
        self._tower = tower
        self._places = places
        self._patches = patches
        self._layers = layers
        self._norm = norm
        self._project = project
        self._of_grid: dict[tuple[int, int], tuple[torch.Tensor, Angles | None]] = {}
        device, each = norm.weight.device, tower.patch_values // tower.channels
        scale = 1 / settings.rescale_factor
        self._mean = torch.tensor(settings.mean, device=device).mul(scale).repeat(each)
        self._std = torch.tensor(settings.std, device=device).mul(scale).repeat(each)
        self._ring = ring_for(device, buffer_bytes=PIECE_PATCHES * tower.patch_values * tower.frames,
                              least_bytes=0)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Generator[None, None, torch.Tensor]:
        rows = []
        for tile in picture.tiles:
            added_PC, angles = self._of(tile.rows, tile.columns)
            x_PC = torch.empty_like(added_PC)
            for piece in piece_slices(len(x_PC), torch.device("cpu")):   # of little pinned memory on a GPU
                x_PC[piece] = self._embedded(tile, piece) + added_PC[piece]
                yield
            for layer in self._layers:
                yield from self._through(layer, x_PC, angles)
            joined = self._project.joined(self._norm(x_PC).view(tile.rows, tile.columns, -1))
            each = self._tower.projector.downsample_factor ** 2
            for piece in piece_slices(len(joined), joined.device, each):
                rows.append(self._project(joined[piece]))
                yield
        return torch.cat(rows)

    def _embedded(self, tile: Tile, piece: slice) -> torch.Tensor:
        """[patches, C]."""
        pixels = torch.tensor(tile.patches[piece])
        if self._ring is not None:   # a copy from ordinary memory would make the host wait
            pixels = self._ring.to_device(pixels)
        normal = pixels.float().view(len(pixels), -1, len(self._mean)).sub_(self._mean).div_(self._std)
        by_frame = normal.view(len(pixels), normal.shape[1], -1, self._tower.channels)
        return self._patches(self._places.numbers(by_frame.to(self._norm.weight.dtype)))

    def _of(self, rows: int, columns: int) -> tuple[torch.Tensor, Angles | None]:
        """What a grid adds, and its angles."""
        known = self._of_grid.get((rows, columns))
        if known is None:
            known = self._places.added(rows, columns), self._places.angles(rows, columns)
            while len(self._of_grid) >= _GRIDS_MAX:
                self._of_grid.pop(next(iter(self._of_grid)))
            self._of_grid[rows, columns] = known
        return known

    def _through(self, layer: TowerLayer, x_PC: torch.Tensor,
                 angles: Angles | None) -> Generator[None, None, None]:
        """One layer, in place."""
        count, width = x_PC.shape
        heads = self._tower.heads
        pieces = list(piece_slices(count, x_PC.device))
        qkv = torch.empty(count, 3 * width, dtype=x_PC.dtype, device=x_PC.device)
        for piece in pieces:
            qkv[piece] = layer.qkv(layer.norm(x_PC[piece]))
            if angles is not None:
                turned_N3HK = qkv[piece].view(-1, 3, heads, width // heads)
                # On a GPU in torch: the start compiles no kernels for towers.
                turn = rotary if x_PC.is_cpu else rotary.torch
                turned_N3HK[:, 0], turned_N3HK[:, 1] = turn(turned_N3HK[:, 0], turned_N3HK[:, 1],
                                                            *(part[piece] for part in angles))
            yield
        queries, keys, values = qkv.view(count, 3, heads, width // heads).permute(1, 2, 0, 3).unbind(0)
        attend = TileAttention(keys, values)
        for piece in piece_slices(count, x_PC.device, max(1, count // TILE_PATCHES)):
            seen = attend(queries[:, piece])
            x_PC[piece] += layer.out(seen.transpose(0, 1).reshape(-1, width))
            yield
        for piece in pieces:
            inner = gelu(layer.into(layer.feed_norm(x_PC[piece])), self._tower.activation)
            x_PC[piece] += layer.down(inner)
            yield


def build_tower(tower: VisionTower, text_hidden: int, settings: ImageSettings, source: TensorSource, *,
                vision: str, projector: str, places_of: Callable[[VisionTower, TableReader], PatchPlaces],
                ) -> TowerEncoder:
    """Read every tensor of the tower from ``source``. ``vision``, ``projector``: where both lie."""
    ends = TableReader(source, vision_ends(tower), vision)
    table = vision_layer(tower)
    patches, places = _patches(ends, tower), places_of(tower, ends)
    layers = [_read_layer(source, table, f"{vision}.{LAYERS[tower.kind]}.{index}", tower.eps)
              for index in range(tower.layer_count)]
    norm = _layer_norm(ends, "norm", tower.eps)
    after = TableReader(source, vision_projector(tower, text_hidden), projector)
    shape = tower.projector
    project = RowProjector(shape, _layer_norm(after, "norm", shape.norm_eps) if shape.norm else None,
                           after.linear("into"), after.linear("down"))
    return TowerEncoder(tower, settings, places, patches=patches, layers=layers, norm=norm, project=project)


def _patches(read: TableReader, tower: VisionTower) -> Linear:
    if tower.frames == 1:
        return read.linear("patches")
    return Linear(read.tensor("patches").flatten(1), read.tensor("patches.bias"))


def _read_layer(source: TensorSource, table: Table, name: str, eps: float) -> TowerLayer:
    read = TableReader(source, table, name)
    parts: dict[str, Any] = {role: read.linear(role) for role in ("qkv", "out", "into", "down")}
    return TowerLayer(norm=_layer_norm(read, "norm", eps), feed_norm=_layer_norm(read, "feed_norm", eps),
                      **parts)


def _layer_norm(read: TableReader, role: str, eps: float) -> LayerNorm:
    return LayerNorm(read.tensor(role), read.tensor(f"{role}.bias"), eps)
