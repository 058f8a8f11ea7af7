"""mamba2_layer as its ops, one after the other: the definition of the fused kernel, and its fallback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.rms_norm import rms_norm


@dataclass(slots=True)
class Mamba2Weights:
    """``conv_CK`` [channels, kernel]; ``conv_bias_C`` [channels] or None; ``a_H`` (-exp(A_log)), ``d_H``,
    ``dt_bias_H``: float32 [heads]; ``norm_C``: [heads * head_dim], None for a layer without a norm. Immutable
    once a layer has run."""

    conv_CK: torch.Tensor
    conv_bias_C: torch.Tensor | None
    a_H: torch.Tensor
    d_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_C: torch.Tensor | None
    norm_eps: float
    gate_first: bool
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    dt_limit: tuple[float, float]
    bound: Any = field(default=None, repr=False, compare=False)
    """The C++ object, after the first step."""


def mamba2_layer(projected_TW: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
                 state_SHPN: torch.Tensor, runs: Runs,
                 layer: int = 0) -> torch.Tensor:
    w = weights
    tokens, inner, group = projected_TW.shape[0], w.heads * w.head_dim, w.groups * w.state_dim
    gate_TC, xbc_TC, dt_TH = torch.split(projected_TW, [inner, inner + 2 * group, w.heads], dim=-1)
    xbc_TC = causal_conv(xbc_TC, w.conv_CK, w.conv_bias_C, "silu", window_SCW, runs)
    x, b, c = torch.split(xbc_TC, [inner, group, group], dim=-1)
    y_THP = mamba2(x.reshape(tokens, w.heads, w.head_dim), dt_TH, w.a_H,
                   b.reshape(tokens, w.groups, w.state_dim), c.reshape(tokens, w.groups, w.state_dim), w.d_H,
                   w.dt_bias_H, state_SHPN, runs, dt_limit=w.dt_limit, layer=layer)
    y_TC = y_THP.flatten(1)
    if w.norm_C is None:
        return y_TC * F.silu(gate_TC)
    return rms_norm(y_TC, w.norm_C, w.norm_eps, gate=gate_TC, gate_first=w.gate_first,
                    group_size=inner // w.groups)
