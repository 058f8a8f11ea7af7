"""How keys and values are rounded to the numbers of a page: one rule for every kernel.

    page dtype     stored                                  read as            bytes per number (D = 128)
    float32        k                                       k                  4
    bfloat16       k, rounded                              k                  2
    float16        k, rounded, at most 65,504              k                  2
    float8_e4m3    k / head scale, rounded, at most 448    x head scale       1
    int8           round(k / token scale)                  x token scale      1 + 2 / D

A finite number is stored as a finite number; NaN stays NaN, so that a broken model is visible.

**Head scales** (fp8) are powers of two, one for K and one for V of each KV head, constant for the life of the
process. The block that owns the head divides what it writes, and multiplies the query and the output: all
three are exact. A finer scale would gain nothing, because fp8 is a floating format.

**Token scales** (int8) are bfloat16, largest / 127 of each token and head, stored in the page beside the
numbers. They factor out of both sums. A token never depends on others, so shared, copied and rewritten pages
stay equal.

Rejected: int8 with a constant scale per head (one token with a large channel costs all others their digits).
A scale per page: a page is written token by token, and written tokens may not change.
"""

from __future__ import annotations

import torch

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}
"""Largest number of the dtypes with a smaller range than a model's; larger numbers saturate to it."""
INT8_MAX = 127.0
PER_INT8_MAX = 1.0 / 127.0
"""A factor, not a divisor: every kernel gets the same bits."""


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in the float ``dtype`` of a page, saturated; NaN stays NaN."""
    most = LARGEST.get(dtype)
    if most is None or x.dtype == dtype:
        return x.to(dtype)
    return x.float().clamp(-most, most).to(dtype)


def quantized(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [T, H, D] and bfloat16 scales [T, H]; x is about their product. A token with a NaN or an infinity
    gets that as its scale."""
    wide = x_THD.float()
    scale_TH = (wide.abs().amax(-1) * PER_INT8_MAX).bfloat16()
    # A token of zeros has scale 0, and codes 0.
    over = torch.where(scale_TH == 0, 1.0, scale_TH.float())[..., None]
    # The scale is rounded to bfloat16, so a quotient may pass 127. NaN is in the scale; its codes are 0.
    whole = (wide / over).round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0)
    return whole.to(torch.int8), scale_TH


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x`` as bytes, for copies: torch has no copy kernels for some fp8 moves."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
