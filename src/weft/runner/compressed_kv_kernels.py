"""Compressed KV on a GPU: two launches for a group of pages in int8, three in int4. Twin: ``compressed``.

    compress      program (block, record)   a head of a K or V block -> codes and scales in scratch
              program (piece, record)   scratch -> the record's bytes on its two pages
    restore       the same in the other direction

There are two launches because pages are compressed in place: a record goes to a page that another program may still
have to read.
Addresses are 64 bits wide. PAD instead of a page means no work (L4).

In int4 rows are channels of K and tokens of V, so there is a launch for each of the two. A number of steps has four
bits and a step has eight, so their product is exact. The result is the same fused or not.

Rounding is that of ``arena_kernels``: to the nearest, halves to the even one. It uses additions, which every backend
rounds alike, and ``div_rn``. Rounding to bfloat16 works on the bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft.memory.frames.plan import COMPRESSED_SCALE_BYTES, ArenaPlan
from weft.runner.arena_kernels import codes_of
from weft.runner.compressed import PAGES_AT_ONCE
from weft.spec import ITEM_BYTES
from weft.tensor.gpu.launch import launch
from weft.units import PAGE_TOKENS

Int64s = npt.NDArray[np.int64]

WORD_BYTES = 8
BLOCK_WORDS = 2048
_TL_TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit(do_not_specialize_on_alignment=["records"])
def _code_kernel(
    arena,
    records,
    scratch,
    blocks,
    page_bytes,
    record_bytes,
    NUMBER: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    RESTORE: tl.constexpr,
):
    """Code or restore pages in int8. ``blocks`` int64 [b, 4]: offset in the page, offsets of codes and of scales in
    the record, channels.
    """
    number = tl.program_id(1).to(tl.int64)
    page = tl.load(records + number * 4).to(tl.int64)
    block = blocks + tl.program_id(0).to(tl.int64) * 4
    in_page, codes_at, scales_at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    channels = tl.load(block + 3)
    token_T = tl.arange(0, TOKENS)
    token_T1, channel_1C = token_T[:, None], tl.arange(0, CHANNELS)[None, :]
    inside_TC = (token_T1 >= 0) & (channel_1C < channels)
    at_TC = token_T1 * channels + channel_1C
    values_TC = (arena + page * page_bytes + in_page).to(tl.pointer_type(NUMBER)) + at_TC
    record = scratch + number * record_bytes
    codes_TC = (record + codes_at).to(tl.pointer_type(tl.int8)) + at_TC
    scales_T = (record + scales_at).to(tl.pointer_type(tl.float32)) + token_T
    if page >= 0:
        if RESTORE:
            scale_T = tl.load(scales_T)
            wide_TC = tl.load(codes_TC, mask=inside_TC, other=0).to(tl.float32) * scale_T[:, None]
            tl.store(values_TC, wide_TC.to(NUMBER), mask=inside_TC)
        else:
            wide_TC = tl.load(values_TC, mask=inside_TC, other=0.0).to(tl.float32)
            code_TC, scale_T = codes_of(wide_TC, TOKENS, CHANNELS)
            tl.store(codes_TC, code_TC, mask=inside_TC)
            tl.store(scales_T, scale_T)


@triton.jit
def _in_bfloat16(wide):
    """Return the bits of the nearest bfloat16 of float32 ``wide``, in the upper half of 32."""
    bits = wide.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit(do_not_specialize_on_alignment=["records"])
def _nibble_kernel(
    arena,
    records,
    scratch,
    blocks,
    page_bytes,
    record_bytes,
    NUMBER: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    AS_K: tl.constexpr,
    RESTORE: tl.constexpr,
):
    """Code or restore pages in int4. ``blocks`` as for ``_code_kernel``, all of K or all of V. A tile has the ROWS of
    a head by the PAIRS of numbers that share a byte, first and second.
    """
    number = tl.program_id(1).to(tl.int64)
    page = tl.load(records + number * 4).to(tl.int64)
    block = blocks + tl.program_id(0).to(tl.int64) * 4
    in_page, codes_at, scales_at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    channels = tl.load(block + 3)
    row_R = tl.arange(0, ROWS)
    row_R1, pair_1P = row_R[:, None], tl.arange(0, PAIRS)[None, :]
    if AS_K:
        rows, pairs = channels, TOKENS // 2
        first_RP = 2 * pair_1P * channels + row_R1
        second_RP = first_RP + channels
    else:
        rows, pairs = TOKENS, channels // 2
        first_RP = row_R1 * channels + 2 * pair_1P
        second_RP = first_RP + 1
    inside_R = row_R < rows
    inside_RP = (row_R1 < rows) & (pair_1P < pairs)
    values = (arena + page * page_bytes + in_page).to(tl.pointer_type(NUMBER))
    record = scratch + number * record_bytes
    codes_RP = record + codes_at + row_R1 * pairs + pair_1P
    bounds_R = (record + scales_at).to(tl.pointer_type(tl.int32)) + row_R
    if page >= 0:
        if RESTORE:
            bounds = tl.load(bounds_R, mask=inside_R, other=0)
            least_R1 = (bounds << 16).to(tl.float32, bitcast=True)[:, None]
            step_R1 = (bounds & -65536).to(tl.float32, bitcast=True)[:, None]
            code_RP = tl.load(codes_RP, mask=inside_RP, other=0).to(tl.int32)
            low_RP = least_R1 + (code_RP & 15).to(tl.float32) * step_R1
            high_RP = least_R1 + (code_RP >> 4).to(tl.float32) * step_R1
            tl.store(values + first_RP, low_RP.to(NUMBER), mask=inside_RP)
            tl.store(values + second_RP, high_RP.to(NUMBER), mask=inside_RP)
        else:
            low_RP = tl.load(values + first_RP, mask=inside_RP, other=0.0).to(tl.float32)
            high_RP = tl.load(values + second_RP, mask=inside_RP, other=0.0).to(tl.float32)
            smaller_RP = tl.where(inside_RP, tl.minimum(low_RP, high_RP), float("inf"))
            larger_RP = tl.where(inside_RP, tl.maximum(low_RP, high_RP), -float("inf"))
            least_bits_R = _in_bfloat16(tl.where(inside_R, tl.min(smaller_RP, axis=1), 0.0))
            least_R = least_bits_R.to(tl.float32, bitcast=True)
            span_R = tl.maximum(tl.where(inside_R, tl.max(larger_RP, axis=1), 0.0) - least_R, 0.0)
            step_bits_R = _in_bfloat16(tl.math.div_rn(span_R, tl.full((ROWS,), 15.0, tl.float32)))
            step_R = step_bits_R.to(tl.float32, bitcast=True)
            least_RP = tl.broadcast_to(least_R[:, None], (ROWS, PAIRS))
            step_RP = tl.broadcast_to(tl.where(step_R > 0, step_R, float("inf"))[:, None], (ROWS, PAIRS))
            code_RP = _nibble_of(low_RP - least_RP, step_RP) + 16 * _nibble_of(high_RP - least_RP, step_RP)
            tl.store(codes_RP, code_RP.to(tl.uint8), mask=inside_RP)
            tl.store(bounds_R, step_bits_R | ((least_bits_R >> 16) & 0xFFFF), mask=inside_R)


@triton.jit
def _nibble_of(above_RP, step_RP):
    """Return int32: the nearest number of steps, halves to the even one."""
    nearest_RP = (tl.math.div_rn(above_RP, step_RP) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(nearest_RP, 0.0), 15.0).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["records"])
def _place_kernel(words, records, scratch, page_words, record_words, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    record = records + number * 4
    first, last = tl.load(record + 1).to(tl.int64), tl.load(record + 2).to(tl.int64)
    start = tl.load(record + 3).to(tl.int64) // 8
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < record_words
    arena_word = start + word
    target = words + tl.where(
        arena_word < page_words, first * page_words + arena_word, last * page_words + arena_word - page_words
    )
    staged = scratch + number * record_words + word
    if (first >= 0) & (last >= 0):
        if GATHER:
            tl.store(staged, tl.load(target, mask=inside), mask=inside)
        else:
            tl.store(target, tl.load(staged, mask=inside), mask=inside)


class BlockTable:
    """Rows for each head of each K and V block of ``plan``, on ``device``: see ``_code_kernel``. The first ``k_rows``
    are all those of K.
    """

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        assert plan.kv_layout == "rows", f"the kernels read rows, and these pages are {plan.kv_layout}"
        rows = []
        nibbles = plan.compressed_kv_dtype == "int4"
        for block in (0, 1):
            for compressed in plan.compressed_kv_fields:
                field = compressed.field
                offset = (field.k_offset_bytes, field.v_offset_bytes)[block]
                size = PAGE_TOKENS * field.head_dim
                scales = (field.head_dim if nibbles else PAGE_TOKENS, PAGE_TOKENS)
                for head in range(field.kv_heads) if offset is not None else ():
                    assert offset is not None
                    scales_at = field.kv_heads * scales[0] * block + head * scales[block]
                    codes_at = (block * field.kv_heads + head) * size // (2 if nibbles else 1)
                    rows.append(
                        (
                            offset + head * size * ITEM_BYTES[plan.kv_dtype],
                            compressed.offset_bytes + codes_at,
                            compressed.scale_offset_bytes + scales_at * COMPRESSED_SCALE_BYTES,
                            field.head_dim,
                        )
                    )
            if block == 0:
                self.k_rows = len(rows)
        self.channels = triton.next_power_of_2(max(row[3] for row in rows))
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)


def compress(
    arena: torch.Tensor, plan: ArenaPlan, table: BlockTable, records: torch.Tensor, *, room: torch.Tensor, restore: bool
) -> None:
    """Compress or restore pages of KV. ``records`` int64 [k, 4], as for ``compressed``. ``arena``: uint8, all of it.
    ``room``: int64, scratch for records; a larger one is made if it has no space for one.
    """
    words, record_bytes = arena.view(torch.int64), plan.compressed_kv_bytes
    record_words = record_bytes // WORD_BYTES
    if room.numel() < record_words:
        room = torch.empty(min(len(records), PAGES_AT_ONCE) * record_words, dtype=torch.int64, device=arena.device)
    at_once = min(room.numel() // record_words, PAGES_AT_ONCE)
    for first in range(0, len(records), at_once):
        rows = records[first : first + at_once]
        scratch = room[: len(rows) * record_words]
        if not restore:
            _code(arena, plan, table, rows, scratch, restore=False)
        launch(_place_kernel, (triton.cdiv(record_bytes // WORD_BYTES, BLOCK_WORDS), len(rows)))(
            words,
            rows,
            scratch,
            plan.page_bytes // WORD_BYTES,
            record_bytes // WORD_BYTES,
            GATHER=restore,
            BLOCK=BLOCK_WORDS,
        )
        if restore:
            _code(arena, plan, table, rows, scratch, restore=True)


def _code(
    arena: torch.Tensor, plan: ArenaPlan, table: BlockTable, rows: torch.Tensor, scratch: torch.Tensor, *, restore: bool
) -> None:
    """Convert between the pages of ``rows`` and the records in ``scratch``."""
    staged, form = scratch.view(torch.uint8), (plan.page_bytes, plan.compressed_kv_bytes)
    kinds = {"NUMBER": _TL_TYPES[plan.kv_dtype], "TOKENS": PAGE_TOKENS, "RESTORE": restore}
    if plan.compressed_kv_dtype == "int8":
        launch(_code_kernel, (len(table.rows), len(rows)))(
            arena, rows, staged, table.rows, *form, CHANNELS=table.channels, **kinds
        )
        return
    for blocks, as_k in ((table.rows[: table.k_rows], True), (table.rows[table.k_rows :], False)):
        if len(blocks):
            tile = nibble_tile(table.channels, as_k=as_k)
            launch(_nibble_kernel, (len(blocks), len(rows)))(
                arena, rows, staged, blocks, *form, AS_K=as_k, **tile, **kinds
            )


def nibble_tile(channels: int, *, as_k: bool) -> dict[str, int]:
    """Return ROWS and PAIRS of ``_nibble_kernel`` for heads of ``channels``, a power of two."""
    rows, numbers = (channels, PAGE_TOKENS) if as_k else (PAGE_TOKENS, channels)
    return {"ROWS": rows, "PAIRS": numbers // 2}
