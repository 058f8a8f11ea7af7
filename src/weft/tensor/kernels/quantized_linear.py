"""quantized_linear by Triton: blocks of weights are dequantised in registers, right before the product.

    a program: (BM rows of x, BN rows of the weight)      BK columns of both at a time
    codes, scales --load, convert--> W^T [BK, BN]          x [BM, BK] @ W^T, float32; bias; one rounding

A decode is bound by reading every code once: 16 rows of x, many small programs, many stages. Up to 64 rows
columns are split over programs too (``tensor.gpu.products``), and ``_add`` adds the parts. A prefill
takes tiles large enough that dequantising is cheap beside the product. From DENSE_ROWS rows on, the whole
matrix is dequantised first, and the product is that of torch's library: programs of 128 rows would
dequantise each block eight times and more. x is never rounded, to int8 or to fp8.

    _dense     a program: (BN rows, BK columns of the weight)      -> plain rows in the dtype of x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.products import ColumnSplits, column_splits, product, sum_of_splits
from weft.tensor.gpu.quantized import constants_of, load_right
from weft.tensor.kernels.byte_inputs import byte_product
from weft.tensor.weights.quantized import QuantizedWeight

_FEW_ROWS = 16
_SPLIT_ROWS = 64
_SOME_ROWS = 256
DENSE_ROWS = 1024
_FEW_PROGRAMS, _SPLIT_PROGRAMS = 512, 256
"""Programs of a product with up to _FEW_ROWS, and with up to _SPLIT_ROWS rows of x."""
ADD = Blocks(256)
DENSE, _DENSE_COLUMNS = Blocks(64), 128


def blocks_of(rows: int, *, float32: bool = False) -> tuple[int, Blocks, int]:
    """(BM, BN in Blocks, BK) for ``rows`` rows of x. Three stages of many float32 rows take 101 KiB of shared
    memory, and some GPUs have 99."""
    if rows <= _FEW_ROWS:
        return 16, Blocks(32, warps=4, stages=4), 128
    if rows <= _SOME_ROWS:
        return 64, Blocks(64, warps=4, stages=3), 64
    return 128, Blocks(64, warps=8, stages=2 if float32 else 3), 64


def splits_of(rows: int, weight_rows: int, columns: int) -> ColumnSplits:
    """Of the columns of a weight, for ``rows`` rows of x."""
    _, blocks, depth = blocks_of(rows)
    if rows > _SPLIT_ROWS:
        return ColumnSplits(1, columns)
    return column_splits(columns, depth, programs=-(-weight_rows // blocks.width),
                         wanted=_FEW_PROGRAMS if rows <= _FEW_ROWS else _SPLIT_PROGRAMS)


@triton.jit(do_not_specialize=["rows"])
def _product(x, codes, scales, zeros, bias, out, rows, columns_out, x_row, COLUMNS: tl.constexpr,
             BIAS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
             TILES: tl.constexpr, LINES: tl.constexpr, ZEROS: tl.constexpr, FP8: tl.constexpr,
             LANES: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr):
    """``out`` [rows, columns_out] = ``x`` [rows, COLUMNS] @ W^T + bias (float32). With SPLITS: ``out`` is
    float32 [SPLITS, rows, columns_out], each the sum over DEPTH columns, without bias."""
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    first = tl.program_id(0) * BN
    depth, here = tl.arange(0, BK), row < rows
    own = 0
    if SPLITS > 1:
        own = tl.program_id(2) * DEPTH
        out += tl.program_id(2).to(tl.int64) * rows * columns_out
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, DEPTH, BK):
        begin = own + step
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


@triton.jit(do_not_specialize=["split_stride"])
def _add(partials, bias, out, split_stride, columns_out, SPLITS: tl.constexpr, BIAS: tl.constexpr,
         BN: tl.constexpr):
    """``out`` [rows, columns_out]: sums of the splits, plus ``bias``."""
    column, row = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    within, at = column < columns_out, row * columns_out + column
    total = sum_of_splits(partials, split_stride, at, within, SPLITS)
    if BIAS:
        total += tl.load(bias + column, mask=within, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=within)


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
    if weight.byte_inputs:
        return byte_product(x, weight, bias)
    x_RI = dense_rows(x.reshape(-1, weight.columns))
    rows = x_RI.shape[0]
    if rows >= DENSE_ROWS:
        return F.linear(x, dense(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if rows:
        block_rows, blocks, depth = blocks_of(rows, float32=x.dtype == torch.float32)
        splits = splits_of(rows, weight.rows, weight.columns)
        split, unused = splits.count > 1, weight.scales if bias is None else bias
        sums = torch.empty((splits.count, rows, weight.rows), dtype=torch.float32,
                           device=x.device) if split else out
        launch(_product, (triton.cdiv(weight.rows, blocks.width), triton.cdiv(rows, block_rows),
                          splits.count))(
            x_RI, weight.codes, weight.scales, weight.codes if weight.zeros is None else weight.zeros,
            unused, sums, rows, weight.rows, x_RI.stride(0), COLUMNS=weight.columns,
            BIAS=bias is not None and not split, **constants_of(weight), SPLITS=splits.count,
            DEPTH=splits.depth, BM=block_rows, BN=blocks.width, BK=depth, num_warps=blocks.warps,
            num_stages=blocks.stages)
        if split:
            launch(_add, (triton.cdiv(weight.rows, ADD.width), rows))(
                sums, unused, out, sums.stride(0), weight.rows, SPLITS=splits.count, BIAS=bias is not None,
                BN=ADD.width, num_warps=ADD.warps)
    return out.view(*x.shape[:-1], weight.rows)
