"""The KV splits of a step's decodes as one list on the device, for attention kernels of a fixed grid.

    contexts    r0: 300    r1: PAD    r2: 40        tokens; a split has 128
    items       5 | (0, 0) (0, 1) (0, 2) (2, 0) ...  count | (row, split) of each

A graph's page table is as wide as the longest context that a server allows. With 256
rows, 8 KV heads and 262,144 tokens, a program for each split would be 32,768 programs a layer.
The grid is a few programs for each multiprocessor instead, and program p computes items p, p + programs, ...

A split's content follows only from its row's context, so the bits of a token depend neither on the batch nor on the
grid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import launch
from weft.tensor.gpu.softmax import kv_splits_of
from weft.tensor.inputs import Runs
from weft.units import ceil_div

PROGRAMS = 2112
"""Programs of a launch over all KV heads: 16 for each multiprocessor of an H100, which runs four at once."""
ROWS_AT_ONCE = 512


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["context"])
def _items(
    context,
    items,
    rows,
    WINDOW: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    PAGES: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the splits of one row; a program is a row. It counts the splits of all rows before it."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before, own = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for begin in range(0, row + 1, BLOCK):
        other = begin + lane
        seen = tl.load(context + other, mask=other <= row, other=0).to(tl.int32)
        first, end, each = kv_splits_of(tl.maximum(seen, 0), WINDOW, SPLITS_MAX, PAGES, SPLIT_PAGES)
        splits = tl.cdiv(end - first, each)
        before += tl.sum(tl.where(other < row, splits, 0), 0)
        own += tl.sum(tl.where(other == row, splits, 0), 0)
    split = tl.arange(0, SPLITS_MAX)
    entry = items + 1 + 2 * (before + split)
    tl.store(entry, tl.full((SPLITS_MAX,), 0, tl.int32) + row, mask=split < own)
    tl.store(entry + 1, split, mask=split < own)
    if row == rows - 1:
        tl.store(items, before + own)


def decode_items(
    runs: Runs, splits: int, *, window: int, splits_max: int, pages: int, split_pages: int
) -> torch.Tensor:
    """Return int32 [1 + 2 rows x splits]: the number of splits with tokens, then (row, split) of each. ``splits``: the
    most of a row in this step's table; the other numbers are those of ``kv_splits_of``.
    """
    # All layers with the same splits share the list of the step.
    key = f"decode_items {splits} {window} {splits_max} {pages} {split_pages}"
    items = runs.memo.get(key)
    if items is None:
        rows = runs.decode_count
        items = runs.memo[key] = torch.empty(1 + 2 * rows * splits, dtype=torch.int32, device=runs.context_R.device)
        launch(_items, (rows,))(
            runs.context_R,
            items,
            rows,
            WINDOW=window,
            SPLITS_MAX=splits_max,
            PAGES=pages,
            SPLIT_PAGES=split_pages,
            BLOCK=ROWS_AT_ONCE,
        )
    assert isinstance(items, torch.Tensor)
    return items


def programs_of(rows: int, splits: int, heads: int) -> int:
    """Return the programs for each of ``heads`` KV heads (or blocks of heads)."""
    return min(rows * splits, ceil_div(PROGRAMS, heads))
