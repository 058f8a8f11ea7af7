"""mamba2_layer by ``csrc/layers.cpp``: three kernels in one call."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv.native import KERNEL_MAX, weights_of
from weft.tensor.ops.mamba2.native import STATE_DIM_MAX
from weft.tensor.ops.mamba2_layer.unfused import Mamba2Weights


def supported(projected_TW: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
              state_SHPN: torch.Tensor) -> bool:
    w = weights
    return (w.norm_C is not None and native.fits(projected_TW) and projected_TW.stride(1) == 1
            and state_SHPN.dtype in native.STATE_DTYPES and window_SCW.dtype in native.DTYPES
            and w.conv_CK.dtype in native.DTYPES and w.norm_C.dtype in native.DTYPES
            and w.conv_CK.shape[1] <= KERNEL_MAX and w.conv_CK.shape[0] % native.LANES == 0
            and w.state_dim % native.LANES == 0 and w.state_dim <= STATE_DIM_MAX
            and (w.heads * w.head_dim // w.groups) % native.LANES == 0)


def mamba2_layer(projected_TW: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
                 state_SHPN: torch.Tensor, runs: Runs,
                 layer: int = 0) -> torch.Tensor:
    w = weights
    inner = w.heads * w.head_dim
    out_TC = torch.empty((projected_TW.shape[0], inner), dtype=projected_TW.dtype)
    log(projected_TW.dtype, w, window_SCW, state_SHPN, runs, layer)
    _bound(w).run(native.runs_of(runs), native.projected_of(projected_TW), native.slots_of(window_SCW),
                  native.slots_of(state_SHPN), layer, out_TC.data_ptr())
    return out_TC


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
              state_SHPN: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor | None:
    bound = fused.bound(x_TD)
    if bound is None or not supported(x_TD, weights, window_SCW, state_SHPN):
        return None
    out_TD = fused.out(x_TD)
    log(x_TD.dtype, weights, window_SCW, state_SHPN, runs, layer)
    bound.mamba2(_bound(weights), native.runs_of(runs), native.projected_of(x_TD),
                 native.slots_of(window_SCW), native.slots_of(state_SHPN), layer, out_TD.data_ptr())
    return out_TD


def log(dtype: torch.dtype, w: Mamba2Weights, window_SCW: torch.Tensor, state_SHPN: torch.Tensor, runs: Runs,
        layer: int) -> None:
    """The next call with these states and ``runs`` copies its projection into the log of the step."""
    def replay(logged_TW: torch.Tensor, again: Runs) -> None:
        _bound(w).run(native.runs_of(again), native.projected_of(logged_TW), native.slots_of(window_SCW),
                      native.slots_of(state_SHPN), layer, 0)

    inner = w.heads * w.head_dim
    width = inner + 2 * w.groups * w.state_dim + w.heads
    native.log_projected(runs, window_SCW, width, (0, inner), dtype, replay)


def _bound(w: Mamba2Weights) -> Any:
    """The layer's C++ object, built by its first step."""
    if w.bound is None:
        w.bound = _bind(w)
    return w.bound


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


def staged(fused: FusedBlock, x_TD: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
           state_SHPN: torch.Tensor, layer: int) -> FusedLayer | None:
    if fused.bound(x_TD) is None or not supported(x_TD, weights, window_SCW, state_SHPN):
        return None
    return FusedLayer(fused, 3, _bound(weights), first=native.slots_of(window_SCW),
                  second=native.slots_of(state_SHPN), number=layer)
