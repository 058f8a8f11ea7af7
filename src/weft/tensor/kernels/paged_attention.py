"""paged_attention in Triton: two launches for decodes, one for prefills; the host reads nothing back.

    decode    program = (some splits of rows, KV head): the G query heads of a KV head share its reads
                  |   128 or 256 tokens or more    |                       |        |   <- splits of a row
                  '- softmax over its own pages -> partial output, log of its sum
              combine = (row, head): partial outputs, weighted by their sums; gates; rounding
    prefill   program = (chunk, KV head, some of its query heads): 64 queries of each against all pages up to
              the chunk's last token; chunks are those of ``gpu.runs``, the last (the longest) first

KV splits. The cuts of a row depend only on its own context and the model. So a token's sum is added up in the same
order in any batch. Programs take splits from the step's list (``gpu.decode_kernels``), so the width of the page table
costs nothing.

Masks. Blocks that every query sees completely need only the test for PAD pages. In the blocks at the end of a context,
and in all blocks of a window, scores and values are masked (``gpu.softmax``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu import prefill_backend
from weft.tensor.gpu.decode_kernels import decode_items, programs_of
from weft.tensor.gpu.launch import SMALL_SHARED, STEP_TABLES, dense_rows, launch
from weft.tensor.gpu.pages import (
    block_dim,
    capability_of,
    fp8_kind,
    load_rows,
    load_token_scales,
    product_of,
    token_pages,
    widen,
)
from weft.tensor.gpu.products import after_previous
from weft.tensor.gpu.runs import device_runs
from weft.tensor.gpu.softmax import (
    COMBINED_AT_ONCE,
    Gates,
    combine,
    finish,
    gates_of,
    kv_splits_of,
    sink_stride,
    softmax_start,
    softmax_step,
    with_sinks,
)
from weft.tensor.inputs import Runs
from weft.tensor.kernels.write_kv import pages_of
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.relative_bias import apart, profiles_of
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, ceil_div

BLOCK_BYTES = 16 << 10
"""Bytes of K and of V in a block (64 tokens of 128 bf16 numbers). The next ones load while one is multiplied: 55 KB of
shared memory and 128 registers a thread, so four programs fit an SM of an H100.
"""
ROWS_MIN = 16
"""Fewest rows of a tensor-core product: a tenth of the rows that an H100 could multiply while it reads a page."""
DIM_MAX = 512
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    q_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    runs: Runs,
    scale: float,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    sinks_TH: torch.Tensor | None = None,
    bank_RE: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor | Unfit:
    q_THD, states_THR = apart(q_THD, bank_RE)
    if cap or q_THD.dtype not in _DTYPES or q_THD.shape[2] > DIM_MAX:
        return UNFIT
    return attend(
        q_THD,
        cache_k,
        cache_v,
        runs,
        scale,
        window,
        scales,
        None if sinks_TH is None else Gates(sinks_TH=sinks_TH),
        profiles_of(states_THR, bank_RE),
    )


def attend(
    q_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    runs: Runs,
    scale: float,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    gates: Gates | None = None,
    profiles_THE: torch.Tensor | None = None,
) -> torch.Tensor:
    q_THD = dense_rows(q_THD)
    tokens, heads, dim = q_THD.shape
    kv_heads = cache_k.shape[1]
    table = runs.page_table_RP
    assert table.stride(1) == 1 or table.shape[1] == 1
    out_THD = torch.empty((tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    product, precision = product_of(q_THD.dtype, cache_k.dtype)
    constants = {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "WINDOW": window or 0,
        "D": dim,
        "BLOCK_D": block_dim(dim),
        "FP8": fp8_kind(cache_k.dtype, q_THD.device),
        "PRODUCT": product,
        "PRECISION": precision,
        "EXTENT": 0 if profiles_THE is None else profiles_THE.shape[2],
        "SINKS": sink_stride(None if gates is None else gates.sinks_TH),
    }
    common = (
        q_THD,
        q_THD.stride(0),
        q_THD.stride(1),
        *pages_of(cache_k, cache_v, scales),
        table,
        table.stride(0),
        scale * math.log2(math.e),
        out_THD,
        *gates_of(gates),
    )
    if runs.decode_count:
        _launch_decode(common, profiles_THE, runs, constants, cache_k.itemsize, kv_heads)
    plain = profiles_THE is None and (gates is None or gates.sinks_TH is None)
    if runs.decode_count < runs.run_count and plain and prefill_backend.takes(q_THD, cache_k, runs):
        attended_NHD = prefill_backend.attend(q_THD, cache_k, cache_v, runs, scale, window)
        out_THD[runs.offsets[runs.decode_count] :] = _gated(attended_NHD, gates)
    elif runs.decode_count < runs.run_count:
        known = device_runs(runs)
        blocks = prefill_blocks(dim, cache_k.itemsize, constants["GROUP"], product, capability_of(q_THD.device))
        grid = (ceil_div(constants["GROUP"], blocks["TILE_HEADS"]), kv_heads, known.chunk_count)
        launch(_prefill, grid)(
            *common,
            runs.starts_R,
            known.offsets_R,
            known.chunk_run_C,
            known.chunk_first_C,
            known.chunk_tokens_C,
            known.chunk_count,
            profiles_THE,
            **constants,
            **blocks,
        )
    return out_THD


def _gated(attended_NHD: torch.Tensor, gates: Gates | None) -> torch.Tensor:
    """Return another library's output times the gates of the last N tokens; value scales are only for fp8."""
    if gates is None:
        return attended_NHD
    wide = attended_NHD.float()
    if gates.head_gate_TH is not None:
        wide *= gates.head_gate_TH[-len(wide) :, :, None].float().sigmoid()
    if gates.gate_TC is not None:
        wide *= gates.gate_TC[-len(wide) :].unflatten(1, wide.shape[1:]).float().sigmoid()
    return wide


