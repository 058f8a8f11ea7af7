"""The geometry of a vision tower, which turns the patches of a picture into rows of the language model.

    patches  [n, patch x patch x 3]  -->  tower: layers of attention without a mask, and feed-forwards
                                     -->  projector: ``downsample_factor`` squared neighbours become one row
    rows     [n / factor squared, hidden of the text]  take the places of image tokens in the prompt

``Architecture.vision`` is the geometry, None for a text-only model. There are three kinds of towers:

    siglip2    SigLIP2's in its NaFlex form: positions of a table, interpolated to the grid
    qwen3_5    the same, and angles: queries and keys turn by the row and the column of their patch
    lfm3       only angles; grouped heads, and most layers are convolutions over the grid

With ``sections`` in the tower the text's layers turn by three positions: see ``turn_axes``. Pure data, no
torch. Rejected: towers without fields of their own (the raw ``vision_config``), for the reason that
``architecture`` gives.

Sources: transformers ``siglip2``, ``lfm2_vl``, ``lfm3_vl``, ``qwen3_5`` and ``qwen3_5_moe``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GeluKind = Literal["gelu", "gelu_tanh"]
"""GELU with the error function, or with the usual approximation by tanh."""
FeedKind = GeluKind | Literal["swiglu"]
TowerKind = Literal["siglip2", "qwen3_5", "lfm3"]


@dataclass(frozen=True, slots=True)
class Projector:
    """Two products with an activation between. ``width``: between them. ``norm``: a layer norm before them, over
    ``downsample_factor`` squared neighbours side by side. ``norm_eps``: that of torch's LayerNorm."""

    width: int
    activation: GeluKind
    bias: bool
    norm: bool
    downsample_factor: int
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class GridLayers:
    """Layers with RMS norms and without biases. ``convolved``: which of them have a convolution over the grid
    of patches, ``kernel`` on a side; the others attend with ``kv_heads``, and norm queries and keys."""

    convolved: tuple[bool, ...]
    kernel: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Geometry of a tower. ``positions``: entries of the position table, a square grid; 0 without a table.
    ``image_token_id``: the token of one row of a picture in prompts; ``video_token_id``: of a video, None where none
    is read. ``frames``: frames of a patch; a picture is ``frames`` equal ones. ``theta``: base of the angles of rows
    and columns. ``sections``: numbers of frequencies of the text that turn by time, row and column; () where pictures
    have plain positions. ``grid_layers``: None where all layers attend, with a bias in each product and layer
    norms."""

    hidden_size: int
    layer_count: int
    heads: int
    width: int
    patch_size: int
    positions: int
    eps: float
    activation: FeedKind
    projector: Projector
    image_token_id: int
    channels: int = 3
    kind: TowerKind = "siglip2"
    frames: int = 1
    theta: float = 10_000.0
    sections: tuple[int, ...] = ()
    video_token_id: int | None = None
    grid_layers: GridLayers | None = None

    @property
    def picture_tokens(self) -> tuple[int, ...]:
        """Token ids by kind, in the order of ``PICTURE_KINDS``: one kind has one of them or none."""
        video = () if self.video_token_id is None else (self.video_token_id,)
        return self.image_token_id, *video

    @property
    def patch_values(self) -> int:
        """Numbers of one patch of one frame."""
        return self.patch_size * self.patch_size * self.channels

    @property
    def joined_width(self) -> int:
        """Width of the neighbours that become one row."""
        return self.hidden_size * self.projector.downsample_factor**2


def turn_axes(sections: tuple[int, ...], frequencies: int) -> list[int]:
    """Return the axis by which each frequency of the text turns: time 0, row 1 or column 2. The axes alternate, and
    time has all frequencies after the last ones of row and column."""
    axes = [0] * frequencies
    for axis, count in enumerate(sections[1:], start=1):
        for place in range(axis, min(3 * count, frequencies), 3):
            axes[place] = axis
    return axes
