"""The matrix product that every block is made of, and the norm between blocks.

Weights are plain tensors, never Parameters: there is no gradient, no module tree, no hook. Projections of the
same input are one ``Linear``, which reads the input once; the block splits the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.models.blocks.adapted import AdaptedProduct
from weft.tensor import native
from weft.tensor.fused_block import FusedBlock
from weft.tensor.ops.elementwise import gated_linear, silu_mul
from weft.tensor.ops.linear import Matrix, Weight, product
from weft.tensor.ops.norm import rms_norm
from weft.tensor.weights.tiles import TiledWeight, tiled


def by_head(x_TC: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [T, heads * D] as [T, heads, D]; a view if the input's strides allow one."""
    return x_TC.reshape(x_TC.shape[0], heads, x_TC.shape[1] // heads)


class Projection(Protocol):
    """Interface of a projection: x [..., in] -> [..., out]."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(slots=True)
class Linear:
    """x [..., in] -> [..., out]. ``weight`` [out, in] in any form; ``bias`` [out] or None, in float32 or the model's
    dtype, which is that of a tensor. ``adapted``: additions of adapters.
    """

    weight: Matrix
    bias: torch.Tensor | None = None
    adapted: AdaptedProduct = field(default_factory=AdaptedProduct, repr=False, compare=False)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product. ``out``: memory that a kernel may write it to."""
        y = product(x, self.weight, self.bias, out)
        return y if self.adapted.active is None else self.adapted.added(x, y)

    def gated(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, I] of this product, whose rows are those of the gate and of up."""
        if self.bias is None and self.adapted.active is None and isinstance(self.weight, Weight):
            return gated_linear(x_TD, self.weight)
        return silu_mul(self(x_TD))


@dataclass(slots=True)
class HeadLinear:
    """Product of heads, x [T, heads, in] -> [T, heads, out], by a matrix [in, out] of each head, ``weight_HIO``. If the
    kernels serve it, the matrix is in ``tiles``, where the bits of a row do not depend on the number of rows.
    """

    weight_HIO: torch.Tensor | None
    tiles: tuple[TiledWeight, ...] = ()

    @classmethod
    def of(cls, weight_HIO: torch.Tensor) -> HeadLinear:
        """Return the product with ``weight_HIO``, in the form that serves here."""
        matrices = weight_HIO.unbind() if native.in_use() else ()
        head_tiles = [tiled(matrix_IO.T.contiguous(), apart=True) for matrix_IO in matrices]
        tiles = tuple(tile for tile in head_tiles if tile is not None)
        return cls(None, tiles) if tiles else cls(weight_HIO)

    def __call__(self, x_THI: torch.Tensor) -> torch.Tensor:
        if self.weight_HIO is None:
            return torch.stack([product(x_THI[:, head], tile) for head, tile in enumerate(self.tiles)], dim=1)
        return torch.bmm(x_THI.transpose(0, 1), self.weight_HIO).transpose(0, 1)


def fused_block_of(first: Projection, second: Projection) -> FusedBlock | None:
    """Return both projections and the layer between them as one block, if they are plain products that kernels may
    serve.
    """
    if not (isinstance(first, Linear) and isinstance(second, Linear)):
        return None
    if not (isinstance(first.weight, Weight) and isinstance(second.weight, Weight)):
        return None
    return FusedBlock(
        first.weight, first.bias, second.weight, second.bias, (first.adapted.native, second.adapted.native)
    )


@dataclass(slots=True)
class LowRankGate:
    """Gate of a norm's output y by itself: y factor sigmoid(out(silu(into(y)))) (GigaChat 3.5). Products are in the
    dtype of y, values in between in float32, and the result is rounded once.
    """

    into: Linear
    out: Linear
    factor: float

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        gate = self.out(F.silu(self.into(y).float()).to(y.dtype))
        return (y.float() * torch.sigmoid(gate.float()).mul_(self.factor)).to(y.dtype)


@dataclass(slots=True)
class NormFactor:
    """NormFactor on a norm's output, rounded apart from the norm."""

    factor: float

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.factor


@dataclass(slots=True)
class Norm:
    """RMS norm over the last dim, or over groups of ``group_size`` of it. ``plus_one``: the stored weight is
    the distance from 1 (Qwen3.5). ``gate``: of its output. ``centred``: the mean is subtracted first, and ``bias``
    is added last (layer norm; Ba et al., 2016)."""

    weight: torch.Tensor
    eps: float
    plus_one: bool = False
    group_size: int | None = None
    gate: LowRankGate | NormFactor | None = None
    centred: bool = False
    bias: torch.Tensor | None = None

    @property
    def usual(self) -> bool:
        """Whether it is an RMS norm and nothing more, as the fused kernels take it."""
        return self.gate is None and not self.centred

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred:
            weight = self.weight + 1.0 if self.plus_one else self.weight
            return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
        y = rms_norm(x, self.weight, self.eps, plus_one=self.plus_one, group_size=self.group_size)
        return y if self.gate is None else self.gate(y)


@dataclass(slots=True)
class NormOfScaled:
    """RMS norm of an input that is scaled first. ``factors``: [D]; ``norm``: one whose weight is ones."""

    factors: torch.Tensor
    norm: Norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.factors)


def neighbours_apart(rows: torch.Tensor, *, head_dim: int, turned: int) -> torch.Tensor:
    """Return ``rows`` [heads x head_dim, ...]: among the first ``turned`` of each head those of even number first."""
    rows_HD = rows.view(-1, head_dim, *rows.shape[1:])
    return torch.cat((rows_HD[:, :turned:2], rows_HD[:, 1:turned:2], rows_HD[:, turned:]), dim=1).flatten(0, 1)


def by_turns(rows: torch.Tensor) -> torch.Tensor:
    """Return the first half of rows, then the second, of halves whose rows take turns."""
    return torch.cat((rows[0::2], rows[1::2]))
