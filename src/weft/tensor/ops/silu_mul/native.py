"""silu_mul by ``csrc/elementwise.inl``."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer


def supported(gate_up_TJ: torch.Tensor) -> bool:
    return (native.fits(gate_up_TJ) and gate_up_TJ.ndim == 2 and gate_up_TJ.stride(1) == 1
            and gate_up_TJ.shape[1] % (2 * native.LANES) == 0)


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    tokens, both = gate_up_TJ.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up_TJ.dtype)
    native.extension().silu_mul(gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), tokens, both // 2,
                                native.DTYPES[gate_up_TJ.dtype], out.data_ptr())
    return out


def run_fused(fused: FusedBlock, x_TD: torch.Tensor) -> torch.Tensor | None:
    bound = fused.bound(x_TD)
    if bound is None or fused.second.columns % native.LANES:
        return None
    assert fused.first.rows == 2 * fused.second.columns
    out_TD = fused.out(x_TD)
    bound.swiglu(native.projected_of(x_TD), out_TD.data_ptr())
    return out_TD


def staged(fused: FusedBlock, x_TD: torch.Tensor) -> FusedLayer | None:
    if fused.bound(x_TD) is None or fused.second.columns % native.LANES:
        return None
    return FusedLayer(fused, 0)
