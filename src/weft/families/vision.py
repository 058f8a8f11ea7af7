"""The geometry of a vision tower: what turns the patches of a picture into rows of the language model.

    patches  [n, patch x patch x 3]  -->  tower: layers of attention without a mask, and feed-forwards
                                     -->  projector: ``downsample_factor`` squared neighbours become one row
    rows     [n / factor squared, hidden of the text]  stand in the prompt where image tokens stand

``Architecture.vision`` has it, None for a model of text alone. The tower is SigLIP2's in its NaFlex form:
patches of any grid, positions that are interpolated to it. Pure data, no torch. Rejected: towers without
fields of their own (the raw ``vision_config``), for the reason that ``architecture`` gives.

Sources: transformers ``siglip2`` and ``lfm2_vl``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GeluKind = Literal["gelu", "gelu_tanh"]
"""With the error function, or with the usual approximation by tanh."""


@dataclass(frozen=True, slots=True)
class Projector:
    """Two products with an activation between. ``width``: between them. ``norm``: a layer norm in front,
    over ``downsample_factor`` squared neighbours side by side. ``norm_eps``: that of torch's LayerNorm."""

    width: int
    activation: GeluKind
    bias: bool
    norm: bool
    downsample_factor: int
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class VisionTower:
    """``positions``: entries of the position table, a square grid. ``image_token_id``: the token that stands
    for one row in the prompts of other engines."""

    hidden_size: int
    layer_count: int
    heads: int
    width: int
    patch_size: int
    positions: int
    eps: float
    activation: GeluKind
    projector: Projector
    image_token_id: int
    channels: int = 3

    @property
    def patch_values(self) -> int:
        """Numbers of one patch."""
        return self.patch_size * self.patch_size * self.channels

    @property
    def joined_width(self) -> int:
        """Width of the neighbours that become one row."""
        return self.hidden_size * self.projector.downsample_factor ** 2
