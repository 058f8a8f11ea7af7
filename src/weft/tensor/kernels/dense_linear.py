"""dense_linear by Triton: a plain weight of 16 bits times few rows, with one order of sums for any number of them.

    a program: (16 rows of x, 32 rows of the weight, split)     128 columns of both at a time, several blocks in flight
    parts float32 [splits, rows of x, rows of the weight]       split 0 first: by ``_add``, or in the add and norm that
                                                                follow (``norm.add_norm``), which saves the launch

A product of few rows is bound by reading the weight. Columns are split until some hundreds of programs read
(``tensor.gpu.products``), by the weight's shape alone. Tiles have 16 rows of x whatever their number, so a row has the
same bits alone and next to 62 others. The blocks of 16 rows are the fast axis of the grid: those after the first read
the weight from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu import few_rows
from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.products import ColumnSplits, after_previous, column_splits, product
from weft.tensor.kernels import quantized_linear
from weft.tensor.op import UNFIT, Unfit

BLOCK_ROWS, BLOCKS, DEPTH = 16, Blocks(32, warps=4, stages=4), 128
PROGRAMS = 512


def splits_of(weight: torch.Tensor) -> ColumnSplits:
    """Return the splits of the columns of ``weight`` [rows, columns]."""
    rows, columns = weight.shape
    return column_splits(columns, DEPTH, programs=triton.cdiv(rows, BLOCKS.width), wanted=PROGRAMS)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    columns_out,
    x_row,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ``out`` [rows, columns_out] = ``x`` [rows, COLUMNS] @ ``weight`` [columns_out, COLUMNS]^T, + ``bias``
    unless it is None. With SPLITS: ``out`` is float32 [SPLITS, rows, columns_out], each the sum over PART columns.
    Grid: blocks of rows, blocks of the weight's rows, splits.
    """
    after_previous(PDL)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    depth, here, within = tl.arange(0, BK), row < rows, column < columns_out
    split = tl.program_id(2)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, PART, BK):
        of = split * PART + step + depth
        left = tl.load(x + row[:, None] * x_row + of[None, :], mask=here[:, None] & (of < COLUMNS)[None, :], other=0.0)
        right = tl.load(
            weight + column[:, None].to(tl.int64) * COLUMNS + of[None, :],
            mask=within[:, None] & (of < COLUMNS)[None, :],
            other=0.0,
        )
        acc += product(left, tl.trans(right))
    if bias is not None:
        acc += tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + split * rows * columns_out + row[:, None] * columns_out + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=here[:, None] & within[None, :],
    )


def _launch(x_RI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    splits, rows = splits_of(weight), x_RI.shape[0]
    launch(_product, (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(weight.shape[0], BLOCKS.width), splits.count))(
        x_RI,
        weight,
        bias,
        out,
        rows,
        weight.shape[0],
        x_RI.stride(0),
        COLUMNS=weight.shape[1],
        SPLITS=splits.count,
        PART=splits.depth,
        BM=BLOCK_ROWS,
        BN=BLOCKS.width,
        BK=DEPTH,
        num_warps=BLOCKS.warps,
        num_stages=BLOCKS.stages,
    )


def parts_of(x_TI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product before its sum: float32 [splits, T, rows], for ``x_TI`` that ``few_rows`` takes."""
    parts = torch.empty(
        (splits_of(weight).count, x_TI.shape[0], weight.shape[0]), dtype=torch.float32, device=x_TI.device
    )
    _launch(dense_rows(x_TI), weight, None, parts)
    return parts


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | Unfit:
    if not few_rows.takes(x, weight):
        return UNFIT
    rows, columns = weight.shape
    x_RI = dense_rows(x.reshape(-1, columns))
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    if splits_of(weight).count == 1:
        _launch(x_RI, weight, bias, out)
    else:
        quantized_linear.add_parts(parts_of(x_RI, weight), bias, out)
    return out
