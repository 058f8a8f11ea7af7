"""A tower of layers without a mask, followed by the projector: the common part of all kinds of towers.

    patches [n, 768] 8 bits -> scaled, normalised -> product + positions of this grid        x [n, C]
    each layer:   x += mixer(norm(x))                   attention: every patch of a tile sees every other one
                  x += down(gelu(into(norm(x))))        or swiglu
    x [rows, columns, C] -> norm -> 2 x 2 neighbours joined [n / 4, 4 C] -> projector   rows [n / 4, D]

Kinds differ in a ``PatchPlaces``: the numbers of a patch, the addition by its place, and the angles of its queries and
keys. They also differ in a ``TileMixer``: ``AttendedTile`` here, a convolution in ``lfm3``. Patches are in row order
in every kind.

Tiles have no padding, so there is no mask. Weights are read in the model's dtype and never quantised: a tower
is a tenth of its model, and quantised releases do not quantise it either.

Rejected: all tiles of a picture as one batch. A piece would take longer by the number of tiles, and a single tile's
products fill two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.families.tower_tensors import vision_ends, vision_layers, vision_projector
from weft.families.vision import FeedKind, Projector, TowerKind, VisionTower
from weft.images.picture import Picture, Tile
from weft.images.settings import ImageSettings
from weft.models.blocks.linear import Linear
from weft.models.table_reader import TableReader
from weft.models.vision.encoder import (
    PIECE_PATCHES,
    LayerNorm,
    RmsNorm,
    TileAttention,
    TowerNorm,
    piece_patches,
    piece_slices,
    plain_form,
)
from weft.models.weights import TensorSource
from weft.tensor.gpu.host_memory import ring_for
from weft.tensor.ops.elementwise import activate, rotary, silu_mul

LAYERS: dict[TowerKind, str] = {"siglip2": "encoder.layers", "qwen3_5": "blocks", "lfm3": "layers"}
TILE_PIECES = 4
"""Pieces of queries of the largest tile of towers that cut pictures into tiles, 1,024 patches, on a CPU. Pictures of
more pieces get fewer queries in a piece, because the time and memory of scores grow with the number of keys.
"""
_GRIDS_MAX = 4
"""Number of grids whose positions are kept on a CPU: tiles of one picture often share a grid. A GPU computes positions
again, in memory that the start counts.
"""

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [patches, head dim]; both halves carry the same angles."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of a tile: ``rows`` x ``columns``. ``angles``: rotation of queries and keys, if there is one."""

    rows: int
    columns: int
    angles: Angles | None


