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
from weft.tensor.ops.linear import Weight

MOST_ROWS = 64
"""Most rows of x: the decode batch of an ordinary server on a CPU."""


@dataclass(slots=True)
class FusedBlock:
    """Two products, each a weight and its bias or None. Immutable once it has run."""

    first: Weight
    first_bias: torch.Tensor | None
    second: Weight
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
            bias is not None and len(weight.parts) > 1
            for weight, bias in ((self.first, self.first_bias), (self.second, self.second_bias))
        ):
            return None  # a bias is added to the rounded results of all parts
        addresses = self.first.addresses(x_TD), self.second.addresses(x_TD)
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
        return self.first.body.data_ptr() == self._addresses[0][0]


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


def _product(weight: Weight, bias: torch.Tensor | None, adapted: Any) -> Any:
    parts = [
        (part.native(), part.exact, native.address_of(part.order)) for part in weight.parts if isinstance(part, Weight)
    ]
    return parts, native.address_of(bias), adapted
