"""silu_mul by ``csrc/elementwise.inl``."""

from __future__ import annotations

import torch

from weft.tensor import native


def supported(gate_up_TJ: torch.Tensor) -> bool:
    return (native.fits(gate_up_TJ) and gate_up_TJ.ndim == 2 and gate_up_TJ.stride(1) == 1
            and gate_up_TJ.shape[1] % (2 * native.LANES) == 0)


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    tokens, both = gate_up_TJ.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up_TJ.dtype)
    native.extension().silu_mul(gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), tokens, both // 2,
                                native.DTYPES[gate_up_TJ.dtype], out.data_ptr())
    return out
