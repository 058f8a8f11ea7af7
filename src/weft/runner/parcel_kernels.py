"""Parked KV on a GPU: the two launches for a group of pages, whose twin is ``parcels``.

    park      program (block, record)   a head of a K or V block -> codes and scales in scratch
              program (piece, record)   scratch -> where the record lies on its two pages
    restore   the same, the other way about

Two, because pages are parked in place: a record goes to a page that another program may still have to read.
Scratch memory has GROUP records at most. Addresses are 64 bits wide. PAD in place of a page means no work
(L4).

Rounding is that of ``arena_kernels``: to the nearest, halves to the even one, by additions that every backend
rounds alike, and the division that is asked for by name.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft.memory.plan import ArenaPlan
from weft.runner.arena_kernels import codes_of
from weft.runner.parcels import GROUP
from weft.spec import ITEM_BYTES
from weft.tensor.compilation import Compilation
from weft.tensor.layout import DTYPES, pack_of
from weft.units import PAGE_TOKENS

Int64s = npt.NDArray[np.int64]

WORD_BYTES = 8
BLOCK_WORDS = 2048
_TL_TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit(do_not_specialize_on_alignment=["records"])
def _code_kernel(arena, records, scratch, blocks, page_bytes, record_bytes, NUMBER: tl.constexpr,
                 PACK: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, RESTORE: tl.constexpr):
    """``blocks`` int64 [b, 5]: offset in the page, of codes, of scales in the record, channels, is it V."""
    number = tl.program_id(1).to(tl.int64)
    page = tl.load(records + number * 4).to(tl.int64)
    block = blocks + tl.program_id(0).to(tl.int64) * 5
    in_page, codes_at, scales_at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    channels, is_v = tl.load(block + 3), tl.load(block + 4)
    token_T = tl.arange(0, TOKENS)
    token_T1, channel_1C = token_T[:, None], tl.arange(0, CHANNELS)[None, :]
    inside_TC = (token_T1 >= 0) & (channel_1C < channels)
    as_k_TC = (channel_1C // PACK) * TOKENS * PACK + token_T1 * PACK + channel_1C % PACK
    as_v_TC = (token_T1 // PACK) * channels * PACK + channel_1C * PACK + token_T1 % PACK
    at_TC = tl.where(is_v > 0, as_v_TC, as_k_TC)
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


@triton.jit(do_not_specialize_on_alignment=["records"])
def _place_kernel(words, records, scratch, page_words, record_words, GATHER: tl.constexpr,
                  BLOCK: tl.constexpr):
    number = tl.program_id(1).to(tl.int64)
    record = records + number * 4
    first, last = tl.load(record + 1).to(tl.int64), tl.load(record + 2).to(tl.int64)
    start = tl.load(record + 3).to(tl.int64) // 8
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < record_words
    at = start + word
    there = words + tl.where(at < page_words, first * page_words + at, last * page_words + at - page_words)
    staged = scratch + number * record_words + word
    if (first >= 0) & (last >= 0):
        if GATHER:
            tl.store(staged, tl.load(there, mask=inside), mask=inside)
        else:
            tl.store(there, tl.load(staged, mask=inside), mask=inside)


class BlockTable:
    """A row for each head of each K and V block of ``plan``, on ``device``: see ``_code_kernel``."""

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        rows = []
        for parked in plan.parked_kv_fields:
            field = parked.field
            size = PAGE_TOKENS * field.head_dim
            for block, offset in enumerate((field.k_offset_bytes, field.v_offset_bytes)):
                for head in range(field.kv_heads) if offset is not None else ():
                    assert offset is not None
                    at = block * field.kv_heads + head
                    rows.append((offset + head * size * ITEM_BYTES[plan.kv_dtype],
                                 parked.offset_bytes + at * size,
                                 parked.scale_offset_bytes + at * PAGE_TOKENS * 4, field.head_dim, block))
        self.channels = triton.next_power_of_2(max(row[3] for row in rows))
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)


def park(arena: torch.Tensor, plan: ArenaPlan, table: BlockTable, records: torch.Tensor, *,
         restore: bool) -> None:
    """``records`` int64 [k, 4], as for ``parcels``. ``arena``: uint8, all of it."""
    words, record_bytes = arena.view(torch.int64), plan.parked_kv_bytes
    for first in range(0, len(records), GROUP):
        rows = records[first:first + GROUP]
        scratch = torch.empty(len(rows) * record_bytes // WORD_BYTES, dtype=torch.int64, device=arena.device)

        def code(rows: torch.Tensor = rows, scratch: torch.Tensor = scratch) -> None:
            _code_kernel[(len(table.rows), len(rows))](
                arena, rows, scratch.view(torch.uint8), table.rows, plan.page_bytes, record_bytes,
                NUMBER=_TL_TYPES[plan.kv_dtype], PACK=pack_of(DTYPES[plan.kv_dtype]), TOKENS=PAGE_TOKENS,
                CHANNELS=table.channels, RESTORE=restore)

        if not restore:
            code()
        _place_kernel[(triton.cdiv(record_bytes // WORD_BYTES, BLOCK_WORDS), len(rows))](
            words, rows, scratch, plan.page_bytes // WORD_BYTES, record_bytes // WORD_BYTES, GATHER=restore,
            BLOCK=BLOCK_WORDS)
        if restore:
            code()


def compilations() -> list[Compilation]:
    """What a GPU asks for: each dtype that KV is parked from, both ways."""
    coding = {"arena": "*u8", "records": "*i64", "scratch": "*u8", "blocks": "*i64", "page_bytes": "i32",
              "record_bytes": "i32"}
    coding |= dict.fromkeys(("NUMBER", "PACK", "TOKENS", "CHANNELS", "RESTORE"), "constexpr")
    placing = {"words": "*i64", "records": "*i64", "scratch": "*i64", "page_words": "i32",
               "record_words": "i32", "GATHER": "constexpr", "BLOCK": "constexpr"}
    made = []
    for restore in (False, True):
        verb = "restore" if restore else "park"
        made.append(Compilation(f"{verb} kv, place", _place_kernel, placing,
                                {"GATHER": restore, "BLOCK": BLOCK_WORDS}))
        for dtype, channels in (("bfloat16", 256), ("float16", 128), ("float32", 64)):
            made.append(Compilation(
                f"{verb} kv of {dtype}, {channels} channels", _code_kernel, coding,
                {"NUMBER": _TL_TYPES[dtype], "PACK": 4 // ITEM_BYTES[dtype], "TOKENS": PAGE_TOKENS,
                 "CHANNELS": channels, "RESTORE": restore}))
    return made
