"""Positions at the embedding: a row of a table is added to each token's row (GPT-2, OPT).

Sources: transformers ``GPT2Model``, ``OPTLearnedPositionalEmbedding``, ``XGLMSinusoidalPositionalEmbedding``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from weft.families.residuals import Positions
from weft.models.block_reader import BlockReader
from weft.models.layer import LayerStep, ResidualStream

_SLOWEST = 10_000.0
"""Largest wave length of the sinusoids, over 2 pi."""


@dataclass(slots=True)
class AddedPositions:
    """Block that adds row ``first`` + position of ``rows_PD`` to the stream."""

    rows_PD: torch.Tensor
    first: int

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        places_T = step.inputs.positions_T.clamp_min(0) + self.first  # PAD rows read any
        stream.x_TD = stream.summed() + self.rows_PD[places_T].to(stream.x_TD.dtype)


def read_positions(read: BlockReader, shape: Positions) -> AddedPositions:
    name = read.architecture.names.positions
    if shape.sinusoids:
        read.source.leave(f"{name}.weights")
        rows_PD = sinusoids(shape.rows, read.hidden).to(read.source.device, read.source.dtype)
    else:
        rows_PD = read.table(shape.table(read.hidden), name).tensor("rows")
    return AddedPositions(rows_PD, shape.first)


def sinusoids(rows: int, width: int) -> torch.Tensor:
    """Return float32 [rows, width]: sines, then cosines, of row times frequencies from 1 down to 1 / _SLOWEST."""
    half = width // 2
    frequencies_F = torch.exp(torch.arange(half).float() * (-math.log(_SLOWEST) / (half - 1)))
    angles_PF = torch.arange(rows).float()[:, None] * frequencies_F
    rows_PD = torch.cat((angles_PF.sin(), angles_PF.cos()), dim=1)
    return torch.nn.functional.pad(rows_PD, (0, width - 2 * half))
