"""Compressed memory: recurrent states in 8 bits, rows of KV in 4. Torch alone, on any device."""

from __future__ import annotations

import torch

_NIBBLE_MAX = 15


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    """Write ``state_XN`` [..., N], of any float dtype, as ``codes_XN`` int8 [..., N] with one scale per row,
    ``scales_X`` float32 [...]: symmetric absmax rounding. No error exceeds 1/254 of the row's largest number.
    A row is a (head, key channel) of a delta net, a (head, channel) of Mamba-2, a channel of Mamba-1.
    """
    wide_XN = state_XN.float()
    scales_X.copy_(wide_XN.abs().amax(dim=-1) / 127)
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
    bounds_X2[..., 1].copy_((high_X - low_X).clamp_min_(0) / _NIBBLE_MAX)
    step_X = bounds_X2[..., 1].float()
    # A row of equal numbers has step 0: an infinite divisor gives code 0.
    steps_X = torch.where(step_X > 0, step_X, torch.inf)
    codes_XN = ((numbers_XN - low_X.unsqueeze(-1)) / steps_X.unsqueeze(-1)).round_().clamp_(0, _NIBBLE_MAX)
    codes_XH.copy_(codes_XN[..., 0::2] + 16 * codes_XN[..., 1::2])


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes_XN = torch.stack((codes_XH & 15, codes_XH >> 4), dim=-1).flatten(-2).float()
    low_X1, step_X1 = bounds_X2[..., :1].float(), bounds_X2[..., 1:].float()
    return (low_X1 + codes_XN * step_X1).to(dtype)
