"""A product with float weights in tiles: ``y = x W^T + bias``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.ops.tiled_linear import native
from weft.tensor.weights.twelve_bit import InTiles


def tiled_linear(x: torch.Tensor, weight: InTiles, bias: torch.Tensor | None = None,
                 out: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [..., columns] -> [..., rows] in the dtype of ``x``; ``bias`` [rows]. Sums are float32. ``out``:
    a dense tensor that the kernel may write.

    Without the kernel (another dtype of x, or kernels switched off after loading) the rows are laid out again
    for each product. That is slow, and exists only so that nothing fails.
    """
    if native.supported(x, weight):
        return native.tiled_linear(x, weight, bias, out)
    return F.linear(x, weight.dense().to(x.dtype), bias if bias is None else bias.to(x.dtype))