class PatchPlaces(Protocol):
    """Places of patches in one kind of tower."""

    def numbers(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the first product's input from normalised pixels [patches, frames, pixels, 3], a picture's with one
        frame.
        """

    def added(self, rows: int, columns: int) -> torch.Tensor | None:
        """Return the addition [rows * columns, C] of a grid; None for a tower with only angles."""

    def angles(self, rows: int, columns: int) -> Angles | None:
        """Return the angles of queries and keys; None for a tower that only adds positions."""


class TileMixer(Protocol):
    """Mixer of the patches of a tile."""

    def mix(self, norm: TowerNorm, x_PC: torch.Tensor, grid: Grid) -> Generator[None, None, None]:
        """Add the mixer's output to ``x_PC``, in pieces."""


@dataclass(slots=True)
class AttendedTile:
    """Attention between all patches of a tile. ``q_norm``, ``k_norm``: over the dims of a head."""

    heads: int
    kv_heads: int
    qkv: Linear
    out: Linear
    q_norm: TowerNorm | None = None
    k_norm: TowerNorm | None = None

    def mix(self, norm: TowerNorm, x_PC: torch.Tensor, grid: Grid) -> Generator[None, None, None]:
        count, width = x_PC.shape
        heads, kv_heads, dim = self.heads, self.kv_heads, width // self.heads
        qkv_PHK = torch.empty(count, heads + 2 * kv_heads, dim, dtype=x_PC.dtype, device=x_PC.device)
        for piece in piece_slices(count, x_PC.device):
            qkv_PHK[piece] = self.qkv(norm(x_PC[piece])).view(-1, *qkv_PHK.shape[1:])
            self._turn(qkv_PHK[piece, :heads], qkv_PHK[piece, heads:-kv_heads], piece, grid.angles)
            yield
        queries, keys, values = torch.split(qkv_PHK.transpose(0, 1), [heads, kv_heads, kv_heads])
        if kv_heads != heads:
            keys, values = (part.repeat_interleave(heads // kv_heads, 0) for part in (keys, values))
        attend = TileAttention(keys, values)
        many_keys = count // (TILE_PIECES * piece_patches(x_PC.device))
        for piece in piece_slices(count, x_PC.device, max(1, many_keys)):
            seen = attend(queries[:, piece])
            x_PC[piece] += self.out(seen.transpose(0, 1).reshape(-1, width))
            yield

    def _turn(self, queries_NHK: torch.Tensor, keys_NHK: torch.Tensor, piece: slice, angles: Angles | None) -> None:
        """Normalise and rotate queries and keys in place."""
        if self.q_norm is not None and self.k_norm is not None:
            queries_NHK[:], keys_NHK[:] = self.q_norm(queries_NHK), self.k_norm(keys_NHK)
        if angles is not None:
            queries_NHK[:], keys_NHK[:] = plain_form(rotary, queries_NHK)(
                queries_NHK, keys_NHK, *(part[piece] for part in angles)
            )


@dataclass(slots=True)
class TowerLayer:
    """Layer of a tower. ``into``: with ``swiglu``, the gate and its factor, concatenated."""

    norm: TowerNorm
    mixer: TileMixer
    feed_norm: TowerNorm
    into: Linear
    down: Linear
    activation: FeedKind

    def through(self, x_PC: torch.Tensor, grid: Grid) -> Generator[None, None, None]:
        """Compute the layer in place, in pieces."""
        yield from self.mixer.mix(self.norm, x_PC, grid)
        for piece in piece_slices(len(x_PC), x_PC.device):
            inner = self.into(self.feed_norm(x_PC[piece]))
            x_PC[piece] += self.down(
                plain_form(silu_mul, inner)(inner)
                if self.activation == "swiglu"
                else activate(inner, self.activation, spent=True)
            )
            yield


@dataclass(slots=True)
class RowProjector:
    """Projector of two products; ``norm`` over the joined neighbours."""

    shape: Projector
    norm: TowerNorm | None
    into: Linear
    down: Linear

    def joined(self, x_RCD: torch.Tensor) -> torch.Tensor:
        """Return the neighbours of a tile [rows, columns, C] joined, [rows of the text, factor squared C]."""
        factor = self.shape.downsample_factor
        rows, columns, width = x_RCD.shape
        square = x_RCD.view(rows // factor, factor, columns // factor, factor, width).transpose(1, 2)
        return square.reshape(-1, factor * factor * width)

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        """Return [rows of the text, D]."""
        if self.norm is not None:
            joined = self.norm(joined)
        return self.down(activate(self.into(joined), self.shape.activation, spent=True))


class TowerEncoder:
    """A ``VisionEncoder``. ``patches``: the product of the patches; ``embedding_norm``: the norm after it."""

    def __init__(
        self,
        tower: VisionTower,
        settings: ImageSettings,
        places: PatchPlaces,
        *,
        patches: Linear,
        embedding_norm: TowerNorm | None,
        layers: list[TowerLayer],
        norm: TowerNorm,
        project: RowProjector,
    ) -> None:
        self._tower = tower
        self._settings = settings
        self._places = places
        self._patches = patches
        self._embedding_norm = embedding_norm
        self._layers = layers
        self._norm = norm
        self._project = project
        self._of_grid: dict[tuple[int, int], tuple[torch.Tensor | None, Grid]] = {}
        device, each = norm.weight.device, tower.patch_values // tower.channels
        scale = 1 / settings.rescale_factor
        self._mean = torch.tensor(settings.mean, device=device).mul(scale).repeat(each)
        self._std = torch.tensor(settings.std, device=device).mul(scale).repeat(each)
        self._ring = ring_for(device, buffer_bytes=PIECE_PATCHES * tower.patch_values * tower.frames, least_bytes=0)

    def largest(self) -> Picture:
        factor = self._tower.projector.downsample_factor
        rows = math.isqrt(self._settings.max_patches) // factor * factor
        columns = self._settings.max_patches // rows // factor * factor
        patches = np.zeros((rows * columns, self._tower.patch_values), np.uint8)
        return Picture(bytes(32), (Tile(patches, rows, columns),), (rows * columns // factor**2,), 0, 0)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Generator[None, None, torch.Tensor]:
        like, each = self._norm.weight, self._tower.projector.downsample_factor**2
        patches, rows_RD, first = sum(len(tile.patches) for tile in picture.tiles), like.new_empty((0, 0)), 0
        for tile in picture.tiles:
            added_PC, grid = self._of(tile.rows, tile.columns)
            x_PC = torch.empty(len(tile.patches), len(like), dtype=like.dtype, device=like.device)
            for piece in piece_slices(len(x_PC), torch.device("cpu")):  # of little pinned memory on a GPU
                embedded = self._embedded(tile, piece)
                x_PC[piece] = embedded if added_PC is None else embedded + added_PC[piece]
                yield
            del added_PC
            for layer in self._layers:
                yield from layer.through(x_PC, grid)
            joined = self._project.joined(self._norm(x_PC).view(tile.rows, tile.columns, -1))
            for piece in piece_slices(len(joined), joined.device, each):
                projected = self._project(joined[piece])
                if not len(rows_RD):
                    rows_RD = projected.new_empty((patches // each, projected.shape[1]))
                rows_RD[first + piece.start : first + piece.stop] = projected
                yield
            first += len(joined)
        return rows_RD

    def _embedded(self, tile: Tile, piece: slice) -> torch.Tensor:
        """Return the embedded patches, [patches, C]."""
        pixels = torch.tensor(tile.patches[piece])
        if self._ring is not None:  # a copy from ordinary memory would make the host wait
            pixels = self._ring.to_device(pixels)
        normal = pixels.float().view(len(pixels), -1, len(self._mean)).sub_(self._mean).div_(self._std)
        by_frame = normal.view(len(pixels), normal.shape[1], -1, self._tower.channels)
        embedded = self._patches(self._places.numbers(by_frame.to(self._norm.weight.dtype)))
        return embedded if self._embedding_norm is None else self._embedding_norm(embedded)

    def _of(self, rows: int, columns: int) -> tuple[torch.Tensor | None, Grid]:
        """Return the addition of a grid, and the grid."""
        known = self._of_grid.get((rows, columns))
        if known is None:
            known = (self._places.added(rows, columns), Grid(rows, columns, self._places.angles(rows, columns)))
            if not self._norm.weight.is_cpu:
                return known
            while len(self._of_grid) >= _GRIDS_MAX:
                self._of_grid.pop(next(iter(self._of_grid)))
            self._of_grid[rows, columns] = known
        return known


ReadMixer = Callable[[TableReader, VisionTower], TileMixer]


def build_tower(
    tower: VisionTower,
    text_hidden: int,
    settings: ImageSettings,
    source: TensorSource,
    *,
    vision: str,
    projector: str,
    places_of: Callable[[VisionTower, TableReader], PatchPlaces],
    mixer_of: ReadMixer,
) -> TowerEncoder:
    """Read every tensor of the tower from ``source``. ``vision``, ``projector``: prefixes of their names."""
    ends = TableReader(source, vision_ends(tower), vision)
    patches, places = _patches(ends), places_of(tower, ends)
    embedding_norm = read_norm(ends, "embedding_norm", tower.eps)
    layers = [
        _read_layer(TableReader(source, table, f"{vision}.{LAYERS[tower.kind]}.{index}"), tower, mixer_of)
        for index, table in enumerate(vision_layers(tower))
    ]
    norm, shape = read_norm(ends, "norm", tower.eps), tower.projector
    after = TableReader(source, vision_projector(tower, text_hidden), projector)
    behind = read_norm(after, "norm", shape.norm_eps)
    if norm is None:  # the projector's norm comes before its neighbours are joined
        norm, behind = behind, None
    assert norm is not None
    project = RowProjector(shape, behind, after.linear("into"), after.linear("down"))
    return TowerEncoder(
        tower,
        settings,
        places,
        patches=patches,
        embedding_norm=embedding_norm,
        layers=layers,
        norm=norm,
        project=project,
    )


def read_attended(read: TableReader, tower: VisionTower) -> AttendedTile:
    return AttendedTile(tower.heads, tower.heads, read.linear("qkv"), read.linear("out"))


def _patches(read: TableReader) -> Linear:
    [stored] = read.table["patches"]
    if len(stored.dims) == 2:
        return read.linear("patches")
    return Linear(read.tensor("patches").flatten(1), read.tensor("patches.bias"))


def _read_layer(read: TableReader, tower: VisionTower, mixer_of: ReadMixer) -> TowerLayer:
    norm, feed_norm = (read_norm(read, role, tower.eps) for role in ("norm", "feed_norm"))
    assert norm is not None
    assert feed_norm is not None
    return TowerLayer(
        norm, mixer_of(read, tower), feed_norm, read.linear("into"), read.linear("down"), tower.activation
    )


def read_norm(read: TableReader, role: str, eps: float) -> TowerNorm | None:
    """Return a norm, None if the table does not have it; an RMS norm if it has no bias."""
    weight, bias = read.get(role), read.get(f"{role}.bias")
    if weight is None:
        return None
    return RmsNorm(weight, eps) if bias is None else LayerNorm(weight, bias, eps)
