"""A gated delta net layer between its two projections: convolution, gates, delta rule, gated norm.

In C++ (csrc/layers.cpp) its three kernels are one call, with both projections or without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.tensor import native
from weft.tensor.fused_block import RecurrentCore
from weft.tensor.inputs import Runs
from weft.tensor.op import op
from weft.tensor.ops.conv import KERNEL_MAX, causal_conv, weights_of
from weft.tensor.ops.delta_rule import KEY_DIM_MAX, delta_gates, delta_rule
from weft.tensor.ops.norm import rms_norm


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


@op()
def gated_delta_layer(projected_TW: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
                      state_S: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor:
    """``projected_TW`` [T, W]: output of the input projection, columns q, k, v, z, b, a. Returns the input
    [T, heads * V] of the output projection.

        q k v <- silu(conv(q k v))      beta = scale sigmoid(b)      g = decay softplus(a + dt_bias)
        o = gated_delta(q, k, v, g, beta)        norm(o, per head) silu(z)

    State arguments as in ``causal_conv`` and ``delta_rule``. Gates are float32; values between the ops are
    rounded to the dtype of ``projected_TW``.

    Source: Gated Delta Networks (Yang et al., 2024), transformers ``Qwen3NextGatedDeltaNet``.
    """
    w = weights
    tokens, keys, values = projected_TW.shape[0], w.k_heads * w.k_dim, w.heads * w.v_dim
    qkv_TC, z, b_TH, a_TH = torch.split(projected_TW, [2 * keys + values, values, w.heads, w.heads], dim=-1)
    qkv_TC = causal_conv(qkv_TC, w.conv_CK, None, "silu", window_SCW, runs)
    q, k, v = torch.split(qkv_TC, [keys, keys, values], dim=-1)
    g_TH, beta_TH = delta_gates(a_TH, w.dt_bias_H, w.decay_H, b_TH, beta_scale=w.beta_scale)
    o_THV = delta_rule(q.reshape(tokens, w.k_heads, w.k_dim), k.reshape(tokens, w.k_heads, w.k_dim),
                       v.reshape(tokens, w.heads, w.v_dim), g_TH, beta_TH, state_S, runs,
                       scale=w.k_dim**-0.5, layer=layer)
    o_THV = rms_norm(o_THV, w.norm_V, w.norm_eps, gate=z.reshape(tokens, w.heads, w.v_dim))
    return o_THV.flatten(1)


def _takes(w: GatedDeltaWeights) -> bool:
    return (w.conv_CK.dtype in native.DTYPES and w.norm_V.dtype in native.DTYPES
            and w.conv_CK.shape[1] <= KERNEL_MAX and w.v_dim % native.LANES == 0
            and w.k_dim % native.LANES == 0 and w.k_dim <= KEY_DIM_MAX)


def _bind(w: GatedDeltaWeights) -> Any:
    for gate in (w.decay_H, w.dt_bias_H):
        assert gate.dtype == torch.float32
        assert gate.shape == (w.heads,)
        assert gate.is_contiguous()
    assert w.norm_V.is_contiguous()
    assert w.conv_CK.shape[0] == 2 * w.k_heads * w.k_dim + w.heads * w.v_dim
    return native.extension().GatedDeltaLayer(
        weights_of(w.conv_CK, None), (w.norm_V.data_ptr(), native.DTYPES[w.norm_V.dtype], w.norm_eps),
        w.decay_H.data_ptr(), w.dt_bias_H.data_ptr(), w.beta_scale, w.k_heads, w.heads, w.k_dim, w.v_dim)


def _logged(w: GatedDeltaWeights) -> tuple[int, tuple[int, int]]:
    channels, values = w.conv_CK.shape[0], w.heads * w.v_dim
    return channels + 2 * w.heads, (channels, values)


_core = RecurrentCore(2, "gated_delta", _takes, _bind, _logged, lambda w: w.heads * w.v_dim)
gated_delta_layer.in_cpp(_core.run)
run_fused, staged = _core.run_fused, _core.staged
