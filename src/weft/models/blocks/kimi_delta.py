"""The Kimi delta attention layer: convolution, delta rule with a decay per channel, gated norm.

    x_TD --in--> [ q | k | v | b | f | g ]                 rows of one matrix, in this order
                   causal conv + silu over q k v (window state)
                   beta = sigmoid(b)      decay = -exp(A_log) * softplus(F f + dt_bias), per head and channel
                   delta rule over (q, k, v, decay, beta) (recurrent state, fp32)
                   norm per head, times sigmoid(G g) --out--> y_TD

f and g are bottlenecks as wide as one head. Sources: Kimi Linear (Kimi Team, 2025), transformers
``KimiLinearDeltaAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.architecture import KimiDelta
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, Projection, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.delta_rule import delta_gates, delta_rule
from weft.tensor.ops.norm import rms_norm


@dataclass(slots=True)
class KimiDeltaBlock:
    """``conv``: [3 width, kernel]; ``decay``: -exp(A_log), float32 [heads]; ``dt_bias``: float32 [width];
    ``forget`` and ``gate``: from their bottleneck to the width; ``norm``: [head_dim], shared by the heads."""

    shape: KimiDelta
    project: Projection
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    forget: Linear
    gate: Linear
    norm: torch.Tensor
    norm_eps: float
    out: Linear

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        heads, width = shape.heads, shape.width
        qkv_TC, b_TH, forget, gate = torch.split(
            self.project(x_TD), [3 * width, heads, shape.head_dim, shape.head_dim], dim=-1)
        qkv_TC = causal_conv(qkv_TC, self.conv, None, "silu", cache.state["conv"], runs)
        q, k, v = (by_head(part, heads) for part in qkv_TC.chunk(3, dim=-1))
        g_TC, beta_TH = delta_gates(self.forget(forget), self.dt_bias, self.decay, b_TH)
        o_THV = delta_rule(q, k, v, by_head(g_TC, heads), beta_TH, cache.state["recurrent"], runs,
                           scale=shape.head_dim**-0.5, layer=cache.layer)
        # float32 until the one rounding: a norm in the model's dtype, as elsewhere, would round twice.
        gate_THV = torch.sigmoid(by_head(self.gate(gate), heads).float())
        o_THV = rms_norm(o_THV, self.norm, self.norm_eps).float() * gate_THV
        return self.out(inputs.asked_of(o_THV.flatten(1)).to(x_TD.dtype))
