"""A Mamba-2 layer between its two projections: convolution, state space, gated norm."""

from __future__ import annotations

import torch

from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.mamba2_layer import native, unfused
from weft.tensor.ops.mamba2_layer.unfused import Mamba2Weights

__all__ = ["Mamba2Weights", "mamba2_layer", "run_fused", "staged"]


def mamba2_layer(projected_TW: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
                 state_SHPN: torch.Tensor, runs: Runs,
                 layer: int = 0) -> torch.Tensor:
    """``projected_TW`` [T, W]: output of the input projection, columns gate, x, B, C, dt. Returns the input
    [T, heads * P] of the output projection.

        x B C <- silu(conv(x B C))      y = mamba2(x, dt, A, B, C, D)
        norm(y silu(gate)) or norm(y) silu(gate), over groups; without a norm y silu(gate)

    ``window_SCW``, ``state_SHPN`` and ``layer`` as in ``causal_conv`` and ``mamba2``: read before each run,
    written after it and at taps. Values between the ops are rounded to the dtype of ``projected_TW``.

    Source: Mamba-2 (Dao and Gu, 2024), transformers ``GraniteMoeHybridMambaLayer``.
    """
    if native.supported(projected_TW, weights, window_SCW, state_SHPN):
        return native.mamba2_layer(projected_TW, weights, window_SCW, state_SHPN, runs, layer)
    return unfused.mamba2_layer(projected_TW, weights, window_SCW, state_SHPN, runs, layer)


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
              state_SHPN: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor | None:
    """``fused.second(mamba2_layer(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    return native.run_fused(fused, x_TD, weights, window_SCW, state_SHPN, runs, layer)


def staged(fused: FusedBlock, x_TD: torch.Tensor, weights: Mamba2Weights, window_SCW: torch.Tensor,
           state_SHPN: torch.Tensor, layer: int) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    return native.staged(fused, x_TD, weights, window_SCW, state_SHPN, layer)
