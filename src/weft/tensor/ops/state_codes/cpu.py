"""state_codes in torch."""

from __future__ import annotations

import torch


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    wide_XN = state_XN.float()
    scales_X.copy_(wide_XN.abs().amax(dim=-1) / 127)
    steps_X = torch.where(scales_X > 0, scales_X, 1.0)
    codes_XN.copy_((wide_XN / steps_X.unsqueeze(-1)).round_().clamp_(-127, 127))


def decode_state(codes_XN: torch.Tensor, scales_X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes_XN.float() * scales_X.unsqueeze(-1)).to(dtype)
