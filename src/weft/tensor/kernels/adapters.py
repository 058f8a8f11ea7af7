"""Additions of adapters to a product, in Triton: y += (x A) B, for rows in blocks of one adapter.

    order    rows by adapter; the last block of each is filled with PAD       int64 [blocks * 16]
    places   of each block, its adapter's line in the tables; PAD for none    int64 [blocks]
    table    of a product: addresses and sizes of the factors of each line    int64 [lines, FIELDS]

    _down    a program: (block, 16 columns of low)       low = x A
    _up      a program: (block, 64 columns of y)         y <- (y gain + shift) + low B, part after part

All three are data. A recorded graph replays with any adapters of the rows. A program of a block without rows, or of a
line without factors, ends at once.

Source of the grouping: Chen et al., 2023 (Punica).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.adapter_rows import BLOCK_ROWS, AdapterBlocks
from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.products import product

PARTS_AT = 3
"""Index of the first part in a line: before it are the address of A, its rows, the number of parts."""
PART_FIELDS = 7
"""Number of fields of a part: first, rows, begin, rank; the addresses of B, gain and shift, 0 for none."""
PARTS_MOST = 8
FIELDS = PARTS_AT + PARTS_MOST * PART_FIELDS
RANKS = 16
"""Columns of low of one program, and of one step of the second product."""
DOWN = Blocks(128, warps=4, stages=3)
UP = Blocks(64, warps=4, stages=2)
_PARTS_AT, _PART_FIELDS = tl.constexpr(PARTS_AT), tl.constexpr(PART_FIELDS)


@triton.jit
def _down(
    x,
    x_row,
    order,
    places,
    table,
    low,
    LOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """Write ``low`` [blocks * BM, LOW]: the first products of the rows. Grid: blocks of rows, blocks of LOW.

    ``x`` [T, COLUMNS] by ``x_row``; ``order``, ``places`` and ``table`` as for ``_up``.
    """
    block = tl.program_id(0)
    place = tl.load(places + block)
    if place >= 0:
        line = table + place * FIELDS
        ranks = tl.load(line + 1)
        rank = tl.program_id(1) * BR + tl.arange(0, BR)
        if tl.program_id(1) * BR < ranks:
            a = tl.load(line).to(tl.pointer_type(x.dtype.element_ty))
            place_in_order = block * BM + tl.arange(0, BM)
            row = tl.load(order + place_in_order)
            total = tl.zeros((BM, BR), tl.float32)
            for first in range(0, COLUMNS, BK):
                column = first + tl.arange(0, BK)
                left = tl.load(
                    x + row[:, None] * x_row + column[None, :],
                    mask=(row >= 0)[:, None] & (column < COLUMNS)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    a + rank[None, :] * COLUMNS + column[:, None],
                    mask=(rank < ranks)[None, :] & (column < COLUMNS)[:, None],
                    other=0.0,
                )
                total += product(left, right)
            tl.store(
                low + place_in_order[:, None] * LOW + rank[None, :],
                total.to(low.dtype.element_ty),
                mask=(rank < ranks)[None, :],
            )


@triton.jit
def _up(
    y,
    y_row,
    order,
    places,
    table,
    low,
    LOW: tl.constexpr,
    FIELDS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the second product of a block's adapter to BN columns of ``y``. Grid: blocks of rows, blocks of columns.

    ``y`` [T, out] by ``y_row``; ``order`` int64 [blocks * BM]: rows; ``places`` int64 [blocks]: lines of ``table``
    int64 [lines, FIELDS]; ``low`` [blocks * BM, LOW], as ``_down`` wrote it.
    """
    block = tl.program_id(0)
    place = tl.load(places + block)
    if place >= 0:
        line = table + place * FIELDS
        begin_y = tl.program_id(1) * BN
        place_in_order = block * BM + tl.arange(0, BM)
        row = tl.load(order + place_in_order)
        for index in range(tl.load(line + 2)):
            part = line + _PARTS_AT + index * _PART_FIELDS
            first, rows = tl.load(part), tl.load(part + 1)
            if (first < begin_y + BN) & (first + rows > begin_y):
                column = begin_y + tl.arange(0, BN) - first
                inside = (column >= 0) & (column < rows)
                here = (row >= 0)[:, None] & inside[None, :]
                address = y + row[:, None] * y_row + (first + column)[None, :]
                total = tl.load(address, mask=here, other=0.0).to(tl.float32)
                gain = tl.load(part + 5)
                if gain != 0:
                    gains = tl.load(gain.to(tl.pointer_type(y.dtype.element_ty)) + column, mask=inside, other=1.0)
                    total = total * gains.to(tl.float32)[None, :]
                shift = tl.load(part + 6)
                if shift != 0:
                    shifts = tl.load(shift.to(tl.pointer_type(y.dtype.element_ty)) + column, mask=inside, other=0.0)
                    total = total + shifts.to(tl.float32)[None, :]
                ranks, low_begin = tl.load(part + 3), tl.load(part + 2)
                b = tl.load(part + 4).to(tl.pointer_type(y.dtype.element_ty))
                sums = tl.zeros((BM, BN), tl.float32)
                for start in range(0, ranks, BR):
                    rank = start + tl.arange(0, BR)
                    left = tl.load(
                        low + place_in_order[:, None] * LOW + (low_begin + rank)[None, :],
                        mask=(rank < ranks)[None, :],
                        other=0.0,
                    )
                    right = tl.load(
                        b + column[None, :] * ranks + rank[:, None],
                        mask=inside[None, :] & (rank < ranks)[:, None],
                        other=0.0,
                    )
                    sums += product(left, right)
                tl.store(address, (total + sums).to(y.dtype.element_ty), mask=here)


def add_factors(
    x_TI: torch.Tensor, y_TO: torch.Tensor, whose: AdapterBlocks, table: torch.Tensor, low_width: int
) -> None:
    """Add the factors' products to ``y_TO``, which has the dtype of ``x_TI``. ``low_width``: a multiple of 16, at
    least the ranks of any line of ``table`` together.
    """
    x_TI, blocks = dense_rows(x_TI), len(whose.places)
    low = torch.empty((blocks * BLOCK_ROWS, low_width), dtype=x_TI.dtype, device=x_TI.device)
    launch(_down, (blocks, low_width // RANKS))(
        x_TI,
        x_TI.stride(0),
        whose.order,
        whose.places,
        table,
        low,
        LOW=low_width,
        COLUMNS=x_TI.shape[1],
        FIELDS=FIELDS,
        BM=BLOCK_ROWS,
        BR=RANKS,
        BK=DOWN.width,
        num_warps=DOWN.warps,
        num_stages=DOWN.stages,
    )
    launch(_up, (blocks, triton.cdiv(y_TO.shape[1], UP.width)))(
        y_TO,
        y_TO.stride(0),
        whose.order,
        whose.places,
        table,
        low,
        LOW=low_width,
        FIELDS=FIELDS,
        BM=BLOCK_ROWS,
        BR=RANKS,
        BN=UP.width,
        num_warps=UP.warps,
        num_stages=UP.stages,
    )
