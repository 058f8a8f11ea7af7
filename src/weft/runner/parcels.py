"""Pages of KV into 8 bits and back: the device's side of ``weft.memory.parcels``.

    pages [k]  --each K and V block of a layer-->  staging uint8 [k, record bytes]  -->  pages, side by side
               <--                                                                  <--

A row of ``records`` is int64 [4]: a page, the two pages that its record lies on (or one, twice), and the byte
of the first at which it begins. Rows come in an order in which each may write what those before it have
read; at most GROUP of them are in staging at a time, all read before one is written, which that order allows.

A record has the codes in the order that the numbers have in the page (``tensor.layout``), and a float32 scale
for each block, head and token: rounding is that of ``ops.state_codes``, with a row for each.

This is the form for every device; on a GPU ``parcel_kernels`` does the same in two launches for a group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.memory.plan import PARKED_KV_ALIGN, ArenaPlan
from weft.tensor.layout import DTYPES
from weft.tensor.ops.state_codes import decode_state, encode_state
from weft.tensor.views import kv_views, strided_view
from weft.units import PAGE_TOKENS

GROUP = 512

Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]


def park_kv(buffer: torch.Tensor, plan: ArenaPlan, records: torch.Tensor) -> None:
    """``buffer``: the arena's bytes. ``records`` int64 [k, 4]."""
    for rows, staging in _groups(buffer, plan, records):
        for block, codes_K, scales_K, is_k in _blocks(buffer, staging, plan):
            wide_K = _by_token(block.index_select(0, rows[:, 0]), is_k)
            by_token_K = torch.empty(wide_K.shape, dtype=torch.int8, device=buffer.device)
            encode_state(wide_K, by_token_K, scales_K)
            codes_K.copy_(_as_in_page(by_token_K, codes_K, is_k))
        _units(buffer).index_copy_(0, _places(plan, rows), _units(staging))


def restore_kv(buffer: torch.Tensor, plan: ArenaPlan, records: torch.Tensor) -> None:
    """``records`` int64 [k, 4]."""
    for rows, staging in _groups(buffer, plan, records):
        _units(staging).copy_(_units(buffer).index_select(0, _places(plan, rows)))
        for block, codes_K, scales_K, is_k in _blocks(buffer, staging, plan):
            wide_K = decode_state(_by_token(codes_K, is_k), scales_K, block.dtype)
            block.index_copy_(0, rows[:, 0], _as_in_page(wide_K, codes_K, is_k))


def _groups(buffer: torch.Tensor, plan: ArenaPlan,
            records: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for first in range(0, len(records), GROUP):
        rows = records[first:first + GROUP]
        yield rows, torch.zeros(len(rows) * plan.parked_kv_bytes, dtype=torch.uint8, device=buffer.device)


def _blocks(buffer: torch.Tensor, staging: torch.Tensor, plan: ArenaPlan) -> Iterator[Block]:
    """Of each K and V block: all pages [P, H, x, y, pack], the staged codes [k, H, x, y, pack], their scales
    [k, H, 16], whether it is K."""
    record_bytes = plan.parked_kv_bytes
    count = staging.numel() // record_bytes
    for parked in plan.parked_kv_fields:
        field = parked.field
        views = kv_views(buffer, page_bytes=plan.page_bytes, page_count=plan.page_count,
                         k_offset_bytes=field.k_offset_bytes, v_offset_bytes=field.v_offset_bytes,
                         kv_heads=field.kv_heads, head_dim=field.head_dim, dtype=DTYPES[plan.kv_dtype])
        tokens = field.kv_heads * PAGE_TOKENS
        for number, block in enumerate(view for view in views if view is not None):
            codes = strided_view(staging, count=count, stride_bytes=record_bytes,
                                 offset_bytes=parked.offset_bytes + number * tokens * field.head_dim,
                                 shape=block.shape[1:], dtype=torch.int8)
            scales = strided_view(staging, count=count, stride_bytes=record_bytes,
                                  offset_bytes=parked.scale_offset_bytes + number * tokens * 4,
                                  shape=(field.kv_heads, PAGE_TOKENS), dtype=torch.float32)
            yield block, codes, scales, number == 0


def _by_token(block_K: torch.Tensor, is_k: bool) -> torch.Tensor:
    """[k, H, 16, D] of [k, H, D/pack, 16, pack] (K) or [k, H, 16/pack, D, pack] (V)."""
    count, heads = block_K.shape[:2]
    order = (0, 1, 3, 2, 4) if is_k else (0, 1, 2, 4, 3)
    return block_K.permute(order).reshape(count, heads, PAGE_TOKENS, -1)


def _as_in_page(by_token_K: torch.Tensor, block_K: torch.Tensor, is_k: bool) -> torch.Tensor:
    """Back to the form of ``block_K``."""
    count, heads, first, second, pack = block_K.shape
    if is_k:
        return by_token_K.view(count, heads, second, first, pack).permute(0, 1, 3, 2, 4)
    return by_token_K.view(count, heads, first, pack, second).permute(0, 1, 2, 4, 3)


def _units(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1, PARKED_KV_ALIGN)


def _places(plan: ArenaPlan, rows: torch.Tensor) -> torch.Tensor:
    """int64: which units of the arena the records of ``rows`` are, one after another."""
    in_page = plan.page_bytes // PARKED_KV_ALIGN
    units = torch.arange(plan.parked_kv_bytes // PARKED_KV_ALIGN, device=rows.device)
    at = rows[:, 3:] // PARKED_KV_ALIGN + units
    page = torch.where(at < in_page, rows[:, 1:2], rows[:, 2:3])
    return (page * in_page + at % in_page).flatten()
