"""The double-gated short convolution of LFM2.

    x_TD --in--> [ B | C | x ] ;  y = C * conv(B * x) --out--> y_TD     (window state of B * x)

Source: transformers ``Lfm2ShortConv``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.architecture import ShortConv
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.short_conv import short_conv


@dataclass(slots=True)
class ShortConvBlock:
    """``conv``: [channels, kernel]; ``conv_bias``: [channels] or None."""

    shape: ShortConv
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    out: Linear

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        return self.out(short_conv(self.project(x_TD), self.conv, self.conv_bias, cache.state["conv"],
                                   inputs.runs))
