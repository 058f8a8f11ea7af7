"""weight_product of codes by Triton: blocks of weights are dequantised in registers, right before the product.

    a program: (BM rows of x, BN rows of the weight)      BK columns of both at a time
    codes, scales --load, convert--> W^T [BK, BN]          x [BM, BK] @ W^T, float32; bias; one rounding

A decode is bound by reading every code once: 16 rows of x, many small programs, many stages. Up to 64 rows columns are
split over programs too (``tensor.gpu.products``), and ``_add`` adds the parts. A prefill takes tiles large enough that
dequantising is cheap compared with the product. From DENSE_ROWS rows on, the full matrix is dequantised first, and the
product is that of torch's library: programs of 128 rows would dequantise each block eight times and more. x is never
rounded, unless the weight asks for it.

    _dense     a program: (BN rows, BK columns of the weight)      -> plain rows in the dtype of x
    _plain     a program: (BN rows, 128 columns of the weight)     -> codes in fp8 by plain rows, and scales

**fp8 x fp8** (a weight in fp8 with ``byte_inputs``). Each row of x is rounded to fp8 in parts of 128 columns, at every
number of rows. So the numbers do not depend on the batch. Few rows: both codes as bfloat16, which represents them; a
part's float32 sum times both scales. From DENSE_ROWS rows on: torch's ``scaled_mm``, whose scales are those of 1 x 128
blocks of x and of the weight. Tensor cores add up fp8 with fewer bits than float32, so the last bits differ between
the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.pages import widen
from weft.tensor.gpu.products import ColumnSplits, column_splits, only_if, product, sum_of_splits
from weft.tensor.gpu.quantized import constants_of, load_right
from weft.tensor.kernels.byte_inputs import byte_product, rounded
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.linear import Weight, take_columns
from weft.tensor.weights.quantized import PART, QuantizedWeight

_FEW_ROWS = 16
_SPLIT_ROWS = 64
_SOME_ROWS = 256
DENSE_ROWS = 1024
_FEW_PROGRAMS, _SPLIT_PROGRAMS = 512, 256
"""Programs of a product with up to _FEW_ROWS, and with up to _SPLIT_ROWS rows of x."""
ADD = Blocks(256)
DENSE, _DENSE_COLUMNS = Blocks(64), 128


def blocks_of(rows: int, *, float32: bool = False) -> tuple[int, Blocks, int]:
    """Return (BM, BN in Blocks, BK) for ``rows`` rows of x. Three stages of many float32 rows take 101 KiB of shared
    memory, and some GPUs have 99.
    """
    if rows <= _FEW_ROWS:
        return 16, Blocks(32, warps=4, stages=4), 128
    if rows <= _SOME_ROWS:
        return 64, Blocks(64, warps=4, stages=3), 64
    return 128, Blocks(64, warps=8, stages=2 if float32 else 3), 64


def splits_of(rows: int, weight_rows: int, columns: int) -> ColumnSplits:
    """Return the splits of the columns of a weight, for ``rows`` rows of x."""
    _, blocks, depth = blocks_of(rows)
    if rows > _SPLIT_ROWS:
        return ColumnSplits(1, columns)
    return column_splits(
        columns,
        depth,
        programs=-(-weight_rows // blocks.width),
        wanted=_FEW_PROGRAMS if rows <= _FEW_ROWS else _SPLIT_PROGRAMS,
    )


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    x_scales,
    codes,
    scales,
    zeros,
    bias,
    out,
    rows,
    columns_out,
    x_row,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROUNDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute ``out`` [rows, columns_out] = ``x`` [rows, COLUMNS] @ W^T + bias (float32). With SPLITS: ``out`` is
    float32 [SPLITS, rows, columns_out], each the sum over DEPTH columns, without bias. ROUNDED: ``x`` has codes in fp8
    and ``x_scales`` float32 [parts of 128 columns, rows]; else ``x_scales`` is not read.
    """
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
        left = tl.load(
            x + row[:, None] * x_row + (begin + depth)[None, :],
            mask=here[:, None] & (begin + depth < COLUMNS)[None, :],
            other=0.0,
        )
        right = load_right(
            codes,
            scales,
            zeros,
            first,
            begin,
            BITS,
            GROUP,
            GROUPS,
            TILES,
            LINES,
            ZEROS,
            FP8,
            LANES,
            BN,
            BK,
            not ROUNDED,
        )
        if ROUNDED:
            column = first + tl.arange(0, BN)
            offset = (column // 16) * (GROUPS * LANES) + (begin // GROUP) * LANES + column % LANES
            inside = begin < COLUMNS
            of_weight = tl.load(scales + offset, mask=column < only_if(inside, TILES * 16), other=0.0)
            of_x = tl.load(x_scales + (begin // 128) * rows + row, mask=row < only_if(inside, rows), other=0.0)
            sums = product(widen(left, FP8, tl.bfloat16), right.to(tl.bfloat16))
            acc += sums * (of_x[:, None] * of_weight.to(tl.float32)[None, :])
        else:
            acc += product(left, right.to(left.dtype))
    column = first + tl.arange(0, BN)
    within = column < columns_out
    if BIAS:
        acc += tl.load(bias + column, mask=within, other=0.0)[None, :]
    tl.store(
        out + row[:, None] * columns_out + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=here[:, None] & within[None, :],
    )


@triton.jit(do_not_specialize=["split_stride"])
def _add(partials, bias, out, split_stride, columns_out, SPLITS: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr):
    """Write ``out`` [rows, columns_out]: sums of the splits, plus ``bias``."""
    column, row = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    within, offset = column < columns_out, row * columns_out + column
    total = sum_of_splits(partials, split_stride, offset, within, SPLITS)
    if BIAS:
        total += tl.load(bias + column, mask=within, other=0.0)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=within)


@triton.jit
def _dense(
    codes,
    scales,
    zeros,
    out,
    columns_out,
    rows_out,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    LANES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write ``out`` [rows_out, columns_out]: the values of the weight."""
    first, begin = tl.program_id(0) * BN, tl.program_id(1) * BK
    wide = load_right(codes, scales, zeros, first, begin, BITS, GROUP, GROUPS, TILES, LINES, ZEROS, FP8, LANES, BN, BK)
    row, column = first + tl.arange(0, BN), begin + tl.arange(0, BK)
    tl.store(
        out + row[:, None].to(tl.int64) * columns_out + column[None, :],
        tl.trans(wide).to(out.dtype.element_ty),
        mask=(row < rows_out)[:, None] & (column < columns_out)[None, :],
    )


@triton.jit
def _plain(
    codes,
    scales,
    out,
    out_scales,
    columns_out,
    rows_out,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    LANES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write ``out`` [rows_out, columns_out]: codes of 8 bits; ``out_scales`` float32 [columns_out / BK, rows_out]."""
    first, begin = tl.program_id(0) * BN, tl.program_id(1) * BK
    tile, piece = first // 16 + tl.arange(0, BN // 16), tl.arange(0, BK * 16)
    x = tl.load(
        codes + tile[:, None].to(tl.int64) * (LINES * 512) + begin * 16 + piece[None, :],
        mask=(tile < TILES)[:, None] & (begin * 16 + piece < LINES * 512)[None, :],
        other=0,
    )
    x = tl.permute(tl.reshape(x, (BN // 16, BK // 4, 16, 4)), (0, 2, 1, 3))
    row, column = first + tl.arange(0, BN), begin + tl.arange(0, BK)
    tl.store(
        out + row[:, None].to(tl.int64) * columns_out + column[None, :],
        tl.reshape(x, (BN, BK)),
        mask=(row < rows_out)[:, None] & (column < columns_out)[None, :],
    )
    offset = (row // 16) * (GROUPS * LANES) + (begin // GROUP) * LANES + row % LANES
    scale = tl.load(scales + offset, mask=row < rows_out, other=0.0).to(tl.float32)
    tl.store(out_scales + tl.program_id(1) * rows_out + row, scale, mask=row < rows_out)


def dense(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, [rows, columns]."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.device)
    launch(_dense, (triton.cdiv(weight.rows, DENSE.width), triton.cdiv(weight.columns, _DENSE_COLUMNS)))(
        weight.codes,
        weight.scales,
        weight.codes if weight.zeros is None else weight.zeros,
        out,
        weight.columns,
        weight.rows,
        **constants_of(weight),
        BN=DENSE.width,
        BK=_DENSE_COLUMNS,
        num_warps=DENSE.warps,
    )
    return out


def plain(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in fp8 as plain rows: codes [rows, columns], and scales float32 [parts of 128 columns, rows]."""
    parts = triton.cdiv(weight.columns, PART)
    out = torch.empty((weight.rows, weight.columns), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((parts, weight.rows), dtype=torch.float32, device=weight.device)
    sizes = constants_of(weight)
    launch(_plain, (triton.cdiv(weight.rows, DENSE.width), parts))(
        weight.codes,
        weight.scales,
        out,
        scales,
        weight.columns,
        weight.rows,
        **{name: sizes[name] for name in ("GROUP", "GROUPS", "TILES", "LINES", "LANES")},
        BN=DENSE.width,
        BK=PART,
        num_warps=DENSE.warps,
    )
    return out.view(torch.float8_e4m3fn), scales


def _by_library(x_RI: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return fp8 x fp8 by the library. Four rows of x: their scales are read 16 bytes at a time."""
    codes, scales = rounded(x_RI, fp8=True, multiple=4)
    rows, of_rows = plain(weight)
    recipe = F.ScalingType.BlockWise1x128
    out: torch.Tensor = F.scaled_mm(
        codes.view(-1, weight.columns).view(torch.float8_e4m3fn),
        rows.t(),
        scales.t(),
        recipe,
        of_rows.t(),
        recipe,
        output_dtype=torch.bfloat16,
    )
    out = out[: x_RI.shape[0]]
    return out.to(x_RI.dtype) if bias is None else (out + bias).to(x_RI.dtype)


def weight_product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | Unfit:
    if not isinstance(weight, QuantizedWeight):
        return UNFIT
    if weight.order is not None:
        x = take_columns(x, weight.order)
    if weight.byte_inputs and not weight.fp8:
        return byte_product(x, weight, bias)
    x_RI = dense_rows(x.reshape(-1, weight.columns))
    rows, left, x_scales = x_RI.shape[0], x_RI, x_RI
    if rows >= DENSE_ROWS:
        if weight.byte_inputs:
            return _by_library(x_RI, weight, bias).view(*x.shape[:-1], weight.rows)
        return F.linear(x, dense(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if rows:
        if weight.byte_inputs:
            codes, x_scales = rounded(x_RI, fp8=True)
            left = codes.view(rows, -1)
        block_rows, blocks, depth = blocks_of(rows, float32=x.dtype == torch.float32)
        splits = splits_of(rows, weight.rows, weight.columns)
        split, unused = splits.count > 1, weight.scales if bias is None else bias
        sums = torch.empty((splits.count, rows, weight.rows), dtype=torch.float32, device=x.device) if split else out
        launch(_product, (triton.cdiv(weight.rows, blocks.width), triton.cdiv(rows, block_rows), splits.count))(
            left,
            x_scales,
            weight.codes,
            weight.scales,
            weight.codes if weight.zeros is None else weight.zeros,
            unused,
            sums,
            rows,
            weight.rows,
            left.stride(0),
            COLUMNS=weight.columns,
            BIAS=bias is not None and not split,
            **constants_of(weight),
            SPLITS=splits.count,
            DEPTH=splits.depth,
            ROUNDED=weight.byte_inputs,
            BM=block_rows,
            BN=blocks.width,
            BK=depth,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if split:
            launch(_add, (triton.cdiv(weight.rows, ADD.width), rows))(
                sums,
                unused,
                out,
                sums.stride(0),
                weight.rows,
                SPLITS=splits.count,
                BIAS=bias is not None,
                BN=ADD.width,
                num_warps=ADD.warps,
            )
    return out.view(*x.shape[:-1], weight.rows)
