"""A product with float weights in tiles: ``y = x W^T + bias``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.ops.tiled_linear import native
from weft.tensor.weights.twelve_bit import InTiles


def tiled_linear(x: torch.Tensor, weight: InTiles, bias: torch.Tensor | None = None,
                 out: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [..., columns] -> [..., rows] in the dtype of ``x``; ``bias`` [rows]. Sums are float32. ``out``:
    dense, where the kernel may write it.

    Without the kernel (another dtype of x, kernels switched off since the weight was made) the rows are laid
    out anew for the one product, which is slow and only there so that nothing fails.
    """
    if native.supported(x, weight):
        return native.tiled_linear(x, weight, bias, out)
    return F.linear(x, weight.dense().to(x.dtype), bias if bias is None else bias.to(x.dtype))
