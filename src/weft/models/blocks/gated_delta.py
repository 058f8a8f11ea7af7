"""The gated delta net layer: convolution, delta rule with decay, gated norm.

    x_TD --in--> [ q | k | v | z | b | a ]                 rows of one matrix, in this order
                   causal conv + silu over q k v (window state)
                   beta = sigmoid(b)      g = -exp(A_log) * softplus(a + dt_bias)
                   delta rule over (q, k, v, g, beta) (recurrent state, fp32)
                   norm per head, times silu(z) --out--> y_TD

Decay and beta are computed in float32 whatever the model's dtype: they are exponents of everything that
follows. Sources: Gated Delta Networks (Yang et al., 2024), transformers ``Qwen3NextGatedDeltaNet``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.architecture import GatedDelta
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.gated_delta import gated_delta
from weft.tensor.ops.rms_norm import rms_norm


@dataclass(slots=True)
class GatedDeltaBlock:
    """``conv``: [channels, kernel]; ``decay`` (-exp(A_log)) and ``dt_bias``: float32 [v_heads];
    ``norm``: [v_dim], shared by the heads."""

    shape: GatedDelta
    project: Linear
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    out: Linear

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        channels = 2 * shape.key_width + shape.value_width
        qkv_TC, z, b_TH, a_TH = torch.split(
            self.project(x_TD), [channels, shape.value_width, shape.v_heads, shape.v_heads], dim=-1)
        qkv_TC = causal_conv(qkv_TC, self.conv, None, "silu", cache.state["conv"], runs)
        q, k, v = torch.split(qkv_TC, [shape.key_width, shape.key_width, shape.value_width], dim=-1)
        g_TH = self.decay * F.softplus(a_TH.float() + self.dt_bias)
        o_THV = gated_delta(by_head(q, shape.k_heads), by_head(k, shape.k_heads), by_head(v, shape.v_heads),
                            g_TH, torch.sigmoid(b_TH.float()), cache.state["recurrent"], runs,
                            scale=shape.k_dim**-0.5)
        o_THV = rms_norm(o_THV, self.norm, self.norm_eps, gate=by_head(z, shape.v_heads))
        return self.out(o_THV.flatten(1))


def ungroup_qkvz(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """Qwen3-Next stores its projection by key head, each group [q | k | its v heads | their z]; this returns
    all q, all k, all v, all z. ``weight``: [2 key_width + 2 value_width, ...] -> the same shape."""
    value = shape.v_heads // shape.k_heads * shape.v_dim
    grouped = weight.reshape(shape.k_heads, 2 * shape.k_dim + 2 * value, *weight.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in
                      torch.split(grouped, [shape.k_dim, shape.k_dim, value, value], dim=1)])


def ungroup_ba(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """As ``ungroup_qkvz`` for the rows of beta and decay: [2 v_heads, ...], all b and then all a."""
    grouped = weight.reshape(shape.k_heads, 2, shape.v_heads // shape.k_heads, *weight.shape[1:])
    return grouped.transpose(0, 1).reshape(weight.shape)
