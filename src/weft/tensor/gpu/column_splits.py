"""Products of few rows whose summed columns are split over programs ("split-K").

    weight [rows, columns]    program (block of rows, split)     split: DEPTH columns of all
    partials float32 [splits, rows of x, rows]  --one launch, split 0 first-->  out, rounded once

A product of few rows is bound by reading the weight, and few programs leave most of a GPU's memory channels
idle. An 8-bit matrix of 1024 rows has 32 programs for 132 multiprocessors. Splits make some hundreds of them.

Rejected: atomic additions (their order is that of arrival). A counter by which the last program of a block
adds: it saves a launch, needs zeroed memory and fences, and the interpreter cannot test its races.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

COLUMNS_MIN = 512
"""Least columns of a split: it reads more of the weight than it writes of sums."""


@dataclass(frozen=True, slots=True)
class ColumnSplits:
    """``depth``: columns of a split, whole blocks of them."""

    count: int
    depth: int


def column_splits(columns: int, block: int, *, programs: int, wanted: int) -> ColumnSplits:
    """``programs``: those without splits; ``wanted``: how many should run."""
    # From the weight's shape and the tiles alone: the bits of a row do not depend on the rows beside it.
    count = max(1, min(wanted // programs, columns // COLUMNS_MIN))
    depth = -(-columns // (count * block)) * block
    return ColumnSplits(-(-columns // depth), depth)


@triton.jit
def sum_of_splits(partials, split_stride, offsets, mask, SPLITS: tl.constexpr):
    """float32, of the shape of ``offsets``: the partial sums there, the first split first."""
    total = tl.load(partials + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * split_stride + offsets, mask=mask, other=0.0)
    return total
