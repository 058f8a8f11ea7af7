"""Products with weights that are not plain matrices: int8, int6 and int4 codes, float weights in tiles.

Codes in C++ (csrc/linear.hpp), and by oneDNN where that is faster:

    few rows of x     the kernel, bound by the bytes of the weights
    many rows         with byte products: the kernel, bound by those products
                      without: blocks of weights dequantised (and transposed) to the dtype of x, then torch
    a matrix unit     the kernel (csrc/code_pieces.hpp) for any number of rows in bfloat16: x is never rounded
    byte_inputs       the kernel (csrc/w8a8.hpp) for any number of rows: the form defines the arithmetic

In torch one block of weight rows after the other is dequantised and multiplied. Weights with ``byte_inputs``
are int8 times int8 on every machine, with the same bits:

    x      each row in parts of 128 columns: codes -127..127, to nearest even, and a scale, largest / 127
    sum    of a part: an integer below 2^24, which float32 represents exactly, in any order of addition
    y      sum * (scale of the weight * scale of x), part after part, then the bias: each step rounded

Weights in fp8 with ``byte_inputs`` are multiplied with x in e4m3, largest / 448. The bits of their sums are the
machine's.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.scratch import scratch
from weft.tensor.weights.quantized import PART, TILE_ROWS, ZERO_POINT, QuantizedWeight, floats_of
from weft.tensor.weights.tiles import CodedTiles, InTiles, TiledWeight

FORMS: dict[int, int] = {8: 2, 6: 8, 4: 3}
"""Bits -> their number in csrc/kernels.hpp."""
_SCALES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e8m0fnu: 4,
}
"""Dtype of scales -> its number there."""
_DIVIDED = 5
"""Number of e4m3 that a float divides."""
_BOTH = 6
"""Number of int8 with ``byte_inputs``."""
_WIDENED_ROWS = 16
"""Rows of x from which on dequantising pays without byte products."""
_BLOCK_ROWS = 512
_BLOCK_ELEMENTS = 1 << 18
_BYTE_BLOCK_ELEMENTS = 1 << 20
_LEAST = 1e-30
"""Least magnitude: a part with a smaller largest number counts as zeros, as its scale would underflow float32."""


@op("weft.tensor.kernels.quantized_linear")
def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` [..., columns] times the weight, [..., rows] in the dtype of ``x``; ``bias`` float32 [rows]. The
    weight has no order of columns (``coded_linear``).

    The C++ kernels round x to int8, with a scale per 32 columns, unless ``weight.exact`` is set or the CPU
    has no byte products. torch and Triton never round x. With ``weight.byte_inputs`` every form rounds x, by
    parts of 128 columns, to int8 or to fp8 as the weight.

    Source: Dettmers et al., 2022 (products of rounded rows); the groups of 32 are those of ggml's q8_0.
    """
    assert weight.order is None, "coded_linear puts x into the order"
    if weight.byte_inputs:
        return byte_product(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.rows)
    # A block stays in the cache between dequantising and product; a full dense matrix would cost more than the product.
    step = max(TILE_ROWS, _BLOCK_ELEMENTS // max(weight.columns, 1) // TILE_ROWS * TILE_ROWS)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        out[..., first:last] = F.linear(x, weight.dense(first, last, x.dtype))
    return out if bias is None else out.add_(bias.to(x.dtype))


@quantized_linear.in_cpp
def _quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor | Unfit:
    if not codes_fit(x, weight):
        return UNFIT
    assert weight.order is None, "coded_linear puts x into the order"
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
    native.extension().linear(
        x_RI.data_ptr(),
        x_RI.stride(0),
        native.DTYPES[x.dtype],
        rows,
        weight_of(weight),
        0 if bias is None else bias.data_ptr(),
        weight.exact,
        out.data_ptr(),
        False,
    )
    return out.view(*x.shape[:-1], weight.rows)


def coded_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``quantized_linear`` of ``x``, whose columns are first put into the order of ``weight``, if it has one."""
    if weight.order is None:
        return quantized_linear(x, weight, bias)
    return quantized_linear(take_columns(x, weight.order), weight.in_memory_order(), bias)


@op()
def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [..., columns] with column ``order[i]``, int32 [columns], at place i: a copy."""
    return x.index_select(-1, order)


@take_columns.in_cpp
def _take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor | Unfit:
    if not native.fits(x):
        return UNFIT
    x_RI = x.reshape(-1, x.shape[-1])
    x_RI = x_RI if x_RI.stride(1) == 1 else x_RI.contiguous()
    assert order.dtype == torch.int32
    assert order.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.extension().take_columns(native.projected_of(x_RI), order.data_ptr(), order.shape[0], out.data_ptr())
    return out


def codes_fit(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Return whether the C++ form takes ``x`` and ``weight``."""
    return native.in_use() and not weight.fp8 and x.device.type == "cpu" and x.dtype in (*native.DTYPES, torch.float16)


def weight_of(weight: QuantizedWeight) -> Any:
    """Return the arguments of the extension. For a stack they are of its first weight; others follow it in memory."""
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    form = _BOTH if weight.byte_inputs else FORMS[weight.bits]
    of_rows = weight.block_scales is not None and weight.block_scales.dtype == torch.float32
    of_blocks = _at(weight.block_scales)
    return (
        weight.codes.data_ptr(),
        form,
        weight.columns,
        weight.rows,
        weight.scales.data_ptr(),
        _DIVIDED if weight.divides else _SCALES[weight.scales.dtype],
        _at(weight.zeros),
        weight.group,
        0,
        (
            _at(weight.minimums),
            0 if of_rows else of_blocks,
            _at(weight.block_minimums),
            of_blocks if of_rows else 0,
            _at(weight.table),
            weight.signed,
            order_of(weight),
        ),
    )


def order_of(weight: QuantizedWeight) -> int:
    """Return the address of the order of columns, 0 without one."""
    assert weight.order is None or weight.order.dtype == torch.int32
    return _at(weight.order)


def _at(numbers: torch.Tensor | None) -> int:
    assert numbers is None or numbers.is_contiguous()
    return 0 if numbers is None else numbers.data_ptr()


def widened(rows: int, dtype: torch.dtype, weight: QuantizedWeight) -> bool:
    """Return whether oneDNN multiplies ``rows`` rows of x by dequantised blocks.

    An x86 CPU without byte products (only AVX2) never does: a row of x would get other bits in a prompt than in a
    decode.
    """
    if rows < _WIDENED_ROWS or weight.byte_inputs or by_matrix_unit(dtype):
        return False
    if native.extension().has_byte_products():
        return weight.exact
    return not _is_x86()


def by_matrix_unit(dtype: torch.dtype) -> bool:
    """Return whether codes are multiplied with x as bfloat16, in the order of a matrix unit, for any number of rows."""
    return (
        dtype == torch.bfloat16
        and native.matrix_unit() != "none"
        and "x86_64_v4" in native.extension().instruction_set()
    )


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether the CPU has products of bfloat16. Otherwise oneDNN emulates them: on a Zen 3 at a 70th of the
    speed of float32 products."""
    if not _is_x86():
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _widened(x_RI: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return ``x_RI`` times blocks of dequantised rows: in float32 on a CPU that only emulates products of bfloat16."""
    out = x_RI.new_empty(x_RI.shape[0], weight.rows)
    if x_RI.dtype == torch.bfloat16 and not _multiplies_bfloat16():
        x_RI = x_RI.float()
    block_IR = scratch.take("quantized_linear.block", (weight.columns, _BLOCK_ROWS), x_RI.dtype)
    for first in range(0, weight.rows, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, weight.rows)
        native.extension().widen_weight(
            weight_of(weight), first, last, _BLOCK_ROWS, native.DTYPES[x_RI.dtype], block_IR.data_ptr()
        )
        out[:, first:last] = x_RI @ block_IR[:, : last - first]
    return out


def byte_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    codes_PRK, scales_PR = rounded_inputs(x.reshape(-1, weight.columns), fp8=weight.fp8)
    out = scales_PR.new_empty(scales_PR.shape[1], weight.rows)
    step = max(TILE_ROWS, _BYTE_BLOCK_ELEMENTS // max(weight.columns, 1) // TILE_ROWS * TILE_ROWS)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        block = weight.by_rows(first, last)
        values = (block.codes.view(torch.float8_e4m3fn).float() if weight.fp8 else block.codes.float() - ZERO_POINT[8])[
            : last - first, : weight.columns
        ]
        values_NPK = in_parts(values)
        total = out[:, first:last].zero_()
        for part, (codes, scales) in enumerate(zip(codes_PRK, scales_PR, strict=True)):
            both = floats_of(block.scales)[: last - first, part * PART // weight.group] * scales[:, None]
            # Scale times scale first, then the sum: the order of the C++ kernel, whose bits these are.
            total += (codes @ values_NPK[:, part].T).mul_(both)
    return (out if bias is None else out.add_(bias)).to(x.dtype).view(*x.shape[:-1], weight.rows)


def rounded_inputs(x_RI: torch.Tensor, *, fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [parts, R, 128] and scales [parts, R], both float32. A part with a non-finite number has codes 0
    and a scale of NaN. ``fp8``: codes are numbers of e4m3, not integers.
    """
    x_PRK = in_parts(x_RI.float()).transpose(0, 1)
    reach = x_PRK.abs().amax(-1, keepdim=True)
    finite = reach.isfinite()  # the maximum of numbers with a NaN is NaN
    some = finite & (reach >= _LEAST)
    most = 448 if fp8 else 127
    exact = x_PRK * torch.full_like(reach, most).div_(reach)  # torch computes 127 / reach through 1 / reach
    codes = torch.where(some, exact.to(torch.float8_e4m3fn).float() if fp8 else exact.round_(), 0)
    scales = torch.where(some, reach / most, torch.where(finite, 0.0, torch.nan))
    return codes, scales.squeeze(-1)


def in_parts(x_RI: torch.Tensor) -> torch.Tensor:
    """Return [R, parts, 128] of [R, columns], filled with zeros."""
    parts = -(-x_RI.shape[1] // PART)
    return F.pad(x_RI, (0, parts * PART - x_RI.shape[1])).view(x_RI.shape[0], parts, PART)


@op("weft.tensor.kernels.dense_linear")
def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x`` [..., columns] times a plain ``weight`` [rows, columns], [..., rows] in their dtype; ``bias``
    [rows].
    """
    return F.linear(x, weight, bias)


def product_parts(x_TI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [splits, T, rows], whose sum, first part first and rounded once, is ``dense_linear``; for operands
    that ``few_rows`` takes.
    """
    from weft.tensor.kernels.dense_linear import parts_of  # triton, which may be missing

    return parts_of(x_TI, weight)


@op()
def tiled_linear(
    x: torch.Tensor, weight: InTiles, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x`` [..., columns] times the weight, [..., rows] in the dtype of ``x``; ``bias`` [rows]. Sums are
    float32. ``out``: a dense tensor that the kernel may write.
    """
    # Slow: it lays the rows out again for each product. It serves another dtype of x, and kernels that were
    # switched off after loading.
    return F.linear(x, weight.dense().to(x.dtype), bias if bias is None else bias.to(x.dtype))


@tiled_linear.in_cpp
def _tiled_linear(
    x: torch.Tensor, weight: InTiles, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | Unfit:
    if not tiles_fit(x, weight):
        return UNFIT
    columns = x.shape[-1]
    assert weight.columns == columns
    x_RI = x if x.ndim == 2 else x.reshape(-1, columns)
    if x_RI.stride(1) != 1:
        x_RI = x_RI.contiguous()
    # The kernel adds the bias to float32 sums, before the one rounding.
    bias = None if bias is None else bias.float().contiguous()
    rows = x_RI.shape[0]
    if out is None:
        out = torch.empty((rows, weight.rows), dtype=x.dtype)
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert out.numel() == rows * weight.rows
    native.extension().linear(
        x_RI.data_ptr(),
        x_RI.stride(0),
        native.DTYPES[x.dtype],
        rows,
        weight.native(),
        0 if bias is None else bias.data_ptr(),
        False,
        out.data_ptr(),
        False,
    )
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.rows)


def tiles_fit(x: torch.Tensor, weight: InTiles) -> bool:
    """Return whether the C++ form (csrc/tiles.hpp) takes ``x`` and ``weight``."""
    if not native.in_use() or x.dtype != weight.dtype or not x.is_cpu:
        return False
    if isinstance(weight, CodedTiles):
        return bool(native.extension().has_coded_tiles())
    # A sealed twelve-bit weight has no other reader than these kernels.
    return isinstance(weight, TiledWeight) or bool(native.extension().has_twelve_bit_products())
