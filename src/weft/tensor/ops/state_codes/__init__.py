"""Recurrent states in 8 bits: the form of compressed checkpoints."""

from __future__ import annotations

import torch

from weft.tensor.ops.state_codes import cpu


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    """Write ``state_XN`` [..., N], of any float dtype, as ``codes_XN`` int8 [..., N] with one scale per row,
    ``scales_X`` float32 [...]. The row's largest magnitude is code 127 or -127, the others are rounded to the
    nearest. So no error exceeds half a scale, 1/254 of the row's largest number. A row of zeros has scale 0.

    Source: symmetric absmax rounding, with a row per (head, key channel) of a delta net, per (head, channel)
    of Mamba-2, and per channel of Mamba-1.
    """
    cpu.encode_state(state_XN, codes_XN, scales_X)


def decode_state(codes_XN: torch.Tensor, scales_X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``codes_XN`` times the scales of their rows, [..., N] in ``dtype``."""
    return cpu.decode_state(codes_XN, scales_X, dtype)
