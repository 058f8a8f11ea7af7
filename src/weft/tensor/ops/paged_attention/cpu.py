"""paged_attention in torch.

    decode   rows sorted by context, cut into groups of similar length whose K fits a cache
             per group:  gather pages -> widen to fp32, [n x kv_heads, D, ctx] -> bmm -> mask -> softmax
                         gather pages -> widen to fp32, [n x kv_heads, ctx, D] -> bmm
    prefill  per run:    gather its pages -> widen -> one fused attention call with a causal mask

The groups are the point: a gather of the whole batch streams K and V through memory three times, while a
group of GATHER_BYTES is widened and multiplied out of the L2 cache (2 MiB was the best of 2, 8, 32 and
200 MB, by a factor of 2). A row whose K alone is larger goes in segments of pages. Long rows thus end in
groups of one, short rows in groups of many: the loop is over bytes, never over runs.

What a group reads beyond a row's context (the tail of its last page, the pages of longer rows, page 0 for
PAD) may hold anything. Scores there are replaced, not added to, by -inf, and V there is replaced by 0,
because 0 x NaN is NaN (L6). Everything is float32; bf16 is widened by a shift of 32-bit lanes, which
splits a packed pair without touching single elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.units import PAD, PAGE_TOKENS, pages_for

GATHER_BYTES = 2 << 20
"""K bytes of one layer that a group gathers at once."""


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows that are computed together. ``pages_NP``: page ids, 0 where there is none;
    ``read_min``: every row reads [0, read_min); ``unread_NS``: places from read_min on that a row must
    not read; ``segment``: pages gathered at once."""

    rows_N: torch.Tensor
    pages_NP: torch.Tensor
    read_min: int
    unread_NS: torch.Tensor
    segment: int


def paged_attention(q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs,
                    scale: float) -> torch.Tensor:
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    page_bytes = cache_k[0].numel() * cache_k.itemsize if cache_k.shape[0] else 1
    key = f"paged_attention.{page_bytes}"
    if key not in runs.memo:
        runs.memo[key] = group_decodes(runs, page_bytes)
    groups, empty_rows = runs.memo[key]
    if empty_rows is not None:
        out_THD.index_fill_(0, empty_rows, 0.0)
    for group in groups:
        _attend_group(q_THD, cache_k, cache_v, group, scale, out_THD)
    for run in range(runs.decode_count, runs.run_count):
        begin, length = runs.offsets[run], runs.lengths[run]
        if runs.starts[run] == PAD:
            out_THD[begin : begin + length] = 0.0
            continue
        context = runs.starts[run] + length
        pages = runs.page_table_RP[run, : pages_for(context)].long()
        out_THD[begin : begin + length] = _attend_run(q_THD[begin : begin + length], cache_k, cache_v, pages,
                                                      context, scale)
    return out_THD


