"""A gated delta net layer between its two projections: convolution, gates, delta rule, gated norm."""

from __future__ import annotations

import torch

from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.gated_delta_layer import native, unfused
from weft.tensor.ops.gated_delta_layer.unfused import GatedDeltaWeights

__all__ = ["GatedDeltaWeights", "gated_delta_layer", "run_fused", "staged"]


def gated_delta_layer(projected_TW: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
                      state_SHKV: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor:
    """``projected_TW`` [T, W]: output of the input projection, columns q, k, v, z, b, a. Returns the input
    [T, heads * V] of the output projection.

        q k v <- silu(conv(q k v))      beta = scale sigmoid(b)      g = decay softplus(a + dt_bias)
        o = gated_delta(q, k, v, g, beta)        norm(o, per head) silu(z)

    ``window_SCW``, ``state_SHKV`` and ``layer`` as in ``causal_conv`` and ``gated_delta``: read before each
    run, written after it and at taps. Gates are float32; values between the ops are rounded to the dtype of
    ``projected_TW``.

    Source: Gated Delta Networks (Yang et al., 2024), transformers ``Qwen3NextGatedDeltaNet``.
    """
    if native.supported(projected_TW, weights, window_SCW, state_SHKV):
        return native.gated_delta_layer(projected_TW, weights, window_SCW, state_SHKV, runs, layer)
    return unfused.gated_delta_layer(projected_TW, weights, window_SCW, state_SHKV, runs, layer)


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
              state_SHKV: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor | None:
    """``fused.second(gated_delta_layer(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    return native.run_fused(fused, x_TD, weights, window_SCW, state_SHKV, runs, layer)


def staged(fused: FusedBlock, x_TD: torch.Tensor, weights: GatedDeltaWeights, window_SCW: torch.Tensor,
           state_SHKV: torch.Tensor, layer: int) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    return native.staged(fused, x_TD, weights, window_SCW, state_SHKV, layer)
