"""quantized_linear in torch: one block of weight rows after the other is dequantised and multiplied.

A block is small enough to stay in the cache between the two steps. Fresh tensors of a whole matrix would cost
more than the product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.weights.quantized import TILE_ROWS, QuantizedWeight

_BLOCK_ELEMENTS = 1 << 18


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], weight.rows)
    step = max(TILE_ROWS, _BLOCK_ELEMENTS // max(weight.columns, 1) // TILE_ROWS * TILE_ROWS)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        out[..., first:last] = F.linear(x, weight.dense(first, last, x.dtype))
    return out if bias is None else out.add_(bias.to(x.dtype))
