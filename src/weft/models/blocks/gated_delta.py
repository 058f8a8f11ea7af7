"""The gated delta net layer: convolution, delta rule with decay, gated norm.

    x_TD --in--> [ q | k | v | z | b | a ]                 rows of one matrix, in this order
                   causal conv + silu over q k v (window state)
                   beta = sigmoid(b) (times 2 in OLMo)      g = -exp(A_log) * softplus(a + dt_bias)
                   delta rule over (q, k, v, g, beta) (recurrent state, fp32)
                   norm per head, times silu(z) --out--> y_TD

Sources: Gated Delta Networks (Yang et al., 2024), transformers ``Qwen3NextGatedDeltaNet``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import GatedDelta
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.recurrent_layers import GATED_DELTA, GatedDeltaWeights, gated_delta_layer


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

    core: GatedDeltaWeights = field(init=False)
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.core = GatedDeltaWeights(
            self.conv, self.decay, self.dt_bias, self.norm, self.norm_eps, shape.k_heads, shape.v_heads,
            shape.k_dim, shape.v_dim, shape.beta_scale)
        self.fused = fused_block_of(self.project, self.out)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        state = cache.state
        if self.fused is not None and inputs.asked is None:
            y_TD = GATED_DELTA.run_fused(self.fused, x_TD, self.core, state["conv"], state["recurrent"],
                                         inputs.runs, cache.layer)
            if y_TD is not None:
                return y_TD
        o_TC = gated_delta_layer(self.project(x_TD), self.core, state["conv"], state["recurrent"],
                                 inputs.runs, cache.layer)
        return self.out(inputs.asked_of(o_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None:
            return None
        return GATED_DELTA.staged(self.fused, x_TD, self.core, cache.state["conv"], cache.state["recurrent"],
                      cache.layer)


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
