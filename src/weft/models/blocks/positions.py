"""Positions at the embedding: a row of a table is added to each token's row (GPT-2, OPT).

Sources: transformers ``GPT2Model``, ``OPTLearnedPositionalEmbedding``, ``XGLMSinusoidalPositionalEmbedding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.families.residuals import Positions
from weft.models.block_reader import BlockReader
from weft.models.layer import LayerStep, ResidualStream
from weft.tensor.ops.elementwise import each

_SLOWEST = 10_000.0
"""Largest wave length of the sinusoids, over 2 pi."""
Rows = Callable[[torch.Tensor], torch.Tensor]
"""Function from places int64 [T] to the rows [T, D] that they add."""


@dataclass(slots=True)
class TableRows:
    """Rows of the table ``rows_PD``."""

    rows_PD: torch.Tensor

    def __call__(self, places_T: torch.Tensor) -> torch.Tensor:
        return self.rows_PD[places_T]


@dataclass(slots=True)
class Sinusoids:
    """Rows that are computed: sines, then cosines, of place times frequencies from 1 down to 1 / _SLOWEST."""

    width: int
    dtype: torch.dtype

    def __call__(self, places_T: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        frequencies_F = torch.exp(torch.arange(half, device=places_T.device) * (-math.log(_SLOWEST) / (half - 1)))
        angles_TF = places_T.float()[:, None] * frequencies_F
        rows_TD = torch.cat((each(torch.sin, angles_TF), each(torch.cos, angles_TF)), dim=1)
        return torch.nn.functional.pad(rows_TD, (0, self.width - 2 * half)).to(self.dtype)


@dataclass(slots=True)
class AddedPositions:
    """Block that adds the row of ``first`` + position to the stream."""

    rows: Rows
    first: int

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        places_T = step.inputs.positions_T.clamp_min(0) + self.first  # PAD rows read any
        stream.x_TD = stream.summed() + self.rows(places_T).to(stream.x_TD.dtype)


def read_positions(read: BlockReader, shape: Positions) -> AddedPositions:
    name = read.architecture.names.positions
    if shape.sinusoids:
        read.source.leave(f"{name}.weights")
        return AddedPositions(Sinusoids(read.hidden, read.source.dtype), shape.first)
    return AddedPositions(TableRows(read.table(shape.table(read.hidden), name).tensor("rows")), shape.first)
