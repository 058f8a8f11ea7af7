"""latent_attention in Triton: write the rows, then attend with values that are a part of the keys.

    write     program = 16 tokens: their rows into the pages (as keys of one KV head)
    decode    program = (some splits of rows, 32 heads): pages are read once for all 32; splits as in
              paged_attention
    prefill   program = (part of a chunk, head): 32 queries of one head (16 if products are of float32
              numbers)

A row of W = latent + shared numbers (512 + 64) is not a power of two. It is read in two parts, so nothing is read
twice and little is padded, and scores are the sum of two products:

    K [n, W]     | MAIN columns (512) | REST columns (64, up to a power of two) |
                   '- V [n, MAIN] as well, of which ``value_dim`` columns are stored
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor import native
from weft.tensor.few_bits import as_bytes
from weft.tensor.gpu.decode_kernels import decode_items, programs_of
from weft.tensor.gpu.launch import STEP_TABLES, dense_rows, launch
from weft.tensor.gpu.pages import (
    block_dim,
    fp8_kind,
    load_rows,
    load_token_scales,
    product_of,
    small_shared,
    token_pages,
    widen,
)
from weft.tensor.gpu.runs import device_runs
from weft.tensor.gpu.softmax import COMBINED_AT_ONCE, combine, finish, kv_splits_of, softmax_start, softmax_step
from weft.tensor.inputs import Runs
from weft.tensor.kernels.paged_attention import split_tokens, splits_max
from weft.tensor.kernels.write_kv import (
    MOVING,
    TILE_TOKENS,
    VARYING,
    find_places,
    places_of,
    tile_count,
    tile_tokens,
    write_rows,
)
from weft.tensor.layout import k_rows
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, ceil_div

HEADS_AT_ONCE = 32


def latent_attention(
    q_THW: torch.Tensor,
    x_TW: torch.Tensor,
    cache: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scale: float,
    value_dim: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    write_latents(x_TW, cache, positions_T, runs, scales)
    q_THW = dense_rows(q_THW)
    tokens, heads, width = q_THW.shape
    pages = _pages(cache, scales)
    out_THV = torch.empty((tokens, heads, value_dim), dtype=q_THW.dtype, device=q_THW.device)
    product, precision = product_of(q_THW.dtype, cache.dtype)
    main, rest = kv_splits_of_row(width, value_dim)
    table = runs.page_table_RP
    common = (
        q_THW,
        q_THW.stride(0),
        q_THW.stride(1),
        *pages,
        table,
        table.stride(0),
        scale * math.log2(math.e),
        out_THV,
    )
    constants = {
        "HEADS": heads,
        "D": width,
        "VALUE": value_dim,
        "MAIN": main,
        "REST": rest,
        "FP8": fp8_kind(cache.dtype, q_THW.device),
        "PRODUCT": product,
        "PRECISION": precision,
    }
    if runs.decode_count:
        _launch_decode(common, runs, constants)
    if runs.decode_count < runs.run_count:
        known = device_runs(runs)
        queries = queries_of(main, product)
        launch(_prefill, (heads * (CHUNK_TOKENS // queries), known.chunk_count))(
            *common,
            runs.starts_R,
            known.offsets_R,
            known.chunk_run_C,
            known.chunk_first_C,
            known.chunk_tokens_C,
            known.chunk_count,
            **constants,
            TOKENS=queries,
            **blocks_of(main, product, small_shared(q_THW.device)),
        )
    return out_THV


def write_latents(
    x_TW: torch.Tensor, cache: torch.Tensor, positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None = None
) -> None:
    tiles, width = tile_count(runs), x_TW.shape[1]
    if tiles:
        x_TW = dense_rows(x_TW)
        launch(_write, (tiles,))(
            x_TW,
            x_TW.stride(0),
            *_pages(cache, scales),
            positions_T,
            *places_of(runs),
            D=width,
            BLOCK_D=block_dim(width),
            FP8=cache.dtype == torch.float8_e4m3fn,
            TOKENS=TILE_TOKENS,
            num_warps=8,
        )


def _pages(cache: torch.Tensor, scales: torch.Tensor | None) -> tuple[Any, ...]:
    return (as_bytes(k_rows(cache)), native.slot_stride(cache), scales, 0 if scales is None else scales.stride(0))


def _launch_decode(common: tuple[Any, ...], runs: Runs, constants: dict[str, Any]) -> None:
    rows, heads, main = runs.decode_count, constants["HEADS"], constants["MAIN"]
    most, device = splits_max(1), runs.page_table_RP.device
    splits = min(most, max(1, ceil_div(runs.page_table_RP.shape[1] * PAGE_TOKENS, split_tokens(1, main))))
    cuts = {"SPLITS_MAX": most, "SPLIT_PAGES": split_tokens(1, main) // PAGE_TOKENS}
    partial = torch.empty((rows, heads, splits, main), dtype=torch.float32, device=device)
    logs = torch.empty((rows, heads, splits), dtype=torch.float32, device=device)
    blocks = blocks_of(main, constants["PRODUCT"], small_shared(device))
    items = decode_items(
        runs, splits, window=0, splits_max=most, pages=blocks["PAGES"], split_pages=cuts["SPLIT_PAGES"]
    )
    groups = ceil_div(heads, HEADS_AT_ONCE)
    launch(_decode, (programs_of(rows, splits, groups), groups))(
        *common, runs.context_R, items, partial, logs, splits, **constants, **cuts, TILE_HEADS=HEADS_AT_ONCE, **blocks
    )
    launch(combine, (rows, heads))(
        common[-1],
        None,
        0,
        None,
        0,
        None,
        None,
        runs.context_R,
        partial,
        logs,
        splits,
        HEADS=heads,
        GROUP=1,
        WINDOW=0,
        D=constants["VALUE"],
        BLOCK_D=main,
        PAGES=blocks["PAGES"],
        **cuts,
        AT_ONCE=COMBINED_AT_ONCE,
        SINKS=0,
        num_warps=2,
    )


def kv_splits_of_row(width: int, value_dim: int) -> tuple[int, int]:
    """Return (MAIN, REST): powers of two, at least 16, REST 0 if MAIN is everything."""
    main = max(16, 1 << (width.bit_length() - 1))
    # If values reach beyond MAIN, MAIN is all of W, padded.
    if main >= width or main < value_dim:
        return block_dim(width), 0
    return main, block_dim(width - main)


def blocks_of(main: int, product: tl.dtype, small: bool) -> dict[str, int]:
    """Return the sizes of a block. ``small``: shared memory of 99 KiB, which holds one stage."""
    # A block is a page or two: the sums of 32 heads by 512 numbers take 64 registers in each thread of 8 warps.
    return {"PAGES": 1 if main > 512 or product == tl.float32 else 2, "num_warps": 8, "num_stages": 1 if small else 2}


def queries_of(main: int, product: tl.dtype) -> int:
    """Return the queries of a prefill program: few enough for shared memory next to a block of keys, and for their
    sums in the registers.
    """
    if main > 512 or (main > 256 and product == tl.float32):
        return 16
    return 32 if main > 256 else CHUNK_TOKENS


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=MOVING)
def _write(
    x,
    x_token,
    cache,
    stride,
    scales,
    scale_stride,
    positions,
    table,
    table_stride,
    chunk_run,
    chunk_first,
    chunk_tokens,
    decode_count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the rows of 16 tokens into their pages. Grid: tiles of tokens.

    ``x`` [T, D]; ``cache`` [pages, 1, 16, D] as bytes or numbers, ``stride`` elements a page; ``scales`` of int8
    pages, or None. ``positions`` int64 [T]; ``table`` to ``decode_count`` as by ``places_of``.
    """
    token, run, token_mask = tile_tokens(tl.program_id(0), chunk_run, chunk_first, chunk_tokens, decode_count, TOKENS)
    page, place = find_places(positions, table, table_stride, token, run, token_mask)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(x + token[:, None] * x_token + d[None, :], mask=(page >= 0)[:, None] & (d < D)[None, :], other=0.0)
    write_rows(row.to(tl.float32), cache, stride, scales, scale_stride, page, place, 0, D, BLOCK_D, FP8)


