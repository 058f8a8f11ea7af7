"""Activation functions of feed-forward layers, and the gated one of SwiGLU (csrc/elementwise.inl)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.op import UNFIT, Unfit, op

Activation = Literal["silu", "gelu", "relu2"]
"""By the name in an ``Architecture``."""


def activate(x: torch.Tensor, name: Activation) -> torch.Tensor:
    """Elementwise, in the dtype of ``x``: silu, gelu (the exact one, by erf), or the square of relu."""
    if name == "silu":
        return F.silu(x)
    if name == "gelu":
        return F.gelu(x)
    return F.relu(x).square()


@op("weft.tensor.kernels.silu_mul")
def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up_TJ`` [T, 2 I], the gate's columns first -> [T, I], same dtype; silu is
    rounded to it before the product.

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    # The activation is stored before the product, as torch does: one bit of bfloat16 would differ.
    gate, up = gate_up_TJ.chunk(2, dim=-1)
    return F.silu(gate) * up


@silu_mul.in_cpp
def _silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor | Unfit:
    if not (native.fits(gate_up_TJ) and gate_up_TJ.ndim == 2 and gate_up_TJ.stride(1) == 1
            and gate_up_TJ.shape[1] % (2 * native.LANES) == 0):
        return UNFIT
    tokens, both = gate_up_TJ.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up_TJ.dtype)
    native.extension().silu_mul(gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), tokens, both // 2,
                                native.DTYPES[gate_up_TJ.dtype], out.data_ptr())
    return out


def run_fused(fused: FusedBlock, x_TD: torch.Tensor) -> torch.Tensor | None:
    """``fused.second(silu_mul(fused.first(x)))``; None if the kernels cannot fuse it."""
    bound = fused.bound(x_TD)
    if bound is None or fused.second.columns % native.LANES:
        return None
    assert fused.first.rows == 2 * fused.second.columns
    out_TD = fused.out(x_TD)
    # A fused block is called for what it writes: `first` must give both halves of the columns.
    bound.swiglu(native.projected_of(x_TD), out_TD.data_ptr())
    return out_TD


def staged(fused: FusedBlock, x_TD: torch.Tensor) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    if fused.bound(x_TD) is None or fused.second.columns % native.LANES:
        return None
    return FusedLayer(fused, 0)
