"""quantized_linear by the C++ kernel (csrc/linear.inl), and by oneDNN where that is faster.

    few rows of x     the kernel, bound by the bytes of the weights
    many rows         with byte products: the kernel, bound by those products
                      without: blocks of weights dequantised (and transposed) to the dtype of x, then torch
    a matrix unit     the kernel (csrc/code_pieces.inl) for any number of rows in bfloat16: x is never rounded
    byte_inputs       the kernel (csrc/w8a8.inl) for any number of rows: the form defines the arithmetic
"""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.scratch import scratch
from weft.tensor.weights.quantized import QuantizedWeight

FORMS: dict[int, int] = {8: 2, 4: 3}
"""Bits -> their number in csrc/kernels.hpp."""
_BOTH = 6
"""The number of int8 with ``byte_inputs``."""
_WIDENED_ROWS = 16
"""Least rows of x for which dequantising pays without byte products."""
_BLOCK_ROWS = 512


def supported(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    return (native.in_use() and not weight.fp8 and x.device.type == "cpu"
            and x.dtype in (*native.DTYPES, torch.float16))


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    if x.dtype == torch.float16:  # no kernel computes in float16
        return quantized_linear(x.float(), weight, bias).half()
    x_RI = x.reshape(-1, weight.columns)
    if x_RI.stride(1) != 1:
        x_RI = x_RI.contiguous()
    rows = x_RI.shape[0]
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    if widened(rows, x.dtype, weight):
        out = _widened(x_RI, weight)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], weight.rows)
    out = x_RI.new_empty(rows, weight.rows)
    native.extension().linear(x_RI.data_ptr(), x_RI.stride(0), native.DTYPES[x.dtype], rows,
                              weight_of(weight), 0 if bias is None else bias.data_ptr(), weight.exact,
                              out.data_ptr())
    return out.view(*x.shape[:-1], weight.rows)


def weight_of(weight: QuantizedWeight) -> Any:
    """The arguments of the extension. Of a stack, its first weight; the others follow it in memory."""
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    form = _BOTH if weight.byte_inputs else FORMS[weight.bits]
    return (weight.codes.data_ptr(), form, weight.columns, weight.rows,
            weight.scales.data_ptr(), weight.scales.dtype == torch.float16,
            0 if weight.zeros is None else weight.zeros.data_ptr(), weight.group, 0)


def widened(rows: int, dtype: torch.dtype, weight: QuantizedWeight) -> bool:
    """Whether oneDNN multiplies ``rows`` rows of x by dequantised blocks."""
    if rows < _WIDENED_ROWS or weight.byte_inputs or by_matrix_unit(dtype):
        return False
    return weight.exact or not native.extension().has_byte_products()


def by_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether codes meet x as bfloat16, in the order of a matrix unit, for any number of rows."""
    return (dtype == torch.bfloat16 and native.matrix_unit() != "none"
            and "x86_64_v4" in native.extension().instruction_set())


def _widened(x_RI: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    out = x_RI.new_empty(x_RI.shape[0], weight.rows)
    block_IR = scratch.take("quantized_linear.block", (weight.columns, _BLOCK_ROWS), x_RI.dtype)
    for first in range(0, weight.rows, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, weight.rows)
        native.extension().widen_weight(weight_of(weight), first, last, _BLOCK_ROWS,
                                        native.DTYPES[x_RI.dtype], block_IR.data_ptr())
        out[:, first:last] = x_RI @ block_IR[:, :last - first]
    return out
