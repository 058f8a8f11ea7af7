"""A Mamba-2 layer between its two projections: convolution, recurrence, gated norm.

In C++ (csrc/layers.cpp) its three kernels are one call, with both projections or without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.fused_block import RecurrentCore
from weft.tensor.inputs import Runs
from weft.tensor.op import op
from weft.tensor.ops.conv import KERNEL_MAX, causal_conv, weights_of
from weft.tensor.ops.mamba2 import STATE_DIM_MAX, mamba2
from weft.tensor.ops.norm import rms_norm


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


@op()
def mamba2_layer(projected_TW: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
                 state_S: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor:
    """``projected_TW`` [T, W]: output of the input projection, columns gate, x, B, C, dt. Returns the input
    [T, heads * P] of the output projection.

        x B C <- silu(conv(x B C))      y = mamba2(x, dt, A, B, C, D)
        norm(y silu(gate)) or norm(y) silu(gate), over groups; without a norm y silu(gate)

    State arguments as in ``causal_conv`` and ``mamba2``. Values between the ops are rounded to the dtype of
    ``projected_TW``.

    Source: Mamba-2 (Dao and Gu, 2024), transformers ``GraniteMoeHybridMambaLayer``.
    """
    w = weights
    tokens, inner, group = projected_TW.shape[0], w.heads * w.head_dim, w.groups * w.state_dim
    gate_TC, xbc_TC, dt_TH = torch.split(projected_TW, [inner, inner + 2 * group, w.heads], dim=-1)
    xbc_TC = causal_conv(xbc_TC, w.conv_CK, w.conv_bias_C, "silu", window_SCW, runs)
    x, b, c = torch.split(xbc_TC, [inner, group, group], dim=-1)
    y_THP = mamba2(x.reshape(tokens, w.heads, w.head_dim), dt_TH, w.a_H,
                   b.reshape(tokens, w.groups, w.state_dim), c.reshape(tokens, w.groups, w.state_dim), w.d_H,
                   w.dt_bias_H, state_S, runs, dt_limit=w.dt_limit, layer=layer)
    y_TC = y_THP.flatten(1)
    if w.norm_C is None:
        return y_TC * F.silu(gate_TC)
    return rms_norm(y_TC, w.norm_C, w.norm_eps, gate=gate_TC, gate_first=w.gate_first,
                    group_size=inner // w.groups)


def _takes(w: Mamba2Weights) -> bool:
    return (w.norm_C is not None and w.conv_CK.dtype in native.DTYPES and w.norm_C.dtype in native.DTYPES
            and w.conv_CK.shape[1] <= KERNEL_MAX and w.conv_CK.shape[0] % native.LANES == 0
            and w.state_dim % native.LANES == 0 and w.state_dim <= STATE_DIM_MAX
            and (w.heads * w.head_dim // w.groups) % native.LANES == 0)


def _bind(w: Mamba2Weights) -> Any:
    inner = w.heads * w.head_dim
    for row in (w.a_H, w.d_H, w.dt_bias_H):
        assert row.dtype == torch.float32
        assert row.shape == (w.heads,)
        assert row.is_contiguous()
    assert w.norm_C is not None
    assert w.norm_C.is_contiguous()
    assert w.conv_CK.shape[0] == inner + 2 * w.groups * w.state_dim
    return native.extension().Mamba2Layer(
        weights_of(w.conv_CK, w.conv_bias_C),
        (w.norm_C.data_ptr(), native.DTYPES[w.norm_C.dtype], w.norm_eps), w.a_H.data_ptr(),
        w.d_H.data_ptr(), w.dt_bias_H.data_ptr(), w.heads, w.groups, w.head_dim, w.state_dim,
        inner // w.groups, w.gate_first, *w.dt_limit)


def _logged(w: Mamba2Weights) -> tuple[int, tuple[int, int]]:
    inner = w.heads * w.head_dim
    return inner + 2 * w.groups * w.state_dim + w.heads, (0, inner)


_core = RecurrentCore(3, "mamba2", _takes, _bind, _logged, lambda w: w.heads * w.head_dim)
mamba2_layer.in_cpp(_core.run)
run_fused, staged = _core.run_fused, _core.staged
