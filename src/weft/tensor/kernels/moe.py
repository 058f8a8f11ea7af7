"""moe by Triton: (token, choice) pairs in the order of experts, then two products over tiles of one expert.

    pairs by expert   [ e0 e0 e0 | e3 | e7 e7 e7 e7 e7 ]        choices of PAD are in no tile
    tiles of 2 rows   [e0 e0][e0][e3][e7 e7][e7 e7][e7]  -  -   the most tiles that the pairs can need

    _count     a program: some pairs                  its pairs of each expert; only if there are many
    _align     a program: some pairs, some experts    the places of its pairs, and the tiles of its experts:
                                                      expert, first place, rows
    _product   a program: (tile, block of columns)    act(gate) x up, to the pair's row; then down, to the
                                                      pair's own place
    _add       a program: (tile, block of columns)    adds the parts of a product whose columns are split
    _combine   a program: (token, block of columns)   its choices weighted, in the router's order, in float32,
                                                      and the output of the shared expert

The host reads nothing back: only the device knows which experts have pairs, and how many. So the grid has the most
tiles that the pairs could need, and a program of an empty tile ends at once. Nothing depends on an order of arrival:
the same tokens get the same sums whatever else is in the batch.

With several ranks, each has a share of each expert, and one token then some twenty programs. So the columns of its
first product are split (``tensor.gpu.products``). The second has a program for each 64 channels.

``_align`` is a counting sort, and keeps the order of the pairs of an expert. Up to 4,096 pairs each program counts all
of them itself, so no launch is needed between counts and places. Above, ``_count`` counts each part of 1,024 pairs,
and a program adds up the counts of all parts: each launch reads the pairs once. With 65,536 pairs and 256 experts that
is 1 MB of pairs, and 128 KB of counts for each of 64 programs, from the cache.

Rows of a tile follow the expected tokens per expert: 16 in decodes, which are bound by reading each expert's matrix
once; 64 to 128 in prefills. Tiles are the fast axis of the grid, so that the tiles of an expert share the same columns
of its matrix in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch, padded
from weft.tensor.gpu.products import ColumnSplits, column_splits, product, sum_of_splits
from weft.tensor.gpu.quantized import constants_of, load_right
from weft.tensor.kernels.elementwise import within
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.elementwise import Activation, Caps
from weft.tensor.ops.moe import ExpertBiases, ExpertWeights, SharedOutput, limit_of
from weft.tensor.weights.quantized import TILE_ROWS, QuantizedWeight

COMBINE = Blocks(512)
SHARED_EXPERT = Blocks(1024)
ADD = Blocks(128)
TILE_ROWS_MIN = 16
SPLIT_TOKENS, SPLIT_PROGRAMS = 64, 128
"""Most tokens whose first product is split, and programs that one token should have. Eighty programs keep enough bytes
in flight; the share of an expert on one of several ranks has some twenty.
"""
ALIGN = Blocks(1024)
COUNTED_PAIRS = 4096
"""Pairs above which a separate launch counts them: all decodes are below."""
RANKED = 64
"""Pairs that ``_align`` compares with one another at once."""
VALUES = {"BITS": 0, "GROUP": 1, "GROUPS": 1, "TILES": 1, "LINES": 1, "ZEROS": False, "FP8": 0, "LANES": 1}
"""Constants of weights that are not quantised."""


def product_blocks(rows: int, down: bool) -> Blocks:
    """Return the blocks of a product. ``width``: columns of a product, by rows of a tile. With few rows loads
    dominate, so there are many stages. The first product has two matrices; all of it fits the 99 KB of smaller GPUs.
    """
    if rows <= 32:
        return Blocks(64, warps=4, stages=4)
    return Blocks(128 if down and rows > 64 else 64, warps=4 if rows <= 64 else 8, stages=3)


def depth_of(itemsize: int) -> int:
    """Return the columns of a product's left operand that are multiplied at once: 128 bytes."""
    return 128 // itemsize


