"""The matrices of experts: values [experts, rows, columns], quantised and stacked alike, or in tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.ops.quantized_linear import quantized_linear
from weft.tensor.ops.tiled_linear import tiled_linear
from weft.tensor.weights.expert_tiles import ExpertTiles
from weft.tensor.weights.quantized import TILE_ROWS, QuantizedWeight

ExpertWeights = torch.Tensor | QuantizedWeight | ExpertTiles


def count_of(weights: ExpertWeights) -> int:
    return weights.codes.shape[0] if isinstance(weights, QuantizedWeight) else weights.shape[0]


def inner_of(down: ExpertWeights) -> int:
    """Numbers between the two products of an expert."""
    return down.columns if isinstance(down, QuantizedWeight) else down.shape[2]


def held_in(weights: ExpertWeights) -> torch.Tensor:
    """The values, the codes of a quantised weight, or the tiles of the first expert."""
    if isinstance(weights, ExpertTiles):
        return weights.experts[0].body
    return weights if isinstance(weights, torch.Tensor) else weights.codes


def in_tiles(gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether each part of a quantised weight (the gate's rows, the others) begins with a whole tile."""
    return not isinstance(gate_up, QuantizedWeight) or inner_of(down) % TILE_ROWS == 0


def product(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """x [..., columns] with one expert's matrix -> [..., rows]."""
    if isinstance(weights, torch.Tensor):
        return F.linear(x, weights[expert])
    if isinstance(weights, ExpertTiles):
        return tiled_linear(x, weights.experts[expert])
    return quantized_linear(x, weights.of(expert))
