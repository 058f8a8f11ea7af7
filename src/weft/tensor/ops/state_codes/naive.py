"""Reference of state_codes: one number at a time."""

from __future__ import annotations

import torch


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    width = state_XN.shape[-1]
    rows, codes, scales = state_XN.reshape(-1, width).tolist(), [], []
    for row in rows:
        scale = torch.tensor(max(abs(number) for number in row) / 127, dtype=torch.float32).item()
        scales.append(scale)
        codes.append([max(-127, min(127, round(number / scale))) if scale else 0 for number in row])
    codes_XN.copy_(torch.tensor(codes, dtype=torch.int8).reshape(state_XN.shape))
    scales_X.copy_(torch.tensor(scales, dtype=torch.float32).reshape(state_XN.shape[:-1]))


def decode_state(codes_XN: torch.Tensor, scales_X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    decoded = torch.empty(codes_XN.shape, dtype=torch.float64)
    for at in range(codes_XN.shape[-1]):
        decoded[..., at] = codes_XN[..., at].double() * scales_X.double()
    return decoded.to(dtype)