def tile_rows(pairs: int, experts: int) -> int:
    """Return the rows of a tile for ``pairs``: about the mean per expert."""
    return min(128, padded(-(-pairs // experts)))


def pairs_of_program(pairs: int) -> int:
    """Return the pairs of a program of ``_align``. Up to 128 programs have a part each; more would read more counts."""
    return RANKED if pairs <= COUNTED_PAIRS else max(ALIGN.width, -(-pairs // 128 // RANKED) * RANKED)


def up_splits(tokens: int, rows: int, choices: int, columns: int, depth: int, block: int) -> ColumnSplits:
    """Return the splits of the ``depth`` columns of x, for an expert's first product with ``columns`` results.
    ``rows``: of a tile. Up to 64 tokens all pairs may be in the tiles of one token's experts, so the number of splits
    follows only from the model's shape.
    """
    if tokens > SPLIT_TOKENS or rows > TILE_ROWS_MIN:
        return ColumnSplits(1, depth)
    programs = choices * -(-columns // product_blocks(rows, down=False).width)
    return column_splits(depth, block, programs=programs, wanted=SPLIT_PROGRAMS)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return x / (1.0 + tl.exp(x * (-1.5957691216057308 - 0.07135481282725557 * x * x)))
    else:
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    gate, up = within(gate, up, LIMIT)
    if ACTIVATION == "clamped_swiglu":
        return (up + 1.0) * gate / (1.0 + tl.exp(gate * -1.702))
    elif ACTIVATION == "situ":
        return _capped(gate, GATE_CAP) / (1.0 + tl.exp(-gate)) * _capped(up, UP_CAP)
    else:
        return _activated(gate, ACTIVATION) * up


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """Return CAP tanh(x / CAP); ``x`` for a CAP of 0."""
    if CAP > 0:  # the compiler needs a condition of more than a float
        part = x / CAP
        square = part * part
        # Near 0 the difference below would cancel: a series there, to the last bit.
        near = part * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        return CAP * tl.where(square < 0.01, near, 1.0 - 2.0 / (tl.exp(2.0 * part) + 1.0))
    else:
        return x


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, PART: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``counts`` int32 [programs, BINS]: how many of a program's PART pairs each expert has; bin 0 is PAD."""
    place, first = tl.arange(0, BLOCK), tl.program_id(0) * PART
    own = tl.zeros((BINS,), tl.int32)
    for begin in range(first, tl.minimum(first + PART, pairs), BLOCK):
        own += _bins(ids, begin + place, pairs, BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), own)


@triton.jit
def _bins(ids, pair, end, BINS: tl.constexpr):
    """Return int32 [BINS]: pairs of each expert among ``pair``, those from ``end`` on as PAD."""
    expert = tl.load(ids + pair, mask=pair < end, other=-1)
    return tl.histogram((expert + 1).to(tl.int32), BINS)


@triton.jit(do_not_specialize=["pairs", "parts", "tile_count"], do_not_specialize_on_alignment=["order", "tiles"])
def _align(
    ids,
    counts,
    order,
    tiles,
    pairs,
    parts,
    tile_count,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sort pairs by expert. ``ids`` int64 [pairs]: the expert of each pair or PAD; ``order`` int32 [pairs]: the pairs
    by expert; ``tiles`` int32 [tile_count, 3]: expert, first place in ``order``, rows (0: an empty tile).

    A program places PART pairs, and writes the tiles of some experts. ``counts``: of ``_count``, of ``parts`` parts;
    None: every program counts all pairs itself. ROWS: pairs that are ranked at once.
    """
    part, programs = tl.program_id(0), tl.num_programs(0)
    place, bin_, row = tl.arange(0, BLOCK), tl.arange(0, BINS), tl.arange(0, ROWS)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    if counts is None:
        for begin in range(0, pairs, BLOCK):
            total += _bins(ids, begin + place, pairs, BINS)
            before += _bins(ids, begin + place, tl.minimum(part * PART, pairs), BINS)
    else:
        for other in range(parts):
            own = tl.load(counts + other * BINS + bin_)
            total += own
            before += tl.where(other < part, own, 0)
    is_expert = (bin_ > 0) & (bin_ <= EXPERTS)
    total = tl.where(is_expert, total, 0)
    next_place = tl.cumsum(total, 0) - total
    tile_counts = (total + (BM - 1)) // BM
    used = tl.sum(tile_counts, 0)
    for begin in range(0, tile_count, programs * BLOCK):
        mine = begin + part * BLOCK + place
        empty = (mine >= used) & (mine < tile_count)
        tl.store(tiles + mine * 3 + 2, tl.zeros((BLOCK,), tl.int32), mask=empty)
    for expert in range(part, EXPERTS, programs):
        count = tl.sum(tl.where(bin_ == expert + 1, total, 0), 0)
        if count > 0:
            begin = tl.sum(tl.where(bin_ == expert + 1, next_place, 0), 0)
            tile = tl.sum(tl.where(bin_ <= expert, tile_counts, 0), 0)
            for done in range(0, count, BM * BLOCK):
                rest = count - done - place * BM
                entry = (tile + done // BM + place) * 3
                tl.store(tiles + entry, tl.full((BLOCK,), 0, tl.int32) + expert, mask=rest > 0)
                tl.store(tiles + entry + 1, begin + done + place * BM, mask=rest > 0)
                tl.store(tiles + entry + 2, tl.minimum(rest, BM), mask=rest > 0)
    next_place += before
    for begin in range(part * PART, tl.minimum(part * PART + PART, pairs), ROWS):
        pair = begin + row
        own_bin = (tl.load(ids + pair, mask=pair < pairs, other=-1) + 1).to(tl.int32)
        same = (own_bin[:, None] == own_bin[None, :]) & (row[None, :] < row[:, None])
        target = tl.gather(next_place, own_bin, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(order + target, pair, mask=own_bin > 0)
        next_place += tl.histogram(own_bin, BINS)


@triton.jit(do_not_specialize=["split_stride"], do_not_specialize_on_alignment=["order", "tiles"])
def _product(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    order,
    tiles,
    x_row,
    out_row,
    split_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHOICES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    DOWN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute ``out[pair] = x[pair] @ weight[expert].T``: [.., COLUMNS] from [.., DEPTH]. Up: rows of x are tokens
    (pair // CHOICES), rows of ``out`` are sorted pairs, activated, weights [(2) COLUMNS, DEPTH]. DOWN: rows of x are
    sorted pairs, rows of ``out`` are pairs in the router's order. BITS 0: weights are values; else codes
    (``tensor.gpu.quantized``). SPLITS (of Up): ``out`` is float32 [SPLITS, sorted pairs, (2) COLUMNS], each the sum
    over PART columns of x, not activated and without ``bias``.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    rows = tl.load(tiles + tile * 3 + 2)
    if rows == 0:
        return
    expert, first = tl.load(tiles + tile * 3).to(tl.int64), tl.load(tiles + tile * 3 + 1)
    row, column, depth = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
    here, within = row < rows, column < COLUMNS
    pair = tl.load(order + first + row, mask=here, other=0).to(tl.int64)
    if DOWN:
        source, target = (first + row).to(tl.int64), pair
    else:
        source, target = pair // CHOICES, (first + row).to(tl.int64)
    if BITS == 0:
        matrix = weight + expert * ((2 if GATED else 1) * COLUMNS * DEPTH) + column[None, :] * DEPTH
    else:
        weight += expert * (TILES * LINES * (64 * BITS))
        scales += expert * (TILES * GROUPS * LANES)
        zeros += expert * (TILES * GROUPS * LANES)
    acc = tl.zeros((BM, BN), tl.float32)
    gate_acc = tl.zeros((BM, BN), tl.float32)
    own = 0
    if SPLITS > 1:
        own = tl.program_id(2) * PART
        out += tl.program_id(2).to(tl.int64) * split_stride
    for step in range(0, PART, BK):
        begin = own + step
        inside = begin + depth < DEPTH
        left = tl.load(
            x + source[:, None] * x_row + (begin + depth)[None, :], mask=here[:, None] & inside[None, :], other=0.0
        )
        if BITS == 0:
            mask = inside[:, None] & within[None, :]
            right = tl.load(matrix + (begin + depth)[:, None], mask=mask, other=0.0)
            if GATED:
                gate_acc += product(left, right)
                right = tl.load(matrix + COLUMNS * DEPTH + (begin + depth)[:, None], mask=mask, other=0.0)
        else:
            right = load_right(
                weight, scales, zeros, block * BN, begin, BITS, GROUP, GROUPS, TILES, LINES, ZEROS, FP8, LANES, BN, BK
            ).to(left.dtype)
            if GATED:
                gate_acc += product(left, right)
                right = load_right(
                    weight,
                    scales,
                    zeros,
                    COLUMNS + block * BN,
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
                ).to(left.dtype)
        acc += product(left, right)
    place = target[:, None] * out_row + column[None, :]
    if bias is not None and SPLITS == 1:
        bias += expert * ((2 if GATED else 1) * COLUMNS) + column
        if GATED:
            gate_acc += tl.load(bias, mask=within, other=0.0)[None, :]
            bias += COLUMNS
        acc += tl.load(bias, mask=within, other=0.0)[None, :]
    if SPLITS > 1:
        if GATED:
            tl.store(out + place, gate_acc, mask=here[:, None] & within[None, :])
            place += COLUMNS
    elif GATED:
        acc = _gated(gate_acc, acc, ACTIVATION, LIMIT, GATE_CAP, UP_CAP)
    elif not DOWN:
        acc = _activated(acc, ACTIVATION)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=here[:, None] & within[None, :])


@triton.jit(do_not_specialize=["split_stride"], do_not_specialize_on_alignment=["tiles"])
def _add(
    partials,
    bias,
    out,
    tiles,
    split_stride,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Write ``out`` [sorted pairs, COLUMNS]: the sums of the splits, activated."""
    tile, column = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.load(tiles + tile * 3 + 2)
    if rows == 0:
        return
    row = tl.arange(0, BM)
    place = (tl.load(tiles + tile * 3 + 1) + row).to(tl.int64)[:, None]
    mask = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    offset = place * ((2 if GATED else 1) * COLUMNS) + column[None, :]
    total = sum_of_splits(partials, split_stride, offset, mask, SPLITS)
    inside = column < COLUMNS
    if bias is not None:
        bias += tl.load(tiles + tile * 3).to(tl.int64) * ((2 if GATED else 1) * COLUMNS) + column
        total += tl.load(bias, mask=inside, other=0.0)[None, :]
    if GATED:
        up = sum_of_splits(partials, split_stride, offset + COLUMNS, mask, SPLITS)
        if bias is not None:
            up += tl.load(bias + COLUMNS, mask=inside, other=0.0)[None, :]
        total = _gated(total, up, ACTIVATION, LIMIT, GATE_CAP, UP_CAP)
    else:
        total = _activated(total, ACTIVATION)
    tl.store(out + place * COLUMNS + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _with_shared(y, x, gate, t, column, inside, x_row, gate_row):
    """Return float32 ``y`` of columns of token ``t``, plus those of ``x``, through ``gate`` unless it is None."""
    part = tl.load(x + t * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        part = tl.sigmoid(tl.load(gate + t * gate_row).to(tl.float32)) * part
    return y + part


@triton.jit
def _combine(
    pair_out,
    ids,
    weights,
    shared,
    gate,
    out,
    shared_row,
    gate_row,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the weighted choices of each token. Grid: tokens, blocks of columns; only the first axis may exceed 65,535.
    Choices of PAD are not read: they have no row. ``shared`` [T, COLUMNS] or None is added to the rounded sum, through
    ``gate`` [T, 1] unless it is None; both by row strides.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        chosen = tl.where(tl.load(ids + pair) >= 0, COLUMNS, 0)
        row = tl.load(pair_out + pair * COLUMNS + column, mask=column < chosen, other=0.0).to(tl.float32)
        weight = tl.load(weights + pair).to(tl.float32)
        total += tl.where(column < chosen, row * weight, 0.0)
    if shared is not None:
        rounded_sum = total.to(out.dtype.element_ty).to(tl.float32)
        total = _with_shared(rounded_sum, shared, gate, token, column, column < COLUMNS, shared_row, gate_row)
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=column < COLUMNS)


def moe(
    x_TD: torch.Tensor,
    expert_ids_TX: torch.Tensor,
    expert_weights_TX: torch.Tensor,
    gate_up_EJD: ExpertWeights,
    down_EDI: ExpertWeights,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    biases: ExpertBiases | None = None,
    limit: float = 0.0,
    caps: Caps = (0.0, 0.0),
    shared: SharedOutput | None = None,
) -> torch.Tensor | Unfit:
    (tokens, width), choices = x_TD.shape, expert_ids_TX.shape[1]
    experts, _, inner = down_EDI.shape
    # Each part of codes (the gate's rows, the others) has to begin with a complete tile.
    if inner % TILE_ROWS and not isinstance(gate_up_EJD, torch.Tensor):
        return UNFIT
    x_TD, ids = dense_rows(x_TD), expert_ids_TX.contiguous()
    out_TD = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    if not tokens:
        return out_TD
    pairs = tokens * choices
    rows = tile_rows(pairs, experts)
    hit = min(experts, pairs)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((min(pairs, (pairs + hit * (rows - 1)) // rows), 3), dtype=torch.int32, device=ids.device)
    _align_pairs(ids, order, tiles, experts, rows)
    between = torch.empty((pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    pair_out = torch.empty((pairs, width), dtype=x_TD.dtype, device=x_TD.device)
    between_products = {
        "ACTIVATION": activation,
        "LIMIT": limit_of(activation, limit),
        "GATE_CAP": caps[0],
        "UP_CAP": caps[1],
    }
    common = {"CHOICES": choices, "BM": rows, "BK": depth_of(x_TD.itemsize), **between_products}
    splits = up_splits(tokens, rows, choices, inner, width, depth_of(x_TD.itemsize))
    sums = (
        torch.empty((splits.count, pairs, (2 if gated else 1) * inner), dtype=torch.float32, device=x_TD.device)
        if splits.count > 1
        else between[None]
    )
    of_up, of_down = (None, None) if biases is None else (biases.gate_up_EJ, biases.down_ED)
    for down, weight, bias, source, target, columns, parts in (
        (False, gate_up_EJD, of_up, x_TD, sums, inner, splits),
        (True, down_EDI, of_down, between, pair_out[None], width, ColumnSplits(1, inner)),
    ):
        blocks = product_blocks(rows, down)
        codes, scales, zeros, constants = _parts(weight)
        launch(_product, (len(tiles), triton.cdiv(columns, blocks.width), parts.count))(
            source,
            codes,
            scales,
            zeros,
            bias,
            target,
            order,
            tiles,
            source.stride(0),
            target.stride(1),
            target.stride(0),
            COLUMNS=columns,
            DEPTH=source.shape[1],
            GATED=gated and not down,
            DOWN=down,
            **constants,
            SPLITS=parts.count,
            PART=parts.depth,
            **common,
            BN=blocks.width,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if parts.count > 1:
            launch(_add, (len(tiles), triton.cdiv(columns, ADD.width)))(
                sums,
                bias,
                between,
                tiles,
                sums.stride(0),
                COLUMNS=columns,
                GATED=gated,
                **between_products,
                SPLITS=parts.count,
                BM=rows,
                BN=ADD.width,
                num_warps=ADD.warps,
            )
    added = None if shared is None else dense_rows(shared.x_TD)
    gate = None if shared is None else shared.gate_T1
    launch(_combine, (tokens, triton.cdiv(width, COMBINE.width)))(
        pair_out,
        ids,
        expert_weights_TX.contiguous(),
        added,
        gate,
        out_TD,
        0 if added is None else added.stride(0),
        0 if gate is None else gate.stride(0),
        COLUMNS=width,
        CHOICES=choices,
        BN=COMBINE.width,
        num_warps=COMBINE.warps,
    )
    return out_TD


def _align_pairs(ids: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, experts: int, rows: int) -> None:
    """Fill ``order`` and ``tiles``. ``rows``: of a tile."""
    pairs, bins = ids.numel(), triton.next_power_of_2(experts + 1)
    part = pairs_of_program(pairs)
    parts, counts = triton.cdiv(pairs, part), None
    if pairs > COUNTED_PAIRS:
        counts = torch.empty((parts, bins), dtype=torch.int32, device=ids.device)
        launch(_count, (parts,))(ids, counts, pairs, PART=part, BINS=bins, BLOCK=ALIGN.width, num_warps=ALIGN.warps)
    # With few pairs, programs without pairs write tiles.
    launch(_align, (max(parts, min(experts, 128)) if counts is None else parts,))(
        ids,
        counts,
        order,
        tiles,
        pairs,
        parts,
        len(tiles),
        EXPERTS=experts,
        BINS=bins,
        PART=part,
        BM=rows,
        BLOCK=ALIGN.width,
        ROWS=RANKED,
        num_warps=ALIGN.warps,
    )


def _parts(weight: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return values or codes, scales, zeros (any tensor if unused), and the compile-time constants."""
    if isinstance(weight, torch.Tensor):
        values = weight.contiguous()
        return values, values, values, VALUES
    assert isinstance(weight, QuantizedWeight), "tiles of values are for CPUs"
    assert weight.order is None, "experts with an order are widened"
    zeros = weight.codes if weight.zeros is None else weight.zeros
    return weight.codes, weight.scales, zeros, constants_of(weight)


@triton.jit
def _add_gated(y, x, gate, out, y_row, x_row, gate_row, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < D
    total = tl.load(y + t * y_row + column, mask=inside, other=0.0).to(tl.float32)
    total = _with_shared(total, x, gate, t, column, inside, x_row, gate_row)
    tl.store(out + t * D + column, total.to(out.dtype.element_ty), mask=inside)


def add_gated(y_TD: torch.Tensor, x_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    tokens, width = y_TD.shape
    y_TD, x_TD = dense_rows(y_TD), dense_rows(x_TD)
    out_TD = torch.empty((tokens, width), dtype=y_TD.dtype, device=y_TD.device)
    if tokens:
        block = min(SHARED_EXPERT.width, triton.next_power_of_2(width))
        launch(_add_gated, (tokens, triton.cdiv(width, block)))(
            y_TD,
            x_TD,
            gate_T1,
            out_TD,
            y_TD.stride(0),
            x_TD.stride(0),
            gate_T1.stride(0),
            D=width,
            BD=block,
            num_warps=SHARED_EXPERT.warps,
        )
    return out_TD
