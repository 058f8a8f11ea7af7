"""quantized_linear by Triton: blocks of weights are dequantised in registers, right before the product.

    a program: (BM rows of x, BN rows of the weight)      BK columns of both at a time
    codes, scales --load, convert--> W^T [BK, BN]          x [BM, BK] @ W^T, float32; bias; one rounding

A decode is bound by reading every code once: 16 rows of x, many small programs, many stages. A prefill takes
tiles large enough that dequantising is cheap beside the product. From DENSE_ROWS rows on, the whole matrix is
dequantised first, and the product is that of torch's library: programs of 128 rows would dequantise each
block eight times and more. x is never rounded, to int8 or to fp8.

    _dense     a program: (BN rows, BK columns of the weight)      -> plain rows in the dtype of x

Rejected: a dense matrix for few rows too. In a decode that moves nine bytes for each byte of int8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launch import TYPES, Blocks, compilation_of, dense_rows
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.pages import FP8_BITS, FP8_HARDWARE, FP8_HARDWARE_OLDEST
from weft.tensor.gpu.products import product
from weft.tensor.gpu.quantized import FORMS, constants_of, form, load_right
from weft.tensor.weights.quantized import QuantizedWeight

_FEW_ROWS = 16
_SOME_ROWS = 256
DENSE_ROWS = 1024
DENSE, _DENSE_COLUMNS = Blocks(64), 128


def blocks_of(rows: int) -> tuple[int, Blocks, int]:
    """(BM, BN in Blocks, BK) for ``rows`` rows of x."""
    if rows <= _FEW_ROWS:
        return 16, Blocks(32, warps=4, stages=4), 128
    if rows <= _SOME_ROWS:
        return 64, Blocks(64, warps=4, stages=3), 64
    return 128, Blocks(64, warps=8, stages=3), 64


@triton.jit(do_not_specialize=["rows"])
def _product(x, codes, scales, zeros, bias, out, rows, columns_out, x_row, COLUMNS: tl.constexpr,
             BIAS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
             TILES: tl.constexpr, LINES: tl.constexpr, ZEROS: tl.constexpr, FP8: tl.constexpr,
             LANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """``out`` [rows, columns_out] = ``x`` [rows, COLUMNS] @ W^T + bias (float32)."""
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    first = tl.program_id(0) * BN
    depth, here = tl.arange(0, BK), row < rows
    acc = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, COLUMNS, BK):
        left = tl.load(x + row[:, None] * x_row + (begin + depth)[None, :],
                       mask=here[:, None] & (begin + depth < COLUMNS)[None, :], other=0.0)
        right = load_right(codes, scales, zeros, first, begin, BITS, GROUP, GROUPS, TILES, LINES, ZEROS, FP8,
                           LANES, BN, BK)
        acc += product(left, right.to(left.dtype))
    column = first + tl.arange(0, BN)
    within = column < columns_out
    if BIAS:
        acc += tl.load(bias + column, mask=within, other=0.0)[None, :]
    tl.store(out + row[:, None] * columns_out + column[None, :], acc.to(out.dtype.element_ty),
             mask=here[:, None] & within[None, :])


@triton.jit
def _dense(codes, scales, zeros, out, columns_out, rows_out, BITS: tl.constexpr, GROUP: tl.constexpr,
           GROUPS: tl.constexpr, TILES: tl.constexpr, LINES: tl.constexpr, ZEROS: tl.constexpr,
           FP8: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """``out`` [rows_out, columns_out]: the values of the weight."""
    first, begin = tl.program_id(0) * BN, tl.program_id(1) * BK
    wide = load_right(codes, scales, zeros, first, begin, BITS, GROUP, GROUPS, TILES, LINES, ZEROS, FP8,
                      LANES, BN, BK)
    row, column = first + tl.arange(0, BN), begin + tl.arange(0, BK)
    tl.store(out + row[:, None].to(tl.int64) * columns_out + column[None, :],
             tl.trans(wide).to(out.dtype.element_ty),
             mask=(row < rows_out)[:, None] & (column < columns_out)[None, :])


def dense(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The values, [rows, columns]."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.device)
    launch(_dense, (triton.cdiv(weight.rows, DENSE.width), triton.cdiv(weight.columns, _DENSE_COLUMNS)))(
        weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros, out,
        weight.columns, weight.rows, **constants_of(weight), BN=DENSE.width, BK=_DENSE_COLUMNS,
        num_warps=DENSE.warps)
    return out


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    x_RI = dense_rows(x.reshape(-1, weight.columns))
    rows = x_RI.shape[0]
    if rows >= DENSE_ROWS:
        return F.linear(x, dense(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if rows:
        block_rows, blocks, depth = blocks_of(rows)
        launch(_product, (triton.cdiv(weight.rows, blocks.width), triton.cdiv(rows, block_rows)))(
            x_RI, weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros,
            weight.scales if bias is None else bias, out, rows, weight.rows, x_RI.stride(0),
            COLUMNS=weight.columns, BIAS=bias is not None, **constants_of(weight), BM=block_rows,
            BN=blocks.width, BK=depth, num_warps=blocks.warps, num_stages=blocks.stages)
    return out.view(*x.shape[:-1], weight.rows)


def compilations() -> list[Compilation]:
    """A square matrix of 4096 for a decode and two sizes of prefill."""
    variants = []
    for name, dtype in TYPES.items():
        pointers = FORMS | {"x": dtype, "out": dtype, "scales": "*fp16", "bias": "*fp32"}
        for bits, group in ((8, 128), (4, 32)):
            variants.append(compilation_of(
                f"quantized linear int{bits} to {str(name).removeprefix('torch.')}", _dense, pointers,
                form(bits, 4096, 4096, group) | {"BN": DENSE.width, "BK": _DENSE_COLUMNS}, DENSE))
        for rows in (16, 256, 1000):
            block_rows, blocks, depth = blocks_of(rows)
            for bits, group in ((8, 128), (4, 32)):
                constants = {"COLUMNS": 4096, "BIAS": True, **form(bits, 4096, 4096, group), "BM": block_rows,
                             "BN": blocks.width, "BK": depth}
                variants.append(compilation_of(
                    f"quantized linear int{bits} {str(name).removeprefix('torch.')} {rows} rows", _product,
                    pointers, constants, blocks))
    return variants + _of_fp8()


def _of_fp8() -> list[Compilation]:
    """Converted by hardware, and by bits on older GPUs; one scale for a tile, and one for each row."""
    variants = []
    pointers = FORMS | {"x": "*bf16", "out": "*bf16", "scales": "*fp32", "bias": "*fp32"}
    for fp8, lanes, called in ((FP8_HARDWARE, 1, "fp8"), (FP8_BITS, 1, "fp8 by bits"),
                               (FP8_BITS, 16, "fp8 of rows by bits")):
        stored = form(8, 4096, 4096, 128, fp8=fp8, lanes=lanes)
        listed = [compilation_of(f"quantized linear {called} to bfloat16", _dense, pointers,
                                 stored | {"BN": DENSE.width, "BK": _DENSE_COLUMNS}, DENSE)]
        for rows in (16, 256, 1000):
            block_rows, blocks, depth = blocks_of(rows)
            listed.append(compilation_of(
                f"quantized linear {called} bfloat16 {rows} rows", _product, pointers,
                {"COLUMNS": 4096, "BIAS": True, **stored, "BM": block_rows, "BN": blocks.width, "BK": depth},
                blocks))
        variants += [replace(one, oldest=FP8_HARDWARE_OLDEST) if fp8 == FP8_HARDWARE else one
                     for one in listed]
    return variants
