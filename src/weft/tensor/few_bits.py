"""Numbers in few bits, with one rule for every kernel: keys and values of a page, cached states and KV.

    page dtype     stored                                  read as            bytes per number (D = 128)
    float32        k                                       k                  4
    bfloat16       k, rounded                              k                  2
    float16        k, rounded, at most 65,504              k                  2
    float8_e4m3    k / head scale, rounded, at most 448    x head scale       1
    int8           round(k / token scale)                  x token scale      1 + 2 / D

A finite number is stored as a finite number; NaN stays NaN, so that a broken model is visible.

**Head scales** (fp8) are powers of two, one for K and one for V of each KV head, constant for the life of the process.
The block that owns the head divides its keys and values, and multiplies the query and the output: all three are exact.
A finer scale would gain nothing, because fp8 is a floating format.

**Token scales** (int8) are bfloat16, largest / 127 of each token and head, stored in the page next to the numbers.
They factor out of both sums. A token never depends on others, so shared, copied and rewritten pages stay equal.

**Codes** are the forms of cached entries: states in 8 bits, rows of KV in 4. Only in torch, on any device.
"""

from __future__ import annotations

import torch

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}
"""Largest number of the dtypes with a smaller range than a model's; larger numbers saturate to it."""
INT8_MAX = 127.0
PER_INT8_MAX = 1.0 / 127.0
"""Factor from the largest magnitude to the step. A factor, not a divisor: every kernel then gets the same bits."""


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in the float ``dtype`` of a page, saturated; NaN stays NaN."""
    most = LARGEST.get(dtype)
    if most is None or x.dtype == dtype:
        return x.to(dtype)
    return x.float().clamp(-most, most).to(dtype)


def quantized(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [T, H, D] and bfloat16 scales [T, H]; x is about their product. A token with a NaN or an infinity
    gets that as its scale.
    """
    wide = x_THD.float()
    scale_TH = (wide.abs().amax(-1) * PER_INT8_MAX).bfloat16()
    # A token of zeros has scale 0, and codes 0.
    over = torch.where(scale_TH == 0, 1.0, scale_TH.float())[..., None]
    # The scale is rounded to bfloat16, so a quotient may pass 127. NaN is in the scale; its codes are 0.
    whole = (wide / over).round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0)
    return whole.to(torch.int8), scale_TH


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as bytes, for copies and kernels: torch has no copy kernels for some fp8 moves."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


_NIBBLE_MAX = 15


def quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return ``x / divisor``, the same bits on every device."""
    # With a divisor that is a number of Python, torch on a GPU multiplies by 1 / divisor, a bit off at times.
    return x / x.new_full((), divisor)


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    """Write ``state_XN`` [..., N], of any float dtype, as ``codes_XN`` int8 [..., N] with one scale per row,
    ``scales_X`` float32 [...]: symmetric absmax rounding. No error exceeds 1/254 of the row's largest number.
    A row is a (head, key channel) of a delta net, a (head, channel) of Mamba-2, a channel of Mamba-1.
    """
    wide_XN = state_XN.float()
    scales_X.copy_(quotient(wide_XN.abs().amax(dim=-1), INT8_MAX))
    # A row of zeros: its scale stays 0, and its codes must not be NaN.
    steps_X = torch.where(scales_X > 0, scales_X, 1.0)
    codes_XN.copy_((wide_XN / steps_X.unsqueeze(-1)).round_().clamp_(-127, 127))


def decode_state(codes_XN: torch.Tensor, scales_X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes_XN.float() * scales_X.unsqueeze(-1)).to(dtype)


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    """Write ``wide_XN`` [..., N], N even, of any float dtype, as ``codes_XH`` uint8 [..., N/2]. ``bounds_X2``
    bfloat16 [..., 2]: each row's minimum, and the step from code to code. Numbers 2i and 2i + 1 of a row are
    the low and the high half of byte i. An error is at most half a step, plus the rounding of the bounds.

    Source: Liu et al., "KIVI" (ICML 2024): a row per channel of keys and per token of values. A few channels
    of keys are far from zero for all tokens; channels of values are not.
    """
    numbers_XN = wide_XN.float()
    low_X, high_X = numbers_XN.aminmax(dim=-1)
    bounds_X2[..., 0].copy_(low_X)
    # From here on the bounds are the rounded ones: the decoder has no others.
    low_X = bounds_X2[..., 0].float()
    bounds_X2[..., 1].copy_(quotient((high_X - low_X).clamp_min_(0), _NIBBLE_MAX))
    step_X = bounds_X2[..., 1].float()
    # A row of equal numbers has step 0: an infinite divisor gives code 0.
    steps_X = torch.where(step_X > 0, step_X, torch.inf)
    codes_XN = ((numbers_XN - low_X.unsqueeze(-1)) / steps_X.unsqueeze(-1)).round_().clamp_(0, _NIBBLE_MAX)
    codes_XH.copy_(codes_XN[..., 0::2] + 16 * codes_XN[..., 1::2])


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes_XN = torch.stack((codes_XH & 15, codes_XH >> 4), dim=-1).flatten(-2).float()
    low_X1, step_X1 = bounds_X2[..., :1].float(), bounds_X2[..., 1:].float()
    return (low_X1 + codes_XN * step_X1).to(dtype)
