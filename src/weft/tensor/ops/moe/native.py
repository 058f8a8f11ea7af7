"""moe by the C++ kernels, without a loop over experts in Python.

    tiles       csrc/moe_tiles.inl     any number of tokens: float experts wherever tiles serve
    quantised   csrc/moe.inl           any number of tokens
    rows        csrc/moe.inl           few tokens for each expert; for many, the loop of ``cpu`` costs nothing
                                       beside its products, and oneDNN computes them faster
"""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.activation import Activation
from weft.tensor.ops.moe.weights import ExpertWeights, count_of
from weft.tensor.ops.quantized_linear import native as quantized
from weft.tensor.weights.expert_tiles import ExpertTiles
from weft.tensor.weights.quantized import LINE, TILE_ROWS, QuantizedWeight

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "relu2": 2}
_FLOAT_FORMS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
"""Dtype -> its number among the forms of weights in csrc/kernels.hpp."""
_FEW_ROWS = 8
"""Most rows per expert, on average, for which the kernel is faster with float weights."""


def supported(x_TD: torch.Tensor, ids_TX: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    if not native.fits(x_TD) or not x_TD.shape[0]:
        return False
    if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
        return (not gate_up.fp8 and not down.fp8 and down.columns % TILE_ROWS == 0
                and down.rows % TILE_ROWS == 0)
    if isinstance(gate_up, ExpertTiles) and isinstance(down, ExpertTiles):
        twelve_bit = gate_up.has_twelve_bits or down.has_twelve_bits
        return (x_TD.dtype == gate_up.dtype == down.dtype
                and (not twelve_bit or bool(native.extension().has_twelve_bit_products())))
    return (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
            and native.fits(x_TD, gate_up, down) and x_TD.dtype in _FLOAT_FORMS
            and gate_up.shape[2] % LINE == 0 and down.shape[2] % LINE == 0
            and ids_TX.numel() <= _FEW_ROWS * gate_up.shape[0])


def moe(x_TD: torch.Tensor, expert_ids_TX: torch.Tensor, expert_weights_TX: torch.Tensor,
        gate_up_EJD: ExpertWeights, down_EDI: ExpertWeights, *, activation: Activation = "silu",
        gated: bool = True) -> torch.Tensor:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    ids, weights = expert_ids_TX.contiguous(), expert_weights_TX.float().contiguous()
    assert ids.dtype == torch.int64
    gate_up, down = _weight_of(gate_up_EJD), _weight_of(down_EDI)
    tables = [weights.table.data_ptr() if isinstance(weights, ExpertTiles) else 0
              for weights in (gate_up_EJD, down_EDI)]
    exact = isinstance(gate_up_EJD, QuantizedWeight) and gate_up_EJD.exact
    out_TD = x_TD.new_empty(x_TD.shape)
    native.extension().moe(x_TD.data_ptr(), x_TD.stride(0), native.DTYPES[x_TD.dtype], *ids.shape,
                           count_of(gate_up_EJD), ids.data_ptr(), weights.data_ptr(), gate_up, down, *tables,
                           _ACTIVATIONS[activation], gated, exact, out_TD.data_ptr())
    return out_TD


def _weight_of(weights: ExpertWeights) -> Any:
    if isinstance(weights, QuantizedWeight):
        return quantized.weight_of(weights)
    if isinstance(weights, ExpertTiles):
        return weights.native()
    assert weights.is_contiguous()
    _, rows, columns = weights.shape
    return weights.data_ptr(), _FLOAT_FORMS[weights.dtype], columns, rows, 0, False, 0, LINE, 0
