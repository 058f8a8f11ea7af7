"""A product with weights in int8 or int4: ``y = x W^T + bias``."""

from __future__ import annotations

import torch

from weft.tensor.ops.quantized_linear import cpu, native
from weft.tensor.quantized import QuantizedWeight


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    """``x`` [..., columns] -> [..., rows] in the dtype of ``x``; ``bias`` float32 [rows].

    The kernels round x to int8 on the way, with a scale for each 32 columns, unless ``weight.exact`` (or the
    CPU has no byte products); the torch path never does. A row of x gives the same bits whatever rows are
    beside it where x is rounded.

    Source: Dettmers et al., 2022 (products of rounded rows); the groups of 32 are those of ggml's q8_0.
    """
    if native.supported(x, weight):
        return native.quantized_linear(x, weight, bias)
    return cpu.quantized_linear(x, weight, bias)