def group_decodes(runs: Runs, page_bytes: int) -> tuple[list[Group], torch.Tensor | None]:
    """Cut the decode rows into groups, longest first; also the rows that read nothing (PAD)."""
    device = runs.page_table_RP.device
    live = [run for run in range(runs.decode_count) if runs.starts[run] != PAD]
    empty = [run for run in range(runs.decode_count) if runs.starts[run] == PAD]
    live.sort(key=lambda run: -runs.starts[run])
    groups = []
    begin = 0
    while begin < len(live):
        pages_max = runs.starts[live[begin]] // PAGE_TOKENS + 1
        end = begin + 1
        while end < len(live) and (end + 1 - begin) * pages_max * page_bytes <= GATHER_BYTES:
            pages = runs.starts[live[end]] // PAGE_TOKENS + 1
            if pages_max - pages > max(4, pages_max // 4):
                break
            end += 1
        rows = live[begin:end]
        contexts_N = torch.tensor([runs.starts[run] + 1 for run in rows], device=device)
        rows_N = torch.tensor(rows, device=device)
        read_min = runs.starts[rows[-1]] + 1
        places_S = torch.arange(read_min, pages_max * PAGE_TOKENS, device=device)
        groups.append(Group(rows_N, runs.page_table_RP[rows_N, :pages_max].long().clamp_min_(0), read_min,
                            places_S >= contexts_N[:, None],
                            max(1, GATHER_BYTES // (len(rows) * page_bytes))))
        begin = end
    return groups, torch.tensor(empty, device=device) if empty else None


def _attend_group(q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, group: Group,
                  scale: float, out_THD: torch.Tensor) -> None:
    rows, page_count = group.pages_NP.shape
    kv_heads, dim = cache_k.shape[1], q_THD.shape[2]
    heads = q_THD.shape[1] // kv_heads
    context = page_count * PAGE_TOKENS
    q_BGD = _lane_order(q_THD.index_select(0, group.rows_N).float() * scale, cache_k.shape[-1])
    q_BGD = q_BGD.view(rows * kv_heads, heads, dim)
    scores_BGS = scratch.take("paged_attention.scores", (rows * kv_heads, heads, context), torch.float32)
    cuts = [(a, min(a + group.segment, page_count)) for a in range(0, page_count, group.segment)]
    for first, last in cuts:
        keys_BDS = _wide_keys(cache_k, group.pages_NP[:, first:last])
        if len(cuts) == 1:
            torch.bmm(q_BGD, keys_BDS, out=scores_BGS)
        else:
            scores_BGS[:, :, first * PAGE_TOKENS : last * PAGE_TOKENS] = torch.bmm(q_BGD, keys_BDS)
    if group.read_min < context:
        tail = scores_BGS.view(rows, kv_heads * heads, context)[:, :, group.read_min :]
        tail.masked_fill_(group.unread_NS[:, None, :], float("-inf"))
    weights_BGS = torch.softmax(scores_BGS, dim=-1)
    out_BGD = torch.zeros(rows * kv_heads, heads, dim)
    for first, last in cuts:
        values_NHSD = _wide_values(cache_v, group.pages_NP[:, first:last])
        begin, end = first * PAGE_TOKENS, last * PAGE_TOKENS
        if group.read_min < end:
            masked_from = max(begin, group.read_min)
            unread = group.unread_NS[:, masked_from - group.read_min : end - group.read_min]
            values_NHSD[:, :, masked_from - begin :].masked_fill_(unread[:, None, :, None], 0.0)
        out_BGD.baddbmm_(weights_BGS[:, :, begin:end], values_NHSD.flatten(0, 1))
    out_THD.index_copy_(0, group.rows_N, out_BGD.view(rows, kv_heads * heads, dim).to(out_THD.dtype))


def _lane_order(q_NHD: torch.Tensor, pack: int) -> torch.Tensor:
    """D reordered as the widened keys have it: all first elements of the packed lanes, then all second."""
    if pack == 1:
        return q_NHD
    rows, heads, dim = q_NHD.shape
    return q_NHD.view(rows, heads, dim // pack, pack).transpose(-1, -2).reshape(rows, heads, dim)


def _gather(cache: torch.Tensor, pages: torch.Tensor, name: str) -> torch.Tensor:
    taken = scratch.take(name, (pages.numel(), *cache.shape[1:]), cache.dtype)
    return torch.index_select(cache, 0, pages.reshape(-1), out=taken)


def _wide_keys(cache_k: torch.Tensor, pages_NP: torch.Tensor) -> torch.Tensor:
    """fp32 [N x kv_heads, D, P x 16], D in lane order."""
    rows, pages = pages_NP.shape
    _, kv_heads, lanes, tokens, pack = cache_k.shape
    packed = _gather(cache_k, pages_NP, "paged_attention.k")
    wide = scratch.take("paged_attention.k_wide", (rows, kv_heads, pack, lanes, pages, tokens), torch.float32)
    lane_major = packed.view(rows, pages, kv_heads, lanes, tokens, pack).permute(0, 2, 3, 1, 4, 5)
    if packed.dtype == torch.bfloat16:
        _split_pairs(lane_major, wide[:, :, 0], wide[:, :, 1])
    else:
        for part in range(pack):
            wide[:, :, part].copy_(lane_major[..., part])
    return wide.view(rows * kv_heads, pack * lanes, pages * tokens)


def _wide_values(cache_v: torch.Tensor, pages_NP: torch.Tensor) -> torch.Tensor:
    """fp32 [N, kv_heads, P x 16, D]."""
    rows, pages = pages_NP.shape
    _, kv_heads, lanes, dim, pack = cache_v.shape
    packed = _gather(cache_v, pages_NP, "paged_attention.v")
    wide = scratch.take("paged_attention.v_wide", (rows, kv_heads, pages, lanes, pack, dim), torch.float32)
    head_major = packed.view(rows, pages, kv_heads, lanes, dim, pack).permute(0, 2, 1, 3, 4, 5)
    if packed.dtype == torch.bfloat16:
        _split_pairs(head_major, wide[:, :, :, :, 0], wide[:, :, :, :, 1])
    else:
        for part in range(pack):
            wide[:, :, :, :, part].copy_(head_major[..., part])
    return wide.view(rows, kv_heads, pages * lanes * pack, dim)


def _split_pairs(pairs: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """bf16 ``[..., 2]`` -> fp32 halves: a bf16 is the upper half of the fp32 of the same value."""
    lanes = pairs.view(torch.int32).squeeze(-1)
    torch.bitwise_left_shift(lanes, 16, out=first.view(torch.int32))
    torch.bitwise_and(lanes, -65536, out=second.view(torch.int32))


def _attend_run(q_LHD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, pages: torch.Tensor,
                context: int, scale: float) -> torch.Tensor:
    """All queries of one prefill run over its context: [L, heads, D] float32.

    KV heads are the batch and the G query heads of each share its keys by a stride of 0. Slicing to
    ``context`` is the mask against unwritten memory.
    """
    length, q_heads, dim = q_LHD.shape
    _, kv_heads, lanes, tokens, pack = cache_k.shape
    padded = pages.numel() * tokens
    k_packed = _gather(cache_k, pages, "paged_attention.k")
    k_HSD = scratch.take("paged_attention.k_wide", (kv_heads, padded, dim), torch.float32)
    k_HSD.view(kv_heads, pages.numel(), tokens, lanes, pack).copy_(k_packed.permute(1, 0, 3, 2, 4))
    v_packed = _gather(cache_v, pages, "paged_attention.v")
    v_HSD = scratch.take("paged_attention.v_wide", (kv_heads, padded, dim), torch.float32)
    v_HSD.view(kv_heads, pages.numel(), tokens // pack, pack, dim).copy_(v_packed.permute(1, 0, 2, 4, 3))
    group = q_heads // kv_heads
    q_HGLD = q_LHD.float().view(length, kv_heads, group, dim).permute(1, 2, 0, 3)
    k_HGSD = k_HSD[:, None, :context].expand(kv_heads, group, context, dim)
    v_HGSD = v_HSD[:, None, :context].expand(kv_heads, group, context, dim)
    if length == context:
        made = F.scaled_dot_product_attention(q_HGLD, k_HGSD, v_HGSD, is_causal=True, scale=scale)
    else:
        seen = torch.arange(context, device=q_LHD.device) <= torch.arange(
            context - length, context, device=q_LHD.device)[:, None]
        made = F.scaled_dot_product_attention(q_HGLD, k_HGSD, v_HGSD, attn_mask=seen, scale=scale)
    return made.permute(2, 0, 1, 3).reshape(length, q_heads, dim)
