"""gated_delta_layer by ``csrc/layers.cpp``: three kernels in one call."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv.native import KERNEL_MAX, weights_of
from weft.tensor.ops.gated_delta.native import KEY_DIM_MAX
from weft.tensor.ops.gated_delta_layer.unfused import GatedDeltaWeights


def supported(projected_TW: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
              state_SHKV: torch.Tensor) -> bool:
    w = weights
    return (native.fits(projected_TW) and projected_TW.stride(1) == 1
            and state_SHKV.dtype in native.STATE_DTYPES and window_SCW.dtype in native.DTYPES
            and w.conv_CK.dtype in native.DTYPES and w.norm_V.dtype in native.DTYPES
            and w.conv_CK.shape[1] <= KERNEL_MAX and w.v_dim % native.LANES == 0
            and w.k_dim % native.LANES == 0 and w.k_dim <= KEY_DIM_MAX)


def gated_delta_layer(projected_TW: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
                      state_SHKV: torch.Tensor, runs: Runs,
                      layer: int = 0) -> torch.Tensor:
    w = weights
    out_TC = torch.empty((projected_TW.shape[0], w.heads * w.v_dim), dtype=projected_TW.dtype)
    log(projected_TW.dtype, w, window_SCW, state_SHKV, runs, layer)
    _bound(w).run(native.runs_of(runs), native.projected_of(projected_TW), native.slots_of(window_SCW),
                  native.slots_of(state_SHKV), layer, out_TC.data_ptr())
    return out_TC


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
              state_SHKV: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor | None:
    bound = fused.bound(x_TD)
    if bound is None or not supported(x_TD, weights, window_SCW, state_SHKV):
        return None
    out_TD = fused.out(x_TD)
    log(x_TD.dtype, weights, window_SCW, state_SHKV, runs, layer)
    bound.gated_delta(_bound(weights), native.runs_of(runs), native.projected_of(x_TD),
                      native.slots_of(window_SCW), native.slots_of(state_SHKV), layer, out_TD.data_ptr())
    return out_TD


def log(dtype: torch.dtype, w: GatedDeltaWeights, window_SCW: torch.Tensor, state_SHKV: torch.Tensor,
        runs: Runs, layer: int) -> None:
    """The next call with these states and ``runs`` copies its projection into the log of the step."""
    def replay(logged_TW: torch.Tensor, again: Runs) -> None:
        _bound(w).run(native.runs_of(again), native.projected_of(logged_TW), native.slots_of(window_SCW),
                      native.slots_of(state_SHKV), layer, 0)

    channels, values = w.conv_CK.shape[0], w.heads * w.v_dim
    native.log_projected(runs, window_SCW, channels + 2 * w.heads, (channels, values), dtype, replay)


def _bound(w: GatedDeltaWeights) -> Any:
    """The layer's C++ object, built by its first step."""
    if w.bound is None:
        w.bound = _bind(w)
    return w.bound


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


def staged(fused: FusedBlock, x_TD: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
           state_SHKV: torch.Tensor, layer: int) -> FusedLayer | None:
    if fused.bound(x_TD) is None or not supported(x_TD, weights, window_SCW, state_SHKV):
        return None
    return FusedLayer(fused, 2, _bound(weights), first=native.slots_of(window_SCW),
                  second=native.slots_of(state_SHKV), number=layer)
