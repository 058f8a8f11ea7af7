"""A block's two products and its core between them, as a stage of the fused decoder.

    op by op        x -> product -> core -> product -> y        three calls, three new tensors
    a fused block   x -> [ product  core  product ] -> y        no call between, the same kernels in order

It pays with few rows of x: a product streams its weights through the caches and evicts the interpreter. With many rows
that cost is negligible next to the arithmetic (csrc/fused_block.hpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.tensor import native
from weft.tensor.ops import linear
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import InTiles

MOST_ROWS = 64
"""Most rows of x: the decode batch of an ordinary server on a CPU."""

PlainWeight = torch.Tensor | InTiles | QuantizedWeight


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Projections of the same input whose forms or orders of columns differ: each is multiplied by itself, the results
    are concatenated. A quantised checkpoint leaves some as they are, and GGUF files have finer forms for some.
    """

    parts: tuple[PlainWeight, ...]

    @property
    def rows(self) -> int:
        return sum(map(rows_of, self.parts))

    @property
    def columns(self) -> int:
        first = self.parts[0]
        return first.shape[1] if isinstance(first, torch.Tensor) else first.columns


def rows_of(weight: PlainWeight | JoinedWeight) -> int:
    return weight.shape[0] if isinstance(weight, torch.Tensor) else weight.rows


@dataclass(slots=True)
class FusedBlock:
    """Two products, each a weight in any form and its bias or None. Immutable once it has run."""

    first: Any
    first_bias: torch.Tensor | None
    second: Any
    second_bias: torch.Tensor | None
    adapted: tuple[Callable[[], Any], ...] = field(default=(), repr=False, compare=False)
    """For each product, the function that returns the C++ object of its adapters."""
    _bound: Any = field(default=None, init=False, repr=False, compare=False)
    _addresses: tuple[tuple[int, ...], ...] = field(default=(), init=False, repr=False, compare=False)
    _biases: list[torch.Tensor | None] = field(default_factory=list, init=False, repr=False, compare=False)
    _adapted: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def bound(self, x_TD: torch.Tensor) -> Any:
        """Return the C++ object of this block if it can take ``x_TD`` [T, D]; else None."""
        if not (0 < x_TD.shape[0] <= MOST_ROWS and native.fits(x_TD) and x_TD.stride(1) == 1):
            return None
        if any(
            bias is not None and isinstance(weight, JoinedWeight)
            for weight, bias in ((self.first, self.first_bias), (self.second, self.second_bias))
        ):
            return None  # a bias is added to the rounded results of all parts
        addresses = tuple(
            tuple(_address(part, x_TD) for part in _parts(weight)) for weight in (self.first, self.second)
        )
        if not all(map(all, addresses)):
            return None
        # A block is bound to the addresses of its weights; they move when a server sleeps and wakes.
        if self._addresses != addresses:
            # The C++ object holds the addresses of the float32 copies, so this block keeps them.
            self._biases = [
                None if bias is None else bias.float().contiguous() for bias in (self.first_bias, self.second_bias)
            ]
            self._adapted = [give() for give in self.adapted or [native.extension().AdaptedProduct] * 2]
            self._bound = native.extension().FusedBlock(
                _product(self.first, self._biases[0], self._adapted[0]),
                _product(self.second, self._biases[1], self._adapted[1]),
            )
            self._addresses = addresses
        return self._bound

    @property
    def stays(self) -> bool:
        """Return whether the first weight still has the address to which the block was bound."""
        weight = _parts(self.first)[0]
        codes = weight.body if isinstance(weight, InTiles) else weight.codes
        return bool(codes.data_ptr() == self._addresses[0][0])


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A fused block and its core, in the fused decoder's form (csrc/fused_decoder.hpp). ``core`` is a number of
    ``Core``; the op of that core fills the other fields.
    """

    fused: FusedBlock
    core: int
    layer: Any = ()
    conv: Any = (0, 0, 0, 0)
    first: Any = (0, 0, 0)
    second: Any = (0, 0, 0)
    scales: Any = (0, 0, 0)
    number: int = 0


def _parts(weight: Any) -> tuple[Any, ...]:
    return weight.parts if isinstance(weight, JoinedWeight) else (weight,)


def _address(weight: Any, x_TD: torch.Tensor) -> int:
    """Return the weight's address; 0 for a weight that a fused block does not take."""
    if isinstance(weight, InTiles):
        return weight.body.data_ptr() if linear.tiles_fit(x_TD, weight) else 0
    if isinstance(weight, QuantizedWeight):
        widened = linear.widened(x_TD.shape[0], x_TD.dtype, weight)
        return 0 if widened or not linear.codes_fit(x_TD, weight) else weight.codes.data_ptr()
    return 0


def _product(weight: Any, bias: torch.Tensor | None, adapted: Any) -> Any:
    parts = []
    for part in _parts(weight):
        parts.append(
            (part.native(), False, 0)
            if isinstance(part, InTiles)
            else (linear.weight_of(part), part.exact, linear.order_of(part))
        )
    return parts, 0 if bias is None else bias.data_ptr(), adapted