@triton.jit
def _absorb(
    q,
    q_rest,
    top,
    total,
    out,
    pages,
    position,
    last,
    cache,
    stride,
    scales,
    scale_stride,
    qk_scale,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    PAGES: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add some pages to a running softmax (``top``, ``total``, ``out``). ``q`` [M, MAIN] and ``q_rest`` [M, REST];
    ``pages`` of the tokens from ``position`` on; a query sees tokens up to ``last`` [M].
    """
    rows = widen(load_rows(cache, stride, pages, 0, MAIN, D, PAGES * 16), FP8, PRODUCT)
    scores = tl.dot(q, tl.trans(rows), input_precision=PRECISION)
    if REST:
        rest = widen(load_rows(cache, stride, pages, MAIN, REST, D, PAGES * 16), FP8, PRODUCT)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    scale = None
    if scales is not None:
        scale = load_token_scales(scales, scale_stride, pages, PAGES * 16)
    return softmax_step(
        scores,
        rows,
        scale,
        scale,
        top,
        total,
        out,
        position + tl.arange(0, PAGES * 16),
        last,
        qk_scale,
        True,
        0,
        PRODUCT,
        PRECISION,
    )


@triton.jit
def _load_queries(
    q,
    token,
    q_token,
    head,
    q_head,
    row_mask,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Return numbers FIRST.. of queries [N, BLOCK] in the dtype PRODUCT, of tokens ``token`` and heads ``head`` [N];
    zeros beyond D and outside of ``row_mask`` [N].
    """
    d = FIRST + tl.arange(0, BLOCK)
    return tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=row_mask[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(PRODUCT)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=["context"])
def _decode(
    q,
    q_token,
    q_head,
    cache,
    stride,
    scales,
    scale_stride,
    table,
    table_stride,
    qk_scale,
    out,
    context,
    items,
    partial,
    logs,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Attend from decode rows to splits of their latents. Grid: programs, blocks of TILE_HEADS heads.

    ``q`` [T, HEADS, D]; ``cache`` [pages, 1, 16, D], ``scales`` of int8 pages or None; ``table`` int32 [R, ...];
    ``context`` int64 [R]; ``items``: of ``decode_items``. Writes ``partial`` float32 [R, HEADS, splits, MAIN] and
    ``logs`` [R, HEADS, splits], of which ``combine`` makes ``out``.
    """
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    head_mask = head < HEADS
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        row, split = tl.load(items + 1 + 2 * item).to(tl.int64), tl.load(items + 2 + 2 * item)
        seen = tl.load(context + row).to(tl.int32)
        _, end, each = kv_splits_of(seen, 0, SPLITS_MAX, PAGES, SPLIT_PAGES)
        begin = split * each
        end = tl.minimum(begin + each, end)
        token = tl.full((TILE_HEADS,), 0, tl.int64) + row
        q_tile = _load_queries(q, token, q_token, head, q_head, head_mask, 0, MAIN, D, PRODUCT)
        q_tile_rest = q_tile
        if REST:
            q_tile_rest = _load_queries(q, token, q_token, head, q_head, head_mask, MAIN, REST, D, PRODUCT)
        last = tl.full((TILE_HEADS,), 0, tl.int32) + (seen - 1)
        top, total, acc = softmax_start(TILE_HEADS, MAIN)
        for page in range(begin, end, PAGES):
            pages = token_pages(table + row * table_stride, page, end, PAGES)
            top, total, acc = _absorb(
                q_tile,
                q_tile_rest,
                top,
                total,
                acc,
                pages,
                page * 16,
                last,
                cache,
                stride,
                scales,
                scale_stride,
                qk_scale,
                D,
                MAIN,
                REST,
                PAGES,
                FP8,
                PRODUCT,
                PRECISION,
            )
        index = (row * HEADS + head) * splits + split
        tl.store(
            partial + index[:, None] * MAIN + tl.arange(0, MAIN)[None, :], acc / total[:, None], mask=head_mask[:, None]
        )
        tl.store(logs + index, top + tl.log2(total), mask=head_mask)


@triton.jit(do_not_specialize=["table_stride", "chunk_count"], do_not_specialize_on_alignment=STEP_TABLES)
def _prefill(
    q,
    q_token,
    q_head,
    cache,
    stride,
    scales,
    scale_stride,
    table,
    table_stride,
    qk_scale,
    out,
    starts,
    offsets,
    chunk_run,
    chunk_first,
    chunk_tokens,
    chunk_count,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Attend from TOKENS queries of one head to all latents up to the chunk's last token. Grid: parts of chunks by
    heads, chunks.

    ``q`` to ``out`` as for ``_decode``, ``out`` [T, HEADS, VALUE]; ``starts`` int64 [R] and ``offsets`` int32 [R]
    of the runs; ``chunk_run``, ``chunk_first``, ``chunk_tokens`` int32 [chunks] of ``gpu.runs``.
    """
    # The last chunk first: it reads the longest context.
    chunk = chunk_count - 1 - tl.program_id(1)
    run = tl.load(chunk_run + chunk).to(tl.int64)
    first, count = tl.load(chunk_first + chunk), tl.load(chunk_tokens + chunk)
    start = tl.load(starts + run).to(tl.int32)
    place = tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) // HEADS * TOKENS >= count:
        return
    token, token_mask = (first + place).to(tl.int64), place < count
    head = tl.full((TOKENS,), 0, tl.int32) + tl.program_id(0) % HEADS
    if start < 0:
        finish(
            tl.zeros((TOKENS, MAIN), tl.float32),
            token,
            head,
            token_mask,
            out,
            None,
            0,
            None,
            0,
            None,
            HEADS,
            1,
            VALUE,
            MAIN,
        )
        return
    first_position = start + first - tl.load(offsets + run)
    last = first_position + tl.minimum(place, count - 1)
    q_tile = _load_queries(q, token, q_token, head, q_head, token_mask, 0, MAIN, D, PRODUCT)
    q_tile_rest = q_tile
    if REST:
        q_tile_rest = _load_queries(q, token, q_token, head, q_head, token_mask, MAIN, REST, D, PRODUCT)
    top, total, acc = softmax_start(TOKENS, MAIN)
    end = tl.max(last, 0) // 16 + 1
    for page in range(0, end, PAGES):
        pages = token_pages(table + run * table_stride, page, end, PAGES)
        top, total, acc = _absorb(
            q_tile,
            q_tile_rest,
            top,
            total,
            acc,
            pages,
            page * 16,
            last,
            cache,
            stride,
            scales,
            scale_stride,
            qk_scale,
            D,
            MAIN,
            REST,
            PAGES,
            FP8,
            PRODUCT,
            PRECISION,
        )
    finish(acc / total[:, None], token, head, token_mask, out, None, 0, None, 0, None, HEADS, 1, VALUE, MAIN)
