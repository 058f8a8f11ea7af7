"""Rows of KV in 4 bits, two numbers to a byte: what compressed pages are kept in where that is asked for."""

from __future__ import annotations

import torch

from weft.tensor.ops.nibble_codes import cpu


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    """Write ``wide_XN`` [..., N], N even, of any float dtype, as ``codes_XH`` uint8 [..., N/2] with two
    numbers for each row, ``bounds_X2`` bfloat16 [..., 2]: its least one, and the step from code to code.
    Numbers 2i and 2i + 1 of a row are the low and the high half of byte i. The step is a fifteenth of the way
    from the least number of the row to its largest, and each number is rounded to the nearest of the 16
    codes: none is off by more than half a step and what rounding the bounds moves it. A row of equal numbers
    has step 0.

    Source: asymmetric rounding with a row for each channel of keys and each token of values (Liu et al.,
    "KIVI", ICML 2024): a few channels of keys are far from zero for all tokens, and those of values are not.
    """
    cpu.encode_nibbles(wide_XN, codes_XH, bounds_X2)


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in ``dtype``: the least number of the row and a code's number of steps."""
    return cpu.decode_nibbles(codes_XH, bounds_X2, dtype)
