"""Rows of KV in 4 bits, two numbers per byte: the form of compressed pages with ``--compressed-kv-bits
4``."""

from __future__ import annotations

import torch

from weft.tensor.ops.nibble_codes import cpu


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    """Write ``wide_XN`` [..., N], N even, of any float dtype, as ``codes_XH`` uint8 [..., N/2]. ``bounds_X2``
    bfloat16 [..., 2] holds two numbers per row: its minimum, and the step from code to code. Numbers 2i and
    2i + 1 of a row are the low and the high half of byte i. The step is a fifteenth of the distance from a
    row's minimum to its maximum. Each number is rounded to the nearest of the 16 codes. Its error is at most
    half a step, plus the rounding of the bounds. A row of equal numbers has step 0.

    Source: asymmetric rounding with a row per channel of keys and per token of values (Liu et al., "KIVI",
    ICML 2024). A few channels of keys are far from zero for all tokens; channels of values are not.
    """
    cpu.encode_nibbles(wide_XN, codes_XH, bounds_X2)


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., N] in ``dtype``: the row's minimum plus a code's number of steps."""
    return cpu.decode_nibbles(codes_XH, bounds_X2, dtype)
