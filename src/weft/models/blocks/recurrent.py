"""Recurrent layers that the fused kernels know: a projection, a layer with its state, a projection.

    gated delta net, Mamba-2      ``RecurrentBlock`` over a ``RecurrentCore`` of ``tensor.ops.recurrent_layers``
    LFM2                          x_TD --in--> [ B | C | x ] ;  y = C * conv(B * x) --out--> y_TD

In transformers: ``Lfm2ShortConv``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.families.mixers.short_conv import ShortConv
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Projection, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.conv import centred_short_conv, short_conv, staged
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights, Mamba2Weights, RecurrentCore


@dataclass(slots=True)
class RecurrentBlock:
    """A gated delta net or Mamba-2: ``core`` is the layer between the projections, ``weights`` its weights.
    ``factors``: on each output of ``project``, None if all are 1.
    """

    core: RecurrentCore[Any]
    weights: GatedDeltaWeights | Mamba2Weights
    project: Linear
    out: Projection
    factors: torch.Tensor | None = None
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The fused kernels know no factors on the parts of the projection (Falcon-H1).
        self.fused = None if self.factors is not None else fused_block_of(self.project, self.out)

    @property
    def last_product(self) -> Projection:
        """The product whose result is the block's output."""
        return self.out

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        window_SCW, state_S = cache.state["conv"], cache.state["recurrent"]
        projected = self.project(x_TD)
        if self.factors is not None:
            projected = projected * self.factors
        o_TC = self.core.layer(projected, self.weights, window_SCW, state_S, inputs.runs, cache.layer)
        return self.out(inputs.asked_of(o_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """Return the block as a part of a stack; ``x_TD`` is its input."""
        if self.fused is None:
            return None
        return self.core.staged(
            self.fused, x_TD, self.weights, cache.state["conv"], cache.state["recurrent"], cache.layer
        )


@dataclass(slots=True)
class ShortConvBlock:
    """LFM2's short convolution. ``conv``: [channels, kernel]; ``conv_bias``: [channels] or None."""

    shape: ShortConv
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    out: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.project, self.out)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        projected_TJ = self.project(x_TD)
        if self.shape.centred:
            y_TC = centred_short_conv(projected_TJ, self.conv, self.conv_bias, inputs.runs)
        else:
            y_TC = short_conv(projected_TJ, self.conv, self.conv_bias, cache.state["conv"], inputs.runs)
        return self.out(inputs.asked_of(y_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """Return the block as a part of a stack; ``x_TD`` is its input."""
        if self.fused is None or self.shape.centred:
            return None
        return staged(self.fused, x_TD, self.conv, self.conv_bias, cache.state["conv"])


def read_short_conv(read: BlockReader, shape: ShortConv, name: str) -> ShortConvBlock:
    table = read.table(shape.table(read.hidden), name)
    return ShortConvBlock(
        shape, table.linear("project"), conv=table.conv(), conv_bias=table.get("conv.bias"), out=table.linear("out")
    )
