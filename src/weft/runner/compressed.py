"""Compression of states to 8 bits and of KV pages to 8 or 4 bits, and the way back. ``weft.memory.prefix`` decides
which ones.

    slots [k]  --each part of each layer-->  staging uint8 [k, compressed bytes] --whole pages--> pages [k, p]
               <--                                                            <--
    pages [k]  --each K and V block of a layer-->  staging uint8 [k, record bytes]  -->  pages, one after another
               <--                                                                  <--

A compressed state is stored in pages that need not be neighbours. Each field of it is laid out in one piece of staging
memory (``ArenaPlan.compressed_fields``), and that is cut into pages. Accumulators become codes and scales
(``tensor.few_bits``); windows are the same bytes.

A row of ``records`` is int64 [4]: a page, the two pages that its record is on (or one, twice), and the byte of the
first at which it begins. In int8 a record has the codes in the order of the page's numbers (``tensor.layout``), and a
float32 scale for each block, head and token. In int4 a record has rows: a row of K is one channel, a row of V is one
token. Each row has a minimum and a step.

This is the form for every device; on a GPU ``arena_kernels`` and ``compressed_kv_kernels`` do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weft.memory.frames.plan import COMPRESSED_KV_ALIGN, COMPRESSED_SCALE_BYTES, ArenaPlan
from weft.tensor.few_bits import decode_nibbles, decode_state, encode_nibbles, encode_state
from weft.tensor.layout import DTYPES
from weft.tensor.views import kv_views, state_view, strided_view
from weft.units import PAGE_TOKENS

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

STATES_AT_ONCE = 8
"""States in staging memory at once. Compression comes before the step computes: the step's other copies write none of
its sources and read none of its destinations.
"""


def compress_states(buffer: torch.Tensor, plan: ArenaPlan, state_compressions: torch.Tensor) -> None:
    """Compress states. ``buffer``: the arena's bytes; ``state_compressions`` int64 [k, 1 + pages]: a slot, and the
    pages that its state goes to.
    """
    for slots_K, pages_KP, staging in _state_groups(buffer, plan, state_compressions):
        for state, compressed_K, scales_K in _fields(buffer, staging, plan):
            source_K = state.index_select(0, slots_K)
            if scales_K is None:
                compressed_K.copy_(source_K)
            else:
                encode_state(source_K, compressed_K, scales_K)
        _words(buffer, plan).index_copy_(0, pages_KP.flatten(), _words(staging, plan))


def restore_states(buffer: torch.Tensor, plan: ArenaPlan, state_restores: torch.Tensor) -> None:
    """Restore states. ``state_restores`` int64 [k, 1 + pages]: a slot, and the pages whose state it gets."""
    for slots_K, pages_KP, staging in _state_groups(buffer, plan, state_restores):
        _words(staging, plan).copy_(_words(buffer, plan).index_select(0, pages_KP.flatten()))
        for state, compressed_K, scales_K in _fields(buffer, staging, plan):
            wide_K = compressed_K if scales_K is None else decode_state(compressed_K, scales_K, state.dtype)
            state.index_copy_(0, slots_K, wide_K)


def _state_groups(
    buffer: torch.Tensor, plan: ArenaPlan, rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield slots int64 [g], pages int64 [g, p] and staging memory uint8 [g x compressed bytes], a few g at once."""
    for first in range(0, len(rows), STATES_AT_ONCE):
        group = rows[first : first + STATES_AT_ONCE]
        staging = torch.empty(len(group) * plan.compressed_bytes, dtype=torch.uint8, device=buffer.device)
        yield group[:, 0], group[:, 1:], staging


def _fields(buffer: torch.Tensor, staging: torch.Tensor, plan: ArenaPlan) -> Iterator[Views]:
    """Yield, for each part of each layer: all slots [S, ...], the staged part [g, ...], its scales if it has any."""
    count = staging.numel() // plan.compressed_bytes
    for compressed in plan.compressed_fields:
        field = compressed.field
        dtype = DTYPES[field.dtype]
        state = state_view(
            buffer,
            slot_stride_bytes=plan.slot_stride_bytes,
            slot_count=plan.slot_count,
            offset_bytes=field.offset_bytes,
            shape=field.shape,
            dtype=dtype,
        )
        coded = compressed.scale_offset_bytes is not None
        staged = strided_view(
            staging,
            count=count,
            stride_bytes=plan.compressed_bytes,
            offset_bytes=compressed.offset_bytes,
            shape=field.shape,
            dtype=torch.int8 if coded else dtype,
        )
        scales = (
            None
            if compressed.scale_offset_bytes is None
            else strided_view(
                staging,
                count=count,
                stride_bytes=plan.compressed_bytes,
                offset_bytes=compressed.scale_offset_bytes,
                shape=field.shape[:-1],
                dtype=torch.float32,
            )
        )
        yield state, staged, scales