def _launch_decode(
    common: tuple[Any, ...],
    profiles_THE: torch.Tensor | None,
    runs: Runs,
    constants: dict[str, Any],
    itemsize: int,
    kv_heads: int,
) -> None:
    rows, heads, width = runs.decode_count, constants["HEADS"], constants["BLOCK_D"]
    most = splits_max(kv_heads)
    pages = runs.page_table_RP.shape[1]
    if constants["WINDOW"]:
        pages = min(pages, constants["WINDOW"] // PAGE_TOKENS + 2)
    at_least = split_tokens(kv_heads, constants["D"])
    splits = min(most, max(1, ceil_div(pages * PAGE_TOKENS, at_least)))
    cuts = {"SPLITS_MAX": most, "SPLIT_PAGES": at_least // PAGE_TOKENS}
    blocks = decode_blocks(constants["D"], itemsize, constants["GROUP"], capability_of(runs.page_table_RP.device))
    # A narrow table with one split needs neither the list nor a second launch.
    items = partial = logs = None
    programs = rows
    if splits > 1:
        items = decode_items(
            runs,
            splits,
            window=constants["WINDOW"],
            splits_max=most,
            pages=blocks["PAGES"],
            split_pages=cuts["SPLIT_PAGES"],
        )
        programs = programs_of(rows, splits, kv_heads)
        device = runs.page_table_RP.device
        partial = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=device)
        logs = torch.empty((rows, heads, splits), dtype=torch.float32, device=device)
    launch(_decode, (programs, kv_heads))(
        *common, runs.context_R, items, partial, logs, splits, profiles_THE, **constants, **cuts, **blocks
    )
    if splits > 1:
        used = {name: constants[name] for name in ("HEADS", "GROUP", "WINDOW", "D", "BLOCK_D", "SINKS")}
        out_THD, *gates = common[-7:]
        launch(combine, (rows, heads))(
            out_THD,
            *gates,
            runs.context_R,
            partial,
            logs,
            splits,
            **used,
            PAGES=blocks["PAGES"],
            **cuts,
            AT_ONCE=COMBINED_AT_ONCE,
            num_warps=2,
        )


def splits_max(kv_heads: int) -> int:
    """Return the most splits of a row: enough that a single row keeps a GPU busy."""
    return min(64, max(8, 1 << (128 // kv_heads).bit_length() - 1)) if kv_heads < 128 else 8


def split_tokens(kv_heads: int, dim: int) -> int:
    """Return the fewest tokens of a split. With 8 KV heads of 128 a row of 2,048 tokens is then 128 programs. Each
    split fills its pipeline again: heads of 256, 64 rows of 2,048 tokens take 156 us on an H200 in splits of 128, and
    145 us in splits of 256; one row takes 11 and 12 us.
    """
    return 128 if kv_heads <= 8 and dim <= 128 else 256


def decode_blocks(dim: int, itemsize: int, group: int, capability: int) -> dict[str, Any]:
    """Return the sizes of the decode kernel, for ``_decode[...]``."""
    pages, stages = pages_at_once(dim, itemsize), 3
    if block_dim(dim) * itemsize == WIDE_BYTES and capability >= 90 and capability not in SMALL_SHARED:
        # 64 keys, where 32 fill BLOCK_BYTES: from 64 rows on 87 to 94 % of an H200's copy bandwidth, and 67
        # to 71 % before.
        pages, stages = 4, 2
    return {"PAGES": pages, "ROWS": max(ROWS_MIN, block_dim(group)), "num_warps": 4, "num_stages": stages}


def prefill_blocks(dim: int, itemsize: int, group: int, product: tl.dtype, capability: int) -> dict[str, Any]:
    """Return the sizes of the prefill kernel on a GPU of ``capability``."""
    itemsize = 4 if product == tl.float32 else itemsize
    # 64 tokens x 2 heads are the 128 rows of two warp groups' products, one program per SM.
    row_bytes = block_dim(dim) * (4 if product == tl.float32 else 2)
    heads, pages, warps, stages = 2, min(4, pages_at_once(dim, itemsize)), 8, 3
    if row_bytes > WIDE_BYTES:  # 128 rows would not fit shared memory
        heads, warps, stages = 1, 4, 2
    elif row_bytes == WIDE_BYTES:
        heads, pages, stages = wide_blocks(capability)
    elif capability == 80:  # a third stage spills 64 bytes of registers
        stages = 2
    if group == 1 and heads == 2:
        heads, warps = 1, 4 if row_bytes < WIDE_BYTES else 8
    return {"TOKENS": CHUNK_TOKENS, "TILE_HEADS": heads, "PAGES": pages, "num_warps": warps, "num_stages": stages}


WIDE_BYTES = 512
"""Bytes of a row of factors: head dim 256 in 16 bits, 128 in float32."""


def wide_blocks(capability: int) -> tuple[int, int, int]:
    """Return (heads, pages, stages) of a prefill program of 8 warps for rows of WIDE_BYTES. The registers of no loop
    spill. More rows read keys and values fewer times; more keys are fewer passes over the sums.
    """
    if capability in SMALL_SHARED:
        return 1, 2, 2  # 84 KiB
    if capability < 90:
        return 1, 4, 2  # 136 KiB; 128 rows spill
    return (2, 4, 2) if capability < 100 else (2, 2, 2)  # 192 KiB; 129 KiB, as 64 keys spill


def pages_at_once(dim: int, itemsize: int) -> int:
    return min(8, max(1, BLOCK_BYTES // (PAGE_TOKENS * block_dim(dim) * itemsize)))


@triton.jit
def absorb(
    q,
    top,
    total,
    out,
    pages,
    position,
    last,
    k,
    v,
    k_stride,
    v_stride,
    k_scales,
    v_scales,
    scale_stride,
    qk_scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGES: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    profiles=None,
    row=None,
    row_mask=None,
    EXTENT: tl.constexpr = 0,
):
    """Add some pages to a running softmax (``top``, ``total``, ``out``). ``q`` [M, BLOCK_D]; ``k``, ``v``: the head's
    rows in page 0; ``pages`` of the tokens from ``position`` on; a query sees tokens up to ``last`` [M].
    """
    keys = widen(load_rows(k, k_stride, pages, 0, BLOCK_D, D, PAGES * 16), FP8, PRODUCT)
    values = widen(load_rows(v, v_stride, pages, 0, BLOCK_D, D, PAGES * 16), FP8, PRODUCT)
    k_scale, v_scale = None, None
    if k_scales is not None:
        k_scale = load_token_scales(k_scales, scale_stride, pages, PAGES * 16)
        v_scale = load_token_scales(v_scales, scale_stride, pages, PAGES * 16)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    return softmax_step(
        scores,
        values,
        k_scale,
        v_scale,
        top,
        total,
        out,
        position + tl.arange(0, PAGES * 16),
        last,
        qk_scale,
        MASKED,
        WINDOW,
        PRODUCT,
        PRECISION,
        profiles,
        row,
        row_mask,
        EXTENT,
    )


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=["context"])
def _decode(
    q,
    q_token,
    q_head,
    cache_k,
    cache_v,
    k_stride,
    v_stride,
    scales,
    scale_stride,
    scale_part,
    table,
    table_stride,
    qk_scale,
    out,
    gate,
    gate_stride,
    head_gate,
    head_gate_stride,
    value_scale,
    sinks,
    context,
    items,
    partial,
    logs,
    splits,
    profiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXTENT: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from decode rows to one split of their pages at a time. Grid: programs, KV heads.

    ``q`` [T, HEADS, D] and ``cache_k``, ``cache_v`` [pages, kv_heads, 16, D] by strides in elements; ``scales`` of
    int8 pages, or None; ``table`` int32 [R, ...]; ``context`` int64 [R]. ``items``: of ``decode_items``, or None
    for one split of each row. Without items the output goes to ``out`` [T, HEADS, D] through the gates; with them
    to ``partial`` and ``logs`` (``combine``). ``profiles`` [T, HEADS, EXTENT], or None. A tile has ROWS rows, of
    GROUP query heads, and PAGES pages.
    """
    after_previous(PDL)
    kv_head = tl.program_id(1)
    m, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m
    k, v = cache_k + kv_head * (D * 16), cache_v + kv_head * (D * 16)
    k_scales, v_scales = None, None
    if scales is not None:
        k_scales, v_scales = scales + kv_head * 16, scales + scale_part + kv_head * 16
    count = tl.num_programs(0)  # without items: a row for each program, in one split
    if items is not None:
        count = tl.load(items)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        row, split = tl.full((), 0, tl.int64) + item, tl.full((), 0, tl.int32)
        if items is not None:
            row, split = tl.load(items + 1 + 2 * item).to(tl.int64), tl.load(items + 2 + 2 * item)
        token = tl.full((ROWS,), 0, tl.int64) + row
        seen = tl.maximum(tl.load(context + row).to(tl.int32), 0)
        first, end, each = kv_splits_of(seen, WINDOW, SPLITS_MAX, PAGES, SPLIT_PAGES)
        begin = first + split * each
        end = tl.minimum(begin + each, end)
        q_tile = tl.load(
            q + row * q_token + head[:, None] * q_head + d[None, :],
            mask=(m < GROUP)[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(PRODUCT)
        pages_of_row = table + row * table_stride
        last = tl.full((ROWS,), 0, tl.int32) + (seen - 1)
        top, total, acc = softmax_start(ROWS, BLOCK_D)
        masked = begin
        if WINDOW == 0:
            masked = begin + (tl.minimum(end, seen // 16) - begin) // PAGES * PAGES
            for page in range(begin, masked, PAGES):
                pages = token_pages(pages_of_row, page, end, PAGES)
                top, total, acc = absorb(
                    q_tile,
                    top,
                    total,
                    acc,
                    pages,
                    page * 16,
                    last,
                    k,
                    v,
                    k_stride,
                    v_stride,
                    k_scales,
                    v_scales,
                    scale_stride,
                    qk_scale,
                    False,
                    WINDOW,
                    D,
                    BLOCK_D,
                    PAGES,
                    FP8,
                    PRODUCT,
                    PRECISION,
                    profiles,
                    token * HEADS + head,
                    m < GROUP,
                    EXTENT,
                )
        for page in range(masked, end, PAGES):
            pages = token_pages(pages_of_row, page, end, PAGES)
            top, total, acc = absorb(
                q_tile,
                top,
                total,
                acc,
                pages,
                page * 16,
                last,
                k,
                v,
                k_stride,
                v_stride,
                k_scales,
                v_scales,
                scale_stride,
                qk_scale,
                True,
                WINDOW,
                D,
                BLOCK_D,
                PAGES,
                FP8,
                PRODUCT,
                PRECISION,
                profiles,
                token * HEADS + head,
                m < GROUP,
                EXTENT,
            )
        if sinks is not None and partial is None:
            total = with_sinks(total, top, sinks, token * SINKS + head, m < GROUP)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros for a PAD row, which is in no list
        if partial is None:
            finish(
                acc,
                token,
                head,
                m < GROUP,
                out,
                gate,
                gate_stride,
                head_gate,
                head_gate_stride,
                value_scale,
                HEADS,
                GROUP,
                D,
                BLOCK_D,
            )
        else:
            index = (row * HEADS + head) * splits + split
            tl.store(partial + index[:, None] * BLOCK_D + d[None, :], acc, mask=(m < GROUP)[:, None])
            tl.store(logs + index, top + tl.log2(total), mask=m < GROUP)


@triton.jit(do_not_specialize=["table_stride", "chunk_count"], do_not_specialize_on_alignment=STEP_TABLES)
def _prefill(
    q,
    q_token,
    q_head,
    cache_k,
    cache_v,
    k_stride,
    v_stride,
    scales,
    scale_stride,
    scale_part,
    table,
    table_stride,
    qk_scale,
    out,
    gate,
    gate_stride,
    head_gate,
    head_gate_stride,
    value_scale,
    sinks,
    starts,
    offsets,
    chunk_run,
    chunk_first,
    chunk_tokens,
    chunk_count,
    profiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXTENT: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Attend from the tokens of a chunk to all pages up to its last token. Grid: tiles of query heads, KV heads,
    chunks.

    ``q`` to ``sinks`` and ``profiles`` as for ``_decode``; ``starts`` int64 [R] and ``offsets`` int32 [R] of the
    runs; ``chunk_run``, ``chunk_first``, ``chunk_tokens`` int32 [chunks] of ``gpu.runs``. A tile has TOKENS tokens
    of TILE_HEADS query heads, and PAGES pages. Writes ``out`` [T, HEADS, D].
    """
    # The last chunk first: it reads the longest context.
    kv_head, chunk = tl.program_id(1), chunk_count - 1 - tl.program_id(2)
    run = tl.load(chunk_run + chunk).to(tl.int64)
    first, count = tl.load(chunk_first + chunk), tl.load(chunk_tokens + chunk)
    start = tl.load(starts + run).to(tl.int32)
    m, d = tl.arange(0, TILE_HEADS * TOKENS), tl.arange(0, BLOCK_D)
    in_group = tl.program_id(0) * TILE_HEADS + m // TOKENS
    place, head = m % TOKENS, kv_head * GROUP + in_group
    token = (first + place).to(tl.int64)
    row_mask = (place < count) & (in_group < GROUP)
    if start < 0:
        finish(
            tl.zeros((TILE_HEADS * TOKENS, BLOCK_D), tl.float32),
            token,
            head,
            row_mask,
            out,
            None,
            0,
            None,
            0,
            None,
            HEADS,
            GROUP,
            D,
            BLOCK_D,
        )
        return
    first_position = start + first - tl.load(offsets + run)
    last = first_position + tl.minimum(place, count - 1)
    q_tile = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=row_mask[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(PRODUCT)
    k, v = cache_k + kv_head * (D * 16), cache_v + kv_head * (D * 16)
    k_scales, v_scales = None, None
    if scales is not None:
        k_scales, v_scales = scales + kv_head * 16, scales + scale_part + kv_head * 16
    pages_of_run = table + run * table_stride
    top, total, acc = softmax_start(TILE_HEADS * TOKENS, BLOCK_D)
    end = tl.cdiv(first_position + count, 16)
    if WINDOW:
        masked = tl.maximum(first_position - WINDOW + 1, 0) // 16
    else:
        masked = (first_position + 1) // (PAGES * 16) * PAGES
        for page in range(0, masked, PAGES):
            pages = token_pages(pages_of_run, page, end, PAGES)
            top, total, acc = absorb(
                q_tile,
                top,
                total,
                acc,
                pages,
                page * 16,
                last,
                k,
                v,
                k_stride,
                v_stride,
                k_scales,
                v_scales,
                scale_stride,
                qk_scale,
                False,
                WINDOW,
                D,
                BLOCK_D,
                PAGES,
                FP8,
                PRODUCT,
                PRECISION,
                profiles,
                token * HEADS + head,
                row_mask,
                EXTENT,
            )
    for page in range(masked, end, PAGES):
        pages = token_pages(pages_of_run, page, end, PAGES)
        top, total, acc = absorb(
            q_tile,
            top,
            total,
            acc,
            pages,
            page * 16,
            last,
            k,
            v,
            k_stride,
            v_stride,
            k_scales,
            v_scales,
            scale_stride,
            qk_scale,
            True,
            WINDOW,
            D,
            BLOCK_D,
            PAGES,
            FP8,
            PRODUCT,
            PRECISION,
            profiles,
            token * HEADS + head,
            row_mask,
            EXTENT,
        )
    if sinks is not None:
        total = with_sinks(total, top, sinks, token * SINKS + head, row_mask)
    finish(
        acc / total[:, None],
        token,
        head,
        row_mask,
        out,
        gate,
        gate_stride,
        head_gate,
        head_gate_stride,
        value_scale,
        HEADS,
        GROUP,
        D,
        BLOCK_D,
    )
