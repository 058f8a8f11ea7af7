"""Quantised matrices whose columns are ordered by group, for files that have a group's columns anywhere (act-order).

    file      columns 0 1 2 3 4 5      groups 1 0 0 1 0 1
    memory    columns 1 2 4 0 3 5      groups 0 0 0 1 1 1       order = [1 2 4 0 3 5]
    product   x[..., order] by the matrix in memory

Kernels read groups of neighbouring columns, as for other matrices. A product has the same factors as in the file's
order; only the order of its sum differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.tensor.weights.quantized import QuantizedWeight, in_stored_order, stacked


@dataclass(frozen=True, slots=True)
class OrderedWeight:
    """A weight with an order of columns. ``order`` int32 [columns]: the column of x that each column of ``weight`` is
    multiplied with. For experts both are stacked, and each has its own order.
    """

    weight: QuantizedWeight
    order: torch.Tensor

    @property
    def rows(self) -> int:
        return self.weight.rows

    @property
    def columns(self) -> int:
        return self.weight.columns

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.order.shape[:-1], self.rows, self.columns)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def form(self) -> str:
        return self.weight.form

    @property
    def held_bytes(self) -> int:
        return self.weight.held_bytes + self.order.numel() * self.order.itemsize

    def of(self, index: int) -> OrderedWeight:
        """Return weight ``index`` of a stack."""
        return OrderedWeight(self.weight.of(index), self.order[index])

    def dense(self) -> torch.Tensor:
        """Return float32 [..., rows, columns], columns in the order of x."""
        return in_stored_order(self.weight.dense(), self.order)


def stacked_in_order(weights: Sequence[QuantizedWeight | OrderedWeight]) -> QuantizedWeight | OrderedWeight:
    """Return ``stacked``, for weights that may have an order."""
    stack = stacked([weight.weight if isinstance(weight, OrderedWeight) else weight for weight in weights])
    if not any(isinstance(weight, OrderedWeight) for weight in weights):
        return stack
    places = torch.arange(stack.columns, dtype=torch.int32, device=stack.device)
    return OrderedWeight(
        stack, torch.stack([weight.order if isinstance(weight, OrderedWeight) else places for weight in weights])
    )
