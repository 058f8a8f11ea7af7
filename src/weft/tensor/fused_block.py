"""A block's two products and its core between them, in one call into the C++ kernels.

    op by op        x -> product -> core -> product -> y        three calls, three new tensors
    a fused block   x -> [ product  core  product ] -> y        one call, the same kernels in the same order

A fused block pays with few rows of x: a product streams its weights through the caches and evicts the
interpreter. With many rows that cost vanishes beside the arithmetic (csrc/fused_block.hpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops import linear
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.twelve_bit import InTiles

MOST_ROWS = 64
"""Most rows of x: the decode batch of an ordinary server on a CPU."""


@dataclass(slots=True)
class FusedBlock:
    """Two products, each a weight in any form and its bias or None. Immutable once it has run."""

    first: Any
    first_bias: torch.Tensor | None
    second: Any
    second_bias: torch.Tensor | None
    _bound: Any = field(default=None, init=False, repr=False, compare=False)
    _at: tuple[int, int] = field(default=(0, 0), init=False, repr=False, compare=False)
    _biases: list[torch.Tensor | None] = field(default_factory=list, init=False, repr=False, compare=False)

    def bound(self, x_TD: torch.Tensor) -> Any:
        """The C++ object of this block if it can take ``x_TD`` [T, D]; else None."""
        if not (0 < x_TD.shape[0] <= MOST_ROWS and native.fits(x_TD) and x_TD.stride(1) == 1):
            return None
        first, second = _address(self.first, x_TD), _address(self.second, x_TD)
        if not first or not second:
            return None
        # A block is bound to the addresses of its weights; they move when a server sleeps and wakes.
        if self._at != (first, second):
            # The C++ object holds addresses of these float32 copies, so they live as long as it.
            self._biases = [None if bias is None else bias.float().contiguous()
                            for bias in (self.first_bias, self.second_bias)]
            self._bound = native.extension().FusedBlock(_product(self.first, self._biases[0]),
                                                          _product(self.second, self._biases[1]))
            self._at = first, second
        return self._bound

    @property
    def stays(self) -> bool:
        """Whether the first weight still has the address to which the block was bound."""
        weight = self.first
        held = weight.body if isinstance(weight, InTiles) else weight.codes
        return bool(held.data_ptr() == self._at[0])

    def out(self, x_TD: torch.Tensor) -> torch.Tensor:
        return torch.empty((x_TD.shape[0], self.second.rows), dtype=x_TD.dtype)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A fused block and its core, as the fused decoder takes them (csrc/fused_decoder.hpp). ``core`` is a
    number of ``Core``; the op of that core fills the other fields."""

    fused: FusedBlock
    core: int
    layer: Any = ()
    conv: Any = (0, 0, 0, 0)
    first: Any = (0, 0, 0)
    second: Any = (0, 0, 0)
    scales: Any = (0, 0, 0)
    number: int = 0


class _Weights(Protocol):
    bound: Any
    """The C++ object, after the first step."""


W = TypeVar("W", bound=_Weights)


@dataclass(frozen=True, slots=True)
class RecurrentCore(Generic[W]):
    """How C++ computes a layer with a window and a state between its projections. ``number``: of ``Core``.
    ``name``: of the method of a fused block. ``takes``: whether the kernels serve these weights. ``bind``
    makes their C++ object. ``logged``: the columns of the projection that the log of a step copies, and the
    others, (first, count), which gate the output and reach no state. ``width``: of the output."""

    number: int
    name: str
    takes: Callable[[W], bool]
    bind: Callable[[W], Any]
    logged: Callable[[W], tuple[int, tuple[int, int]]]
    width: Callable[[W], int]

    def run(self, projected_TW: torch.Tensor, weights: W, window_SCW: torch.Tensor, state_S: torch.Tensor,
            runs: Runs, layer: int = 0) -> torch.Tensor | Unfit:
        """The C++ form of the layer's op."""
        if not self._fits(projected_TW, weights, window_SCW, state_S):
            return UNFIT
        out_TC = torch.empty((projected_TW.shape[0], self.width(weights)), dtype=projected_TW.dtype)
        self._log(projected_TW.dtype, weights, window_SCW, state_S, runs, layer)
        self._bound(weights).run(native.runs_of(runs), native.projected_of(projected_TW),
                                 native.slots_of(window_SCW), native.slots_of(state_S), layer,
                                 out_TC.data_ptr())
        return out_TC

    def run_fused(self, fused: FusedBlock, x_TD: torch.Tensor, weights: W, window_SCW: torch.Tensor,
                  state_S: torch.Tensor, runs: Runs, layer: int = 0) -> torch.Tensor | None:
        """``fused.second(the layer's op(fused.first(x), ...))``; None if the kernels cannot fuse it."""
        block = fused.bound(x_TD)
        if block is None or not self._fits(x_TD, weights, window_SCW, state_S):
            return None
        out_TD = fused.out(x_TD)
        self._log(x_TD.dtype, weights, window_SCW, state_S, runs, layer)
        getattr(block, self.name)(self._bound(weights), native.runs_of(runs), native.projected_of(x_TD),
                                  native.slots_of(window_SCW), native.slots_of(state_S), layer,
                                  out_TD.data_ptr())
        return out_TD

    def staged(self, fused: FusedBlock, x_TD: torch.Tensor, weights: W, window_SCW: torch.Tensor,
               state_S: torch.Tensor, layer: int) -> FusedLayer | None:
        """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
        if fused.bound(x_TD) is None or not self._fits(x_TD, weights, window_SCW, state_S):
            return None
        return FusedLayer(fused, self.number, self._bound(weights), first=native.slots_of(window_SCW),
                          second=native.slots_of(state_S), number=layer)

    def _fits(self, x_TD: torch.Tensor, weights: W, window_SCW: torch.Tensor, state_S: torch.Tensor) -> bool:
        return (native.fits(x_TD) and x_TD.stride(1) == 1 and state_S.dtype in native.STATE_DTYPES
                and window_SCW.dtype in native.DTYPES and self.takes(weights))

    def _log(self, dtype: torch.dtype, weights: W, window_SCW: torch.Tensor, state_S: torch.Tensor,
             runs: Runs, layer: int) -> None:
        """The next call with these states and ``runs`` copies its projection into the log of the step."""
        if runs.log is None:
            return

        def replay(logged_TW: torch.Tensor, again: Runs) -> None:
            self._bound(weights).run(native.runs_of(again), native.projected_of(logged_TW),
                                     native.slots_of(window_SCW), native.slots_of(state_S), layer, 0)

        native.log_projected(runs, window_SCW, *self.logged(weights), dtype, replay)

    def _bound(self, weights: W) -> Any:
        if weights.bound is None:
            weights.bound = self.bind(weights)
        return weights.bound


def _address(weight: Any, x_TD: torch.Tensor) -> int:
    """The weight's address; 0 for a weight that a fused block does not take."""
    if isinstance(weight, InTiles):
        return weight.body.data_ptr() if linear.tiles_fit(x_TD, weight) else 0
    if isinstance(weight, QuantizedWeight):
        widened = linear.widened(x_TD.shape[0], x_TD.dtype, weight)
        return 0 if widened or not linear.codes_fit(x_TD, weight) else weight.codes.data_ptr()
    return 0


def _product(weight: InTiles | QuantizedWeight, bias: torch.Tensor | None) -> Any:
    address = 0 if bias is None else bias.data_ptr()
    if isinstance(weight, InTiles):
        return weight.native(), address, False
    return linear.weight_of(weight), address, weight.exact
