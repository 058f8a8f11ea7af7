"""Add to the residual stream, and normalise the sum."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.add_norm import native, unfused


def add_norm(x_TD: torch.Tensor, y_TD: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float = 1.0,
             plus_one: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + scale y`` and its ``rms_norm``, both [T, D] in the dtype of ``x_TD``. The sum overwrites
    ``y_TD``; ``x_TD`` is not changed.

    Both inputs have one dtype; the product (for a ``scale`` other than 1) and the sum are rounded to it.
    ``weight``, ``eps``, ``plus_one`` as in ``rms_norm``.
    """
    if gpu.fits(x_TD, y_TD, weight):
        from weft.tensor.kernels import add_norm as triton
        if triton.supported(x_TD, y_TD):
            return triton.add_norm(x_TD, y_TD, weight, eps, scale=scale, plus_one=plus_one)
    if native.supported(x_TD, y_TD, weight):
        return native.add_norm(x_TD, y_TD, weight, eps, scale=scale, plus_one=plus_one)
    return unfused.add_norm(x_TD, y_TD, weight, eps, scale=scale, plus_one=plus_one)
