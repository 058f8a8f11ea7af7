"""gated_delta_layer as its ops, one after the other: the definition of the fused kernel, and its fallback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.delta_gates import delta_gates
from weft.tensor.ops.gated_delta import gated_delta
from weft.tensor.ops.rms_norm import rms_norm


@dataclass(slots=True)
class GatedDeltaWeights:
    """``conv_CK`` [channels, kernel]; ``decay_H`` (-exp(A_log)) and ``dt_bias_H``: float32 [heads];
    ``norm_V``: [V], shared by the heads. Immutable once a layer has run."""

    conv_CK: torch.Tensor
    decay_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    norm_eps: float
    k_heads: int
    heads: int
    k_dim: int
    v_dim: int
    beta_scale: float = 1.0
    bound: Any = field(default=None, repr=False, compare=False)
    """The C++ object, after the first step."""


def gated_delta_layer(projected_TW: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
                      state_SHKV: torch.Tensor, runs: Runs,
                      layer: int = 0) -> torch.Tensor:
    w = weights
    tokens, keys, values = projected_TW.shape[0], w.k_heads * w.k_dim, w.heads * w.v_dim
    qkv_TC, z, b_TH, a_TH = torch.split(projected_TW, [2 * keys + values, values, w.heads, w.heads], dim=-1)
    qkv_TC = causal_conv(qkv_TC, w.conv_CK, None, "silu", window_SCW, runs)
    q, k, v = torch.split(qkv_TC, [keys, keys, values], dim=-1)
    g_TH, beta_TH = delta_gates(a_TH, w.dt_bias_H, w.decay_H, b_TH, beta_scale=w.beta_scale)
    o_THV = gated_delta(q.reshape(tokens, w.k_heads, w.k_dim), k.reshape(tokens, w.k_heads, w.k_dim),
                        v.reshape(tokens, w.heads, w.v_dim), g_TH, beta_TH, state_SHKV, runs,
                        scale=w.k_dim**-0.5, layer=layer)
    o_THV = rms_norm(o_THV, w.norm_V, w.norm_eps, gate=z.reshape(tokens, w.heads, w.v_dim))
    return o_THV.flatten(1)
