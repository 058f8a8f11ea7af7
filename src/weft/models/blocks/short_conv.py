"""The double-gated short convolution of LFM2.

    x_TD --in--> [ B | C | x ] ;  y = C * conv(B * x) --out--> y_TD     (window state of B * x)

Source: transformers ``Lfm2ShortConv``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import ShortConv
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import run_fused, short_conv, staged


@dataclass(slots=True)
class ShortConvBlock:
    """``conv``: [channels, kernel]; ``conv_bias``: [channels] or None."""

    shape: ShortConv
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    out: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.project, self.out)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        if self.fused is not None and inputs.asked is None:
            y_TD = run_fused(self.fused, x_TD, self.conv, self.conv_bias, cache.state["conv"], inputs.runs)
            if y_TD is not None:
                return y_TD
        y_TC = short_conv(self.project(x_TD), self.conv, self.conv_bias, cache.state["conv"], inputs.runs)
        return self.out(inputs.asked_of(y_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None:
            return None
        return staged(self.fused, x_TD, self.conv, self.conv_bias, cache.state["conv"])
