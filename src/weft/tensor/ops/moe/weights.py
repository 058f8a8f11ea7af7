"""The matrices of experts: values [experts, rows, columns], or quantised, stacked the same way."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.ops.quantized_linear import quantized_linear
from weft.tensor.weights.quantized import TILE_ROWS, QuantizedWeight

ExpertWeights = torch.Tensor | QuantizedWeight


def count_of(weights: ExpertWeights) -> int:
    return weights.shape[0] if isinstance(weights, torch.Tensor) else weights.codes.shape[0]


def inner_of(down: ExpertWeights) -> int:
    """Numbers between the two products of an expert."""
    return down.shape[2] if isinstance(down, torch.Tensor) else down.columns


def held_in(weights: ExpertWeights) -> torch.Tensor:
    """The values, or the codes of a quantised weight."""
    return weights if isinstance(weights, torch.Tensor) else weights.codes


def in_tiles(gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether each part of a quantised weight (the gate's rows, the others) begins with a whole tile."""
    return isinstance(gate_up, torch.Tensor) or inner_of(down) % TILE_ROWS == 0


def product(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """x [..., columns] with one expert's matrix -> [..., rows]."""
    if isinstance(weights, torch.Tensor):
        return F.linear(x, weights[expert])
    return quantized_linear(x, weights.of(expert))