def _words(memory: torch.Tensor, plan: ArenaPlan) -> torch.Tensor:
    """Return ``memory`` by pages, in words: everything is aligned to 256 bytes."""
    return memory.view(torch.int64).view(-1, plan.page_bytes // torch.int64.itemsize)


PAGES_AT_ONCE = 512
"""Pages in staging memory at once. Rows are ordered so that a group may be read completely before it is written."""


class Block(NamedTuple):
    """A K or a V block: ``pages`` [P, H, x, y, pack], all of them, and ``codes`` and ``scales`` of the staged records:
    in int8 [k, H, x, y, pack] and float32 [k, H, 16], in int4 uint8 [k, H, rows, bytes] and bfloat16 [k, H, rows, 2].
    """

    pages: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    is_k: bool

    def encode(self, pages: torch.Tensor) -> None:
        """Write codes and scales of ``pages`` int64 [k] to the staged records."""
        wide_K = _by_token(self.pages.index_select(0, pages), self.is_k)
        if self.codes.dtype == torch.uint8:
            encode_nibbles(wide_K.mT if self.is_k else wide_K, self.codes, self.scales)
            return
        by_token_K = torch.empty(wide_K.shape, dtype=torch.int8, device=wide_K.device)
        encode_state(wide_K, by_token_K, self.scales)
        self.codes.copy_(_as_in_page(by_token_K, self.pages, self.is_k))

    def decode(self, pages: torch.Tensor) -> None:
        """Write the numbers of the staged records to ``pages`` int64 [k]."""
        if self.codes.dtype == torch.uint8:
            rows_K = decode_nibbles(self.codes, self.scales, self.pages.dtype)
            wide_K = rows_K.mT if self.is_k else rows_K
        else:
            wide_K = decode_state(_by_token(self.codes, self.is_k), self.scales, self.pages.dtype)
        self.pages.index_copy_(0, pages, _as_in_page(wide_K, self.pages, self.is_k))


def compress_kv(buffer: torch.Tensor, plan: ArenaPlan, records: torch.Tensor) -> None:
    """Compress pages of KV. ``buffer``: the arena's bytes. ``records`` int64 [k, 4]."""
    for rows, staging in _page_groups(buffer, plan, records):
        for block in _blocks(buffer, staging, plan):
            block.encode(rows[:, 0])
        _units(buffer).index_copy_(0, _places(plan, rows), _units(staging))


def restore_kv(buffer: torch.Tensor, plan: ArenaPlan, records: torch.Tensor) -> None:
    """Restore pages of KV. ``records`` int64 [k, 4]."""
    for rows, staging in _page_groups(buffer, plan, records):
        _units(staging).copy_(_units(buffer).index_select(0, _places(plan, rows)))
        for block in _blocks(buffer, staging, plan):
            block.decode(rows[:, 0])


def _page_groups(
    buffer: torch.Tensor, plan: ArenaPlan, records: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for first in range(0, len(records), PAGES_AT_ONCE):
        rows = records[first : first + PAGES_AT_ONCE]
        yield rows, torch.zeros(len(rows) * plan.compressed_kv_bytes, dtype=torch.uint8, device=buffer.device)


def _blocks(buffer: torch.Tensor, staging: torch.Tensor, plan: ArenaPlan) -> Iterator[Block]:
    record_bytes = plan.compressed_kv_bytes
    count = staging.numel() // record_bytes
    nibbles = plan.compressed_kv_dtype == "int4"
    for compressed in plan.compressed_kv_fields:
        field = compressed.field
        views = kv_views(
            buffer,
            page_bytes=plan.page_bytes,
            page_count=plan.page_count,
            k_offset_bytes=field.k_offset_bytes,
            v_offset_bytes=field.v_offset_bytes,
            kv_heads=field.kv_heads,
            head_dim=field.head_dim,
            dtype=DTYPES[plan.kv_dtype],
            layout=plan.kv_layout,
        )
        heads, codes_at, scales_at = field.kv_heads, compressed.offset_bytes, compressed.scale_offset_bytes
        for block, is_k in zip(views, (True, False), strict=True):
            if block is None:
                continue
            rows, width = (field.head_dim, PAGE_TOKENS) if is_k and nibbles else (PAGE_TOKENS, field.head_dim)
            codes = strided_view(
                staging,
                count=count,
                stride_bytes=record_bytes,
                offset_bytes=codes_at,
                shape=(heads, rows, width // 2) if nibbles else block.shape[1:],
                dtype=torch.uint8 if nibbles else torch.int8,
            )
            scales = strided_view(
                staging,
                count=count,
                stride_bytes=record_bytes,
                offset_bytes=scales_at,
                shape=(heads, rows, 2) if nibbles else (heads, rows),
                dtype=torch.bfloat16 if nibbles else torch.float32,
            )
            yield Block(block, codes, scales, is_k)
            codes_at += codes[0].numel()
            scales_at += heads * rows * COMPRESSED_SCALE_BYTES


def _by_token(block_K: torch.Tensor, is_k: bool) -> torch.Tensor:
    """Return [k, H, 16, D] of [k, H, D/pack, 16, pack] (K) or [k, H, 16/pack, D, pack] (V)."""
    count, heads = block_K.shape[:2]
    order = (0, 1, 3, 2, 4) if is_k else (0, 1, 2, 4, 3)
    return block_K.permute(order).reshape(count, heads, PAGE_TOKENS, -1)


def _as_in_page(by_token_K: torch.Tensor, block: torch.Tensor, is_k: bool) -> torch.Tensor:
    """Return ``by_token_K`` in the form of ``block`` [.., H, x, y, pack]."""
    heads, first, second, pack = block.shape[1:]
    if is_k:
        return by_token_K.reshape(-1, heads, second, first, pack).permute(0, 1, 3, 2, 4)
    return by_token_K.reshape(-1, heads, first, pack, second).permute(0, 1, 2, 4, 3)


def _units(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1, COMPRESSED_KV_ALIGN)


def _places(plan: ArenaPlan, rows: torch.Tensor) -> torch.Tensor:
    """Return int64: the units of the arena that the records of ``rows`` fill, one after another."""
    in_page = plan.page_bytes // COMPRESSED_KV_ALIGN
    units = torch.arange(plan.compressed_kv_bytes // COMPRESSED_KV_ALIGN, device=rows.device)
    unit = rows[:, 3:] // COMPRESSED_KV_ALIGN + units
    page = torch.where(unit < in_page, rows[:, 1:2], rows[:, 2:3])
    return (page * in_page + unit % in_page).flatten()
