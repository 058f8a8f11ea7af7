"""silu_mul by ``csrc/elementwise.inl``."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.fused_block import Chain, Staged


def supported(gate_up_TJ: torch.Tensor) -> bool:
    return (native.fits(gate_up_TJ) and gate_up_TJ.ndim == 2 and gate_up_TJ.stride(1) == 1
            and gate_up_TJ.shape[1] % (2 * native.LANES) == 0)


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    tokens, both = gate_up_TJ.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up_TJ.dtype)
    native.extension().silu_mul(gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), tokens, both // 2,
                                native.DTYPES[gate_up_TJ.dtype], out.data_ptr())
    return out


def chained(chain: Chain, x_TD: torch.Tensor) -> torch.Tensor | None:
    bound = chain.bound(x_TD)
    if bound is None or chain.second.columns % native.LANES:
        return None
    assert chain.first.rows == 2 * chain.second.columns
    out_TD = chain.out(x_TD)
    bound.swiglu(native.projected_of(x_TD), out_TD.data_ptr())
    return out_TD


def staged(chain: Chain, x_TD: torch.Tensor) -> Staged | None:
    if chain.bound(x_TD) is None or chain.second.columns % native.LANES:
        return None
    return Staged(chain, 0)
