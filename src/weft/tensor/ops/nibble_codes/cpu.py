"""nibble_codes in torch."""

from __future__ import annotations

import torch

_CODE_MAX = 15


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    numbers_XN = wide_XN.float()
    low_X, high_X = numbers_XN.aminmax(dim=-1)
    bounds_X2[..., 0].copy_(low_X)
    low_X = bounds_X2[..., 0].float()
    bounds_X2[..., 1].copy_((high_X - low_X).clamp_min_(0) / _CODE_MAX)
    step_X = bounds_X2[..., 1].float()
    steps_X = torch.where(step_X > 0, step_X, torch.inf)
    codes_XN = ((numbers_XN - low_X.unsqueeze(-1)) / steps_X.unsqueeze(-1)).round_().clamp_(0, _CODE_MAX)
    codes_XH.copy_(codes_XN[..., 0::2] + 16 * codes_XN[..., 1::2])


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes_XN = torch.stack((codes_XH & 15, codes_XH >> 4), dim=-1).flatten(-2).float()
    low_X1, step_X1 = bounds_X2[..., :1].float(), bounds_X2[..., 1:].float()
    return (low_X1 + codes_XN * step_X1).to(dtype)
