"""Interface of a vision tower: an encoder that works in pieces and ends with the rows of one picture.

    encoder.encode(picture)     a generator
        next() ... next()       each computes a bounded piece: some patches of one layer of one tile
        StopIteration.value     rows [picture.rows, D], in the order of the picture's text

Between two pieces only the generator is kept, so a step of decodes can run between any two pieces. A tile is computed
by itself, and a piece depends only on the patches of its tile. So the bits of a picture's rows do not depend on other
work, or on the time at which the pieces are computed.

The next tower is a file next to ``siglip2`` and ``qwen3_5`` that defines the places of patches, with rows in
``loading`` and ``families.tower_tensors``. A tower with other layers has its own ``TileMixer``, as ``lfm3`` has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F

from weft.images.picture import Picture
from weft.tensor.op import Op
from weft.tensor.ops.elementwise import softmax_
from weft.tensor.ops.norm import rms_norm

P = ParamSpec("P")
R = TypeVar("R")

PIECE_PATCHES = 256
"""Patches of a piece on a CPU: some 3 to 12 milliseconds of the published towers on two cores."""
GPU_PIECE_PATCHES = 8192
"""Patches of a piece on a GPU: they bound the memory between the products of a layer, and the work that waits before
a step.
"""


class VisionEncoder(Protocol):
    """A loaded tower."""

    def largest(self) -> Picture:
        """Return a black picture with the most patches that the checkpoint's settings allow in one tile."""

    def encode(self, picture: Picture) -> Generator[None, None, torch.Tensor]:
        """Yield after each piece and return the rows of ``picture``, [picture.rows, hidden of the text] in the model's
        dtype, on its device.
        """


@dataclass(slots=True)
class LayerNorm:
    """Layer norm over the last dim."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(slots=True)
class RmsNorm:
    """RMS norm over the last dim."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return plain_form(rms_norm, x)(x, self.weight, self.eps)


TowerNorm = LayerNorm | RmsNorm


class TileAttention:
    """Attention of queries to all of ``keys`` and ``values``, [heads, patches, head_dim] each.

    In bfloat16 on a CPU it is two products with a softmax between, in 0.55 of the time of torch's fused one.
    Scores are then rounded to bfloat16. The stream of the tower is in bfloat16 as well: the distance of its
    rows to those in float32 grows by under a hundredth.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._in_products = keys.device.type == "cpu" and keys.dtype == torch.bfloat16
        self._keys = keys.transpose(1, 2).contiguous() if self._in_products else keys
        self._values = values.contiguous()

    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the output [heads, some patches, head_dim] of queries of the same shape."""
        if not self._in_products:
            return F.scaled_dot_product_attention(queries[None], self._keys[None], self._values[None])[0]
        scores = softmax_(torch.bmm(queries, self._keys), queries.shape[-1] ** -0.5)
        return torch.bmm(scores, self._values)


def plain_form(op: Op[P, R], x: torch.Tensor) -> Callable[P, R]:
    """Return the form of an op over ``x``: torch's on a GPU, since the start compiles no kernels for towers."""
    return op if x.is_cpu else op.torch


def piece_patches(device: torch.device) -> int:
    """Return the patches of a piece on ``device``."""
    return PIECE_PATCHES if device.type == "cpu" else GPU_PIECE_PATCHES


def piece_slices(rows: int, device: torch.device, patches: int = 1) -> Iterator[slice]:
    """Yield the pieces of ``rows``, each of which has ``patches`` patches."""
    most = max(piece_patches(device) // patches, 1)
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))
