"""LFM2's short convolution between its two projections: gate, convolution, gate."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.short_conv import native, unfused
from weft.tensor.state_rows import restored


def short_conv(projected_TJ: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
               window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    """``C * conv(B * x)`` [T, C] of ``projected_TJ`` [T, 3 C], columns B, C, x.

    Weights, window and runs as in ``causal_conv``; the window holds B * x. Each product and the convolution
    are rounded to the dtype of ``projected_TJ``.

    Source: transformers ``Lfm2ShortConv``.
    """
    if gpu.fits(projected_TJ, weight_CK, window_SCW):
        from weft.tensor.kernels import causal_conv as triton

        if runs.log is not None:
            def replay(logged_TJ: torch.Tensor, again: Runs) -> torch.Tensor:
                return short_conv(logged_TJ, weight_CK, bias_C, window_SCW, again)

            runs.log.note(replay, projected_TJ)
        b, c, x = projected_TJ.chunk(3, dim=-1)
        with restored(window_SCW, runs):
            return triton.convolve(x, b, c, weight_CK, bias_C, window_SCW, runs, silu=False)
    if native.supported(projected_TJ, weight_CK, window_SCW):
        return native.short_conv(projected_TJ, weight_CK, bias_C, window_SCW, runs)
    return unfused.short_conv(projected_TJ, weight_CK, bias_C, window_SCW, runs)


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
              window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor | None:
    """``fused.second(short_conv(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    return native.run_fused(fused, x_TD, weight_CK, bias_C, window_SCW, runs)


def staged(fused: FusedBlock, x_TD: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
           window_SCW: torch.Tensor) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    return native.staged(fused, x_TD, weight_CK, bias_C, window_SCW)
