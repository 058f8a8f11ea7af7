"""Which plain products of few rows weft's own kernel computes, instead of torch's library.

    use({(rows, columns), ...})     shapes of weights, chosen once at the start (``runner.product_choice``)
    takes(x, weight)                fewer than ROWS rows of x, 16 bits, such a shape

The library chooses tiles, and how a sum is split, by the number of rows, so a row's last bits depend on the batch. The
own kernel has one order of sums for a shape, so a shape is chosen for all numbers of rows below ROWS or for none.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

ROWS = 64
"""Rows of x from which on the library multiplies."""
DTYPES = (torch.bfloat16, torch.float16)
Shape = tuple[int, int]

_shapes: frozenset[Shape] = frozenset()


def use(shapes: Collection[Shape]) -> None:
    """Choose for the entire process: weights [rows, columns] of these shapes."""
    global _shapes
    _shapes = frozenset(shapes)


def takes(x: torch.Tensor, weight: object) -> bool:
    """Return whether the own kernel multiplies ``x`` [..., columns] with ``weight`` [rows, columns]."""
    if not _shapes or not isinstance(weight, torch.Tensor):  # first: a step on a CPU asks hundreds of times
        return False
    return (
        tuple(weight.shape) in _shapes
        and weight.dtype == x.dtype
        and x.dtype in DTYPES
        and weight.is_contiguous()
        and 0 < x.numel() < ROWS * weight.shape[1]
    )
