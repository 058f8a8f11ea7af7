"""The Mamba-2 layer: convolution, selective state space, norm gated before it normalises.

    x_TD --in--> [ gate | x | B | C | dt ]                 rows of one matrix, as checkpoints store them
                   causal conv + silu over x B C (window state)
                   state space over (x, dt, A, B, C, D) (recurrent state, fp32); dt = softplus(dt + bias)
                   RMS norm of (y * silu(gate)), per group --out--> y_TD

Sources: Mamba-2 (Dao and Gu, 2024), transformers ``GraniteMoeHybridMambaLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.architecture import Mamba2
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.rms_norm import rms_norm


@dataclass(slots=True)
class Mamba2Block:
    """``conv``: [channels, kernel], ``conv_bias``: [channels] or None; ``a`` (-exp(A_log)), ``d``,
    ``dt_bias``: float32 [heads]; ``norm``: [heads * head_dim]."""

    shape: Mamba2
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    out: Linear

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        inner, group = shape.inner_width, shape.group_width
        gate, xbc_TC, dt_TH = torch.split(self.project(x_TD), [inner, inner + 2 * group, shape.heads], dim=-1)
        xbc_TC = causal_conv(xbc_TC, self.conv, self.conv_bias, "silu", cache.state["conv"], runs)
        x, b, c = torch.split(xbc_TC, [inner, group, group], dim=-1)
        y_THP = mamba2(by_head(x, shape.heads), dt_TH, self.a,
                       by_head(b, shape.groups), by_head(c, shape.groups), self.d, self.dt_bias,
                       cache.state["recurrent"], runs, dt_limit=shape.dt_limit)
        y_TC = rms_norm(y_THP.flatten(1), self.norm, self.norm_eps, gate=gate, gate_first=True,
                        group_size=inner // shape.groups)
        return self.out(y_TC)
