"""How far a Triton kernel may be from its twin: one table for all of them.

Twins compute in float64 and round once; kernels add up in float32. In the interpreter all arithmetic is
float32, but a float32 that is stored as bfloat16 is cut off there instead of rounded: a unit of the last
place (2^-7 of the number) in place of the half that rounding leaves. Compiled, the factors of a product are
in the model's own dtype: that is what the second table is for.
"""

from __future__ import annotations

import os

import torch

COMPILED = os.environ.get("WEFT_TEST_DEVICE") == "cuda"

_INTERPRETED: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (1e-3, 1e-4),
    torch.bfloat16: (2.0**-7, 1e-4),
}
_ON_A_GPU: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 2e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


def close(dtype: torch.dtype) -> dict[str, float]:
    """rtol and atol, for ``torch.testing.assert_close``, of an output of ``dtype`` near 1."""
    rtol, atol = (_ON_A_GPU if COMPILED else _INTERPRETED)[dtype]
    return {"rtol": rtol, "atol": atol}
