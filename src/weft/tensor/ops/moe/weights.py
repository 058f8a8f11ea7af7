"""What experts' matrices may be: values [experts, rows, columns], or quantised, stacked the same way."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.ops.quantized_linear import quantized_linear
from weft.tensor.quantized import QuantizedWeight

ExpertWeights = torch.Tensor | QuantizedWeight


def count_of(weights: ExpertWeights) -> int:
    return weights.shape[0] if isinstance(weights, torch.Tensor) else weights.codes.shape[0]


def product(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """x [..., columns] with one expert's matrix -> [..., rows]."""
    if isinstance(weights, torch.Tensor):
        return F.linear(x, weights[expert])
    return quantized_linear(x, weights.of(expert))
