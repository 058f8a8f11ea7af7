"""What a vision tower is to the rest: an encoder that works in pieces and ends with the rows of one picture.

    encoder.encode(picture)     a generator
        next() ... next()       each computes a bounded piece: some hundred patches of one layer of one tile
        StopIteration.value     rows [picture.rows, D], in the order of the picture's text

Between two pieces nothing is held but the generator, so a step of decodes goes between any two of them. A
tile is computed by itself, and its pieces are cut by its own patches alone. So a picture's rows have the same
bits whatever else runs, and whenever its pieces are asked for.

The next tower is a file beside ``siglip2`` and ``qwen3_5`` that says what the place of a patch is, with rows
in ``loading`` and ``families.tensors``. A tower of other layers is a class with ``encode``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.families.vision import GeluKind
from weft.images.picture import Picture

PIECE_PATCHES = 256
"""Patches of a piece on a CPU: some 3 to 12 milliseconds of the published towers on two cores. A GPU computes
a tile at once."""


class VisionEncoder(Protocol):
    """A loaded tower."""

    def encode(self, picture: Picture) -> Generator[None, None, torch.Tensor]:
        """The rows of ``picture``, [picture.rows, hidden of the text] in the model's dtype, on its device."""
        ...


def encode_whole(encoder: VisionEncoder, picture: Picture) -> torch.Tensor:
    """All pieces, one after the other."""
    pieces = encoder.encode(picture)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


@dataclass(slots=True)
class LayerNorm:
    """Over the last dim."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class TileAttention:
    """Of queries to all of ``keys`` and ``values``, [heads, patches, head_dim] each.

    In bfloat16 on a CPU it is two products with a softmax between, in 0.55 of the time of torch's fused one.
    Scores are then rounded to bfloat16. The stream of the tower is in bfloat16 as well: the distance of its
    rows to those in float32 grows by under a hundredth."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._in_products = keys.device.type == "cpu" and keys.dtype == torch.bfloat16
        self._keys = keys.transpose(1, 2).contiguous() if self._in_products else keys
        self._values = values.contiguous()

    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        """[heads, some patches, head_dim] -> the same."""
        if not self._in_products:
            return F.scaled_dot_product_attention(queries[None], self._keys[None],
                                                  self._values[None])[0]
        scores = torch.bmm(queries * queries.shape[-1] ** -0.5, self._keys)
        return torch.bmm(scores.softmax(-1), self._values)


def gelu(x: torch.Tensor, kind: GeluKind) -> torch.Tensor:
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def piece_slices(rows: int, device: torch.device, patches: int = 1) -> Iterator[slice]:
    """The pieces of ``rows``, of which each is so many ``patches``."""
    most = max(PIECE_PATCHES // patches, 1) if device.type == "cpu" else rows
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))
