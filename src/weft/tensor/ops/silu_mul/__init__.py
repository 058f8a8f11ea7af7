"""The gated activation of a SwiGLU feed-forward."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.ops.silu_mul import cpu, native


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up_TJ`` [T, 2 I], the gate's columns first -> [T, I], same dtype; silu is
    rounded to it before the product.

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    if gpu.fits(gate_up_TJ):
        from weft.tensor.kernels import silu_mul as triton
        return triton.silu_mul(gate_up_TJ)
    if native.supported(gate_up_TJ):
        return native.silu_mul(gate_up_TJ)
    return cpu.silu_mul(gate_up_TJ)


def run_fused(fused: FusedBlock, x_TD: torch.Tensor) -> torch.Tensor | None:
    """``fused.second(silu_mul(fused.first(x)))``; None if the kernels cannot fuse it."""
    return native.run_fused(fused, x_TD)


def staged(fused: FusedBlock, x_TD: torch.Tensor) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    return native.staged(fused, x_TD)
