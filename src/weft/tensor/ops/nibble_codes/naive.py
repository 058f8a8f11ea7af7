"""Reference of nibble_codes: one number at a time."""

from __future__ import annotations

import torch


def _bfloat16(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.bfloat16))


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    width = wide_XN.shape[-1]
    codes, bounds = [], []
    for row in wide_XN.double().reshape(-1, width).tolist():
        low = _bfloat16(min(row))
        step = _bfloat16(max(0.0, max(row) - low) / 15)
        numbers = [max(0, min(15, round((number - low) / step))) if step else 0 for number in row]
        codes.append([first + 16 * second for first, second in zip(numbers[::2], numbers[1::2], strict=True)])
        bounds.append((low, step))
    codes_XH.copy_(torch.tensor(codes, dtype=torch.uint8).reshape(codes_XH.shape))
    bounds_X2.copy_(torch.tensor(bounds).reshape(bounds_X2.shape))


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    decoded = torch.empty(*codes_XH.shape[:-1], 2 * codes_XH.shape[-1], dtype=torch.float64)
    low_X, step_X = bounds_X2[..., 0].double(), bounds_X2[..., 1].double()
    for at in range(codes_XH.shape[-1]):
        decoded[..., 2 * at] = low_X + (codes_XH[..., at] % 16).double() * step_X
        decoded[..., 2 * at + 1] = low_X + (codes_XH[..., at] // 16).double() * step_X
    return decoded.to(dtype)
