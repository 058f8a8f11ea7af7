"""window_attention in Triton: reads rings in place; the launch of decodes also writes them back.

    ring of W = 8, next position 11      place   0  1  2  3  4  5  6  7
                                         holds   8  9 10  3  4  5  6  7      3 is overwritten next

    decode    program = (row, KV head): all places of the ring in blocks, the step's own key and value at
              the place of the oldest (by select, in registers); then only that place is written
    attend    program = (chunk, KV head, heads): the ring's places up to the run's start, by position; then
              the run's own rows from the projections
    update    program = (prefill run, K or V of a KV head, block of places): the old number of each place,
              then the newest token's number for each tap and for the run's end; launched after all readers

A ring has RING_TOKENS_MAX places at most, so no row is split. A place without a token for a query (unwritten,
a fresh run, a run without a slot) is not read at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor import native
from weft.tensor.few_bits import as_bytes
from weft.tensor.gpu.launch import STEP_TABLES, dense_rows, launch
from weft.tensor.gpu.pages import block_dim, fp8_kind, product_of, small_shared, widen
from weft.tensor.gpu.runs import device_runs
from weft.tensor.gpu.softmax import finish, sink_stride, softmax_start, softmax_step, with_sinks
from weft.tensor.inputs import Runs
from weft.tensor.kernels.write_kv import stored
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.relative_bias import apart, profiles_of
from weft.units import CHUNK_TOKENS, ceil_div

BLOCK_BYTES = 16 << 10
ROWS_MIN = 16
UPDATE_BLOCK = 32
FAR = tl.constexpr(1 << 30)
"""Position that no query sees."""


def window_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    ring_S2HWD: torch.Tensor,
    runs: Runs,
    scale: float,
    sinks_TH: torch.Tensor | None = None,
    bank_RE: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor | Unfit:
    if cap:
        return UNFIT
    q_THD, states_THR = apart(q_THD, bank_RE)
    profiles_THE = profiles_of(states_THR, bank_RE)
    q_THD, k_THD, v_THD = dense_rows(q_THD), dense_rows(k_THD), dense_rows(v_THD)
    heads, dim = q_THD.shape[1:]
    kv_heads, window = ring_S2HWD.shape[2:4]
    known, bits = device_runs(runs), as_bytes(ring_S2HWD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    product, precision = product_of(q_THD.dtype, ring_S2HWD.dtype)
    shape = {
        "KV_HEADS": kv_heads,
        "WINDOW": window,
        "D": dim,
        "BLOCK_D": block_dim(dim),
        "FP8": fp8_kind(ring_S2HWD.dtype, q_THD.device),
    }
    common = (
        k_THD,
        k_THD.stride(0),
        k_THD.stride(1),
        v_THD,
        v_THD.stride(0),
        v_THD.stride(1),
        bits,
        native.slot_stride(ring_S2HWD),
        runs.starts_R,
        runs.slots_R,
        known.fresh_R,
    )
    queries = (q_THD, q_THD.stride(0), q_THD.stride(1), scale * math.log2(math.e), out_THD, sinks_TH, profiles_THE)
    sizes = {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "PRODUCT": product,
        "PRECISION": precision,
        "EXTENT": 0 if bank_RE is None else bank_RE.shape[1],
        "SINKS": sink_stride(sinks_TH),
    }
    if runs.decode_count:
        launch(_decode, (runs.decode_count, kv_heads))(
            *queries, *common, **shape, **sizes, **decode_blocks(dim, ring_S2HWD.itemsize, heads // kv_heads)
        )
    prefills = runs.run_count - runs.decode_count
    if prefills:
        blocks = attend_blocks(dim, ring_S2HWD.itemsize, heads // kv_heads, product, small_shared(q_THD.device))
        grid = (ceil_div(heads // kv_heads, blocks["TILE_HEADS"]), kv_heads, known.chunk_count)
        launch(_attend, grid)(
            *queries,
            *common,
            known.offsets_R,
            known.chunk_run_C,
            known.chunk_first_C,
            known.chunk_tokens_C,
            **shape,
            **sizes,
            **blocks,
        )
        launch(_update, (prefills, 2 * kv_heads, ceil_div(window, UPDATE_BLOCK)))(
            *common,
            known.offsets_R,
            known.chunk_begin_R,
            known.chunk_first_C,
            known.chunk_tokens_C,
            known.chunk_tap_C,
            runs.decode_count,
            **shape,
            PLACES=UPDATE_BLOCK,
        )
    return out_THD


def decode_blocks(dim: int, itemsize: int, group: int) -> dict[str, Any]:
    places = min(128, max(16, BLOCK_BYTES // (block_dim(dim) * itemsize)))
    return {"PLACES": places, "ROWS": max(ROWS_MIN, block_dim(group)), "num_warps": 4, "num_stages": 3}


def attend_blocks(dim: int, itemsize: int, group: int, product: tl.dtype, small: bool) -> dict[str, Any]:
    """Return the sizes of ``attend``. ``small``: shared memory of 99 KiB, which holds one stage."""
    itemsize = 4 if product == tl.float32 else itemsize
    wide = block_dim(dim) * itemsize > 512
    tile_heads = 1 if group == 1 or wide else 2
    places = min(64, max(16, BLOCK_BYTES // (block_dim(dim) * itemsize)))
    return {
        "TOKENS": CHUNK_TOKENS,
        "TILE_HEADS": tile_heads,
        "PLACES": places,
        "num_warps": 4 * tile_heads,
        "num_stages": 1 if small else 2,
    }


@triton.jit
def _rows(x, offsets, row_mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return [N, BLOCK_D]: rows of D numbers that begin at ``x + offsets``, zeros outside of ``row_mask`` [N]."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + offsets[:, None] + d[None, :], mask=row_mask[:, None] & (d < D)[None, :], other=0)


@triton.jit(do_not_specialize_on_alignment=STEP_TABLES)
def _decode(
    q,
    q_token,
    q_head,
    qk_scale,
    out,
    sinks,
    profiles,
    k,
    k_token,
    k_head,
    v,
    v_token,
    v_head,
    ring,
    slot_stride,
    starts,
    slots,
    fresh,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXTENT: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Attend from one token to its ring, and write its key and value there. Grid: rows, KV heads.

    ``q`` [T, HEADS, D], ``k`` and ``v`` [T, KV_HEADS, D] by strides in elements; ``ring`` [slots, 2, KV_HEADS,
    WINDOW, D] with ``slot_stride`` elements a slot; ``starts``, ``slots`` int64 [R], ``fresh`` int32 [R]. ``sinks``
    float32 [T, HEADS], SINKS apart, and ``profiles`` [T, HEADS, EXTENT], or None. Writes ``out`` [T, HEADS, D].
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m
    token = tl.full((ROWS,), 0, tl.int64) + row
    position, slot = tl.load(starts + row).to(tl.int32), tl.load(slots + row).to(tl.int64)
    if position < 0:
        finish(
            tl.zeros((ROWS, BLOCK_D), tl.float32),
            token,
            head,
            m < GROUP,
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
    new = tl.load(fresh + row) != 0
    held_places = tl.where((slot >= 0) & (tl.load(fresh + row) == 0), WINDOW, 0)
    keys = ring + slot * slot_stride + kv_head * (WINDOW * D)
    values = keys + KV_HEADS * (WINDOW * D)
    k_own = tl.load(k + row * k_token + kv_head * k_head + d, mask=d < D, other=0.0)
    v_own = tl.load(v + row * v_token + kv_head * v_head + d, mask=d < D, other=0.0)
    k_own, v_own = stored(k_own.to(tl.float32), ring, FP8 != 0), stored(v_own.to(tl.float32), ring, FP8 != 0)
    q_tile = tl.load(
        q + row * q_token + head[:, None] * q_head + d[None, :], mask=(m < GROUP)[:, None] & (d < D)[None, :], other=0.0
    ).to(PRODUCT)
    last = tl.full((ROWS,), 0, tl.int32) + position
    top, total, acc = softmax_start(ROWS, BLOCK_D)
    for begin in range(0, WINDOW, PLACES):
        place = begin + tl.arange(0, PLACES)
        own = place == position % WINDOW
        position_of = position - (position - place + WINDOW) % WINDOW
        place_mask = (place < held_places) & (position_of >= 0) & (place != position % WINDOW)
        key = tl.where(own[:, None], k_own[None, :], _rows(keys, place * D, place_mask, D, BLOCK_D))
        value = tl.where(own[:, None], v_own[None, :], _rows(values, place * D, place_mask, D, BLOCK_D))
        scores = tl.dot(q_tile, tl.trans(widen(key, FP8, PRODUCT)), input_precision=PRECISION)
        known = tl.where(place_mask | own, position_of, FAR)
        top, total, acc = softmax_step(
            scores,
            widen(value, FP8, PRODUCT),
            None,
            None,
            top,
            total,
            acc,
            known,
            last,
            qk_scale,
            True,
            0,
            PRODUCT,
            PRECISION,
            profiles,
            token * HEADS + head,
            m < GROUP,
            EXTENT,
        )
    if sinks is not None:
        total = with_sinks(total, top, sinks, token * SINKS + head, m < GROUP)
    finish(acc / total[:, None], token, head, m < GROUP, out, None, 0, None, 0, None, HEADS, GROUP, D, BLOCK_D)
    if slot >= 0:
        if new:
            for begin in range(0, WINDOW, PLACES):
                offset = (begin + tl.arange(0, PLACES)) * D
                rest = ((offset < WINDOW * D) & (offset != position % WINDOW * D))[:, None] & (d < D)[None, :]
                nothing = tl.zeros((PLACES, BLOCK_D), tl.int8).to(ring.dtype.element_ty)
                tl.store(keys + offset[:, None] + d[None, :], nothing, mask=rest)
                tl.store(values + offset[:, None] + d[None, :], nothing, mask=rest)
        tl.store(keys + position % WINDOW * D + d, k_own, mask=d < D)
        tl.store(values + position % WINDOW * D + d, v_own, mask=d < D)


@triton.jit(do_not_specialize_on_alignment=STEP_TABLES)
def _attend(
    q,
    q_token,
    q_head,
    qk_scale,
    out,
    sinks,
    profiles,
    k,
    k_token,
    k_head,
    v,
    v_token,
    v_head,
    ring,
    slot_stride,
    starts,
    slots,
    fresh,
    offsets,
    chunk_run,
    chunk_first,
    chunk_tokens,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    EXTENT: tl.constexpr,
    SINKS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Attend from the tokens of a chunk to the ring before the run and to the run's own rows. Grid: tiles of query
    heads, KV heads, chunks.

    ``q`` to ``fresh`` as for ``_decode``; ``offsets`` int32 [R]; ``chunk_run``, ``chunk_first``, ``chunk_tokens``
    int32 [chunks] of ``gpu.runs``. A tile has TOKENS tokens of TILE_HEADS query heads, and PLACES keys. Writes
    ``out`` [T, HEADS, D].
    """
    kv_head, chunk = tl.program_id(1), tl.program_id(2)
    run = tl.load(chunk_run + chunk).to(tl.int64)
    first, count = tl.load(chunk_first + chunk), tl.load(chunk_tokens + chunk)
    start, slot = tl.load(starts + run).to(tl.int32), tl.load(slots + run).to(tl.int64)
    start = tl.maximum(start, 0)
    offset = tl.load(offsets + run)
    m, d = tl.arange(0, TILE_HEADS * TOKENS), tl.arange(0, BLOCK_D)
    in_group = tl.program_id(0) * TILE_HEADS + m // TOKENS
    place, head = m % TOKENS, kv_head * GROUP + in_group
    token = (first + place).to(tl.int64)
    row_mask = (place < count) & (in_group < GROUP)
    first_position = start + first - offset
    last = first_position + tl.minimum(place, count - 1)
    q_tile = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + d[None, :],
        mask=row_mask[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(PRODUCT)
    top, total, acc = softmax_start(TILE_HEADS * TOKENS, BLOCK_D)
    known = tl.maximum(first_position - WINDOW + 1, 0)
    if (slot >= 0) & (tl.load(fresh + run) == 0):
        keys = ring + slot * slot_stride + kv_head * (WINDOW * D)
        values = keys + KV_HEADS * (WINDOW * D)
        for begin in range(known, start, PLACES):
            position = begin + tl.arange(0, PLACES)
            rows = position % WINDOW * D
            key = widen(_rows(keys, rows, position < start, D, BLOCK_D), FP8, PRODUCT)
            value = widen(_rows(values, rows, position < start, D, BLOCK_D), FP8, PRODUCT)
            scores = tl.dot(q_tile, tl.trans(key), input_precision=PRECISION)
            masked = tl.where(position < start, position, FAR)
            top, total, acc = softmax_step(
                scores,
                value,
                None,
                None,
                top,
                total,
                acc,
                masked,
                last,
                qk_scale,
                True,
                WINDOW,
                PRODUCT,
                PRECISION,
                profiles,
                token * HEADS + head,
                row_mask,
                EXTENT,
            )
    for begin in range(tl.maximum(known, start), first_position + count, PLACES):
        position = begin + tl.arange(0, PLACES)
        position_mask = position < first_position + count
        rows = (offset + position - start).to(tl.int64)
        key = _rows(k, rows * k_token + kv_head * k_head, position_mask, D, BLOCK_D).to(tl.float32)
        value = _rows(v, rows * v_token + kv_head * v_head, position_mask, D, BLOCK_D).to(tl.float32)
        key, value = stored(key, ring, FP8 != 0), stored(value, ring, FP8 != 0)
        scores = tl.dot(q_tile, tl.trans(widen(key, FP8, PRODUCT)), input_precision=PRECISION)
        top, total, acc = softmax_step(
            scores,
            widen(value, FP8, PRODUCT),
            None,
            None,
            top,
            total,
            acc,
            position,
            last,
            qk_scale,
            True,
            WINDOW,
            PRODUCT,
            PRECISION,
            profiles,
            token * HEADS + head,
            row_mask,
            EXTENT,
        )
    if sinks is not None:
        total = with_sinks(total, top, sinks, token * SINKS + head, row_mask)
    finish(acc / total[:, None], token, head, row_mask, out, None, 0, None, 0, None, HEADS, GROUP, D, BLOCK_D)


@triton.jit(do_not_specialize=["decode_count"], do_not_specialize_on_alignment=STEP_TABLES)
def _update(
    k,
    k_token,
    k_head,
    v,
    v_token,
    v_head,
    ring,
    slot_stride,
    starts,
    slots,
    fresh,
    offsets,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    decode_count,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Write the newest tokens of a prefill run into the rings of the run and of its taps. Grid: prefill runs, K then V
    of each KV head, blocks of PLACES places.

    ``k`` to ``fresh`` as for ``_decode``; ``offsets`` int32 [R], ``chunk_begin`` int32 [R + 1]; ``chunk_first``,
    ``chunk_tokens``, ``chunk_tap`` int32 [chunks] of ``gpu.runs``.
    """
    run, part = (decode_count + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * PLACES + tl.arange(0, PLACES)
    inside, d = place < WINDOW, tl.arange(0, BLOCK_D)
    start, slot = tl.maximum(tl.load(starts + run).to(tl.int32), 0), tl.load(slots + run).to(tl.int64)
    held_places = tl.where((slot >= 0) & (tl.load(fresh + run) == 0), WINDOW, 0)
    offset = tl.load(offsets + run)
    part_offset = part * (WINDOW * D) + place * D
    old = _rows(ring + slot * slot_stride, part_offset, place < held_places, D, BLOCK_D)
    mask = inside[:, None] & (d < D)[None, :]
    first_chunk, end_chunk = tl.load(chunk_begin + run), tl.load(chunk_begin + run + 1)
    for chunk in range(first_chunk, end_chunk):
        done = tl.load(chunk_first + chunk) + tl.load(chunk_tokens + chunk) - offset
        tap = tl.load(chunk_tap + chunk).to(tl.int64)
        target = tl.where(chunk == end_chunk - 1, slot, -1)
        if (tap >= 0) | (target >= 0):
            position = start + done - 1 - (start + done - 1 - place + WINDOW) % WINDOW
            new = inside & (position >= start)
            row = (offset + position - start).to(tl.int64)
            if part < KV_HEADS:
                x = _rows(k, row * k_token + part * k_head, new, D, BLOCK_D).to(tl.float32)
            else:
                x = _rows(v, row * v_token + (part - KV_HEADS) * v_head, new, D, BLOCK_D).to(tl.float32)
            x = tl.where(new[:, None], stored(x, ring, FP8 != 0), old)
            if tap >= 0:
                tl.store(ring + tap * slot_stride + part_offset[:, None] + d[None, :], x, mask=mask)
            if target >= 0:
                tl.store(ring + target * slot_stride + part_offset[:, None] + d[None, :], x, mask=mask)
