"""How a key or a value becomes the number that a page holds: the one rounding of KV, in whatever kernel.

    page dtype     stored                                  read as            bytes per number (D = 128)
    float32        k                                       k                  4
    bfloat16       k, rounded                              k                  2
    float16        k, rounded, at most 65,504              k                  2
    float8_e4m3    k / head scale, rounded, at most 448    x head scale       1
    int8           round(k / token scale)                  x token scale      1 + 2 / D

A finite number is stored as a finite one, whatever its size; NaN stays NaN, so that a broken model is seen.

**Head scales** (fp8) are powers of two, one for K and one for V of each KV head, for the life of the process.
So nothing but the block that owns the head knows of them: it divides what it writes, multiplies the query and
the output, and all three are exact. A finer scale would gain nothing: fp8 is a floating format, whose error
is at most 1/16 of the number wherever the number lies between 2^-6 and 448.

**Token scales** (int8) are bfloat16, largest / 127 of each token and head, in the page beside the numbers.
They factor out of both sums: a score is multiplied by its token's K scale, a weight by its token's V scale. A
token never depends on others, so neither do pages that are shared, copied or written again.

Rejected: int8 with a scale per head for good (one token with a large channel then costs all others their
digits), a scale per page (a page is written token by token, and what is written may not change).
"""

from __future__ import annotations

import torch

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}
"""Dtypes that are narrower than a model's in range too: what is larger is stored as this."""
INT8_MAX = 127.0
PER_INT8_MAX = 1.0 / 127.0
"""Multiplied, not divided by: the same bits in every kernel."""


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in the float ``dtype`` of a page, saturated; NaN stays NaN."""
    most = LARGEST.get(dtype)
    if most is None or x.dtype == dtype:
        return x.to(dtype)
    return x.float().clamp(-most, most).to(dtype)


def quantized(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [T, H, D] and bfloat16 scales [T, H], so that x is about their product. A token with a NaN or an
    infinity gets a scale that is one."""
    wide = x_THD.float()
    scale_TH = (wide.abs().amax(-1) * PER_INT8_MAX).bfloat16()
    over = torch.where(scale_TH == 0, 1.0, scale_TH.float())[..., None]
    whole = (wide / over).round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0)
    return whole.to(torch.int8), scale_TH


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x`` for being moved: torch moves bytes where it does not move fp8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
