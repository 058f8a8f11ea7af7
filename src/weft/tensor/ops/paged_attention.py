"""Causal attention of a step's queries over the pages of their own sequences.

The C++ kernel (csrc/attention.hpp) reads pages in place, in one pass. Torch:

    decode   rows sorted by context, cut into groups of similar length whose K fits a cache
             per group:  gather pages -> to fp32, [n x kv_heads, D, ctx] -> bmm -> mask -> softmax
                         gather pages -> to fp32, [n x kv_heads, ctx, D] -> bmm
    prefill  per run:    gather its pages -> to fp32 -> one fused attention call with a causal mask

The groups make it fast. A gather of the full batch streams K and V through memory three times; a group is converted
and multiplied in the L2 cache. A row with a larger K goes in segments of pages. So the loop is over bytes, never over
runs.

A group also reads memory beyond a row's context, which may hold anything: the tail of its last page, the pages of
longer rows, page 0 for PAD. Masks there replace values (L6). Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops.relative_bias import apart, bias_mask, relative_bias
from weft.tensor.scratch import scratch
from weft.units import PAD, PAGE_TOKENS, pages_for

DIM_MAX = 512
"""Largest D of the C++ form."""
_BIASES = 1 << 22
"""Biases of a prompt's scores that are computed at once."""
GATHER_BYTES = 2 << 20
"""K bytes of one layer per group: the best of 2, 8, 32 and 200 MB, by a factor of 2."""


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows that are computed together. ``pages_NP``: page ids, 0 for PAD. ``read_min``: every row
    reads [0, read_min). ``unread_NS``: places from read_min on that a row must not read. ``segment``: pages
    gathered at once. ``left_NS``: with a window, the masked places of a row's first page. Places count from a
    row's first page, which depends on the window. ``contexts_N``: places up to a row's query."""

    rows_N: torch.Tensor
    contexts_N: torch.Tensor
    pages_NP: torch.Tensor
    read_min: int
    unread_NS: torch.Tensor
    segment: int
    left_NS: torch.Tensor | None = None


@op("weft.tensor.kernels.paged_attention")
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
) -> torch.Tensor:
    """Return softmax(scale * Q K^T) V; the token at position p sees positions [0, p] of its own sequence. With a
    ``window`` it sees the last ``window`` of them, itself included.

    ``q_THD`` [T, heads, D] with heads = G x kv_heads, query head h reading KV head h // G. Caches as in
    ``tensor.layout``; int8 caches have ``scales`` bfloat16 [P, 2, kv_heads, 16]. ``write_kv`` must have
    written the step's own keys and values. Returns [T, heads, D] in the dtype of ``q_THD``. Softmax and sums
    are float32.

    Only the pages of a row's context are used of ``page_table_RP``, and only the written places of the last page.
    Unwritten memory, NaN included, does not reach the output (L6). PAD rows return zeros.

    ``sinks_TH`` float32 [T, heads]: a score of each head that takes part in the softmax's sum, with no value. Tokens
    may share a row, by a stride of 0.

    ``bank_RE`` float32: scores have the bias of ``ops.relative_bias``, and queries have R numbers after their D.
    ``cap``: scores are cap x tanh(score / cap); 0 for none, and never with sinks.

    Source of the sinks: transformers ``GptOssAttention``; Xiao et al., 2023.
    """
    dim = q_THD.shape[2] - (0 if bank_RE is None else len(bank_RE))
    out_THD = torch.empty((*q_THD.shape[:2], dim), dtype=q_THD.dtype, device=q_THD.device)
    page_bytes = cache_k[0].numel() * cache_k.itemsize if cache_k.shape[0] else 1
    groups, empty_rows = runs.once(
        f"paged_attention.{page_bytes}.{window}", lambda: group_decodes(runs, page_bytes, window)
    )
    if empty_rows is not None:
        out_THD.index_fill_(0, empty_rows, 0.0)
    for group in groups:
        _attend_group(q_THD, cache_k, cache_v, scales, group, scale, out_THD, sinks_TH, bank_RE, cap)
    for run in range(runs.decode_count, runs.run_count):
        begin, length = runs.offsets[run], runs.lengths[run]
        if runs.starts[run] == PAD:
            out_THD[begin : begin + length] = 0.0
            continue
        context = runs.starts[run] + length
        first = first_page(runs.starts[run], window)
        pages = runs.page_table_RP[run, first : pages_for(context)].long()
        out_THD[begin : begin + length] = _attend_run(
            q_THD[begin : begin + length],
            cache_k,
            cache_v,
            scales,
            pages,
            context - first * PAGE_TOKENS,
            scale,
            window,
            None if sinks_TH is None else sinks_TH[begin : begin + length],
            bank_RE,
            cap,
        )
    return out_THD


@paged_attention.in_cpp
def _paged_attention(
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
    if (
        bank_RE is not None
        or cap
        or (sinks_TH is not None and sinks_TH.stride(0) != 0)
        or not (
            native.fits(q_THD)
            and cache_k.dtype in native.KV_DTYPES
            and q_THD.stride(-1) == 1
            and q_THD.shape[2] % native.LANES == 0
            and q_THD.shape[2] <= DIM_MAX
        )
    ):
        return UNFIT
    tokens, heads, dim = q_THD.shape
    kv_heads = cache_k.shape[1]
    table_address, table_stride = native.page_table_of(runs)
    assert cache_k.dtype == cache_v.dtype, f"K pages of {cache_k.dtype}, V pages of {cache_v.dtype}"
    out_THD = torch.empty((tokens, heads, dim), dtype=q_THD.dtype)
    native.extension().attention(
        native.runs_of(runs),
        native.rows_of(q_THD),
        out_THD.data_ptr(),
        cache_k.data_ptr(),
        cache_v.data_ptr(),
        native.slot_stride(cache_k),
        native.slot_stride(cache_v),
        kv_heads,
        heads // kv_heads,
        dim,
        table_address,
        table_stride,
        scale,
        native.KV_DTYPES[cache_k.dtype],
        *native.token_scales(scales),
        window or 0,
        native.address_of(sinks_TH),
    )
    return out_THD


def first_page(position: int, window: int | None) -> int:
    """Return the first page that the token at ``position`` reads."""
    return 0 if window is None else max(0, position - window + 1) // PAGE_TOKENS


def group_decodes(runs: Runs, page_bytes: int, window: int | None = None) -> tuple[list[Group], torch.Tensor | None]:
    """Cut the decode rows into groups, longest first. Also return the rows that read nothing (PAD)."""
    device = runs.page_table_RP.device
    live = [run for run in range(runs.decode_count) if runs.starts[run] != PAD]
    empty = [run for run in range(runs.decode_count) if runs.starts[run] == PAD]
    skipped = {run: first_page(runs.starts[run], window) for run in live}
    last = {run: runs.starts[run] - skipped[run] * PAGE_TOKENS for run in live}
    live.sort(key=lambda run: -last[run])
    groups = []
    begin = 0
    while begin < len(live):
        pages_max = last[live[begin]] // PAGE_TOKENS + 1
        end = begin + 1
        while end < len(live) and (end + 1 - begin) * pages_max * page_bytes <= GATHER_BYTES:
            # A short row in a group of long ones would read pages for nothing: a quarter more is the limit.
            pages = last[live[end]] // PAGE_TOKENS + 1
            if pages_max - pages > max(4, pages_max // 4):
                break
            end += 1
        rows = live[begin:end]
        contexts_N = torch.tensor([last[run] + 1 for run in rows], device=device)
        rows_N = torch.tensor(rows, device=device)
        read_min = last[rows[-1]] + 1
        places_S = torch.arange(read_min, pages_max * PAGE_TOKENS, device=device)
        left_NS = None
        if window is None:
            pages_NP = runs.page_table_RP[rows_N, :pages_max]
        else:
            skipped_N1 = torch.tensor([skipped[run] for run in rows], device=device)[:, None]
            columns_NP = skipped_N1 + torch.arange(pages_max, device=device)
            # The shorter rows of a group would read past the end of the table.
            columns_NP.clamp_(max=runs.page_table_RP.shape[1] - 1)
            pages_NP = runs.page_table_RP[rows_N[:, None], columns_NP]
            # The window begins inside the first page: its first places are older than the window.
            left_NS = torch.arange(PAGE_TOKENS, device=device) < contexts_N[:, None] - window
        # PAD becomes page 0: any page will do, because the masks leave its places out.
        groups.append(
            Group(
                rows_N,
                contexts_N,
                pages_NP.long().clamp_min_(0),
                read_min,
                places_S >= contexts_N[:, None],
                max(1, GATHER_BYTES // (len(rows) * page_bytes)),
                left_NS,
            )
        )
        begin = end
    return groups, torch.tensor(empty, device=device) if empty else None


def _attend_group(
    q_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scales: torch.Tensor | None,
    group: Group,
    scale: float,
    out_THD: torch.Tensor,
    sinks_TH: torch.Tensor | None,
    bank_RE: torch.Tensor | None,
    cap: float,
) -> None:
    q_NHD, states_NHR = apart(q_THD.index_select(0, group.rows_N), bank_RE)
    rows, page_count = group.pages_NP.shape
    kv_heads, dim = cache_k.shape[1], q_NHD.shape[2]
    heads = q_NHD.shape[1] // kv_heads
    context = page_count * PAGE_TOKENS
    q_BGD = _lane_order(q_NHD.float() * scale, cache_k.shape[-1]).view(rows * kv_heads, heads, dim)
    scores_BGS = scratch.take("paged_attention.scores", (rows * kv_heads, heads, context), torch.float32)
    cuts = [(a, min(a + group.segment, page_count)) for a in range(0, page_count, group.segment)]
    for first, last in cuts:
        keys_BDS = _wide_keys(cache_k, group.pages_NP[:, first:last])
        if len(cuts) == 1:
            torch.bmm(q_BGD, keys_BDS, out=scores_BGS)
        else:
            scores_BGS[:, :, first * PAGE_TOKENS : last * PAGE_TOKENS] = torch.bmm(q_BGD, keys_BDS)
    if scales is not None:
        token_NHGS = scores_BGS.view(rows, kv_heads, heads, context)
        token_NHGS.mul_(_token_scales(scales[:, 0], group.pages_NP)[:, :, None])
    capped_(scores_BGS, cap)
    if bank_RE is not None:
        distance_NS = group.contexts_N[:, None] - 1 - torch.arange(context, device=q_THD.device)
        bias_NHS = relative_bias(states_NHR, bank_RE, distance_NS)
        scores_BGS.view(rows, kv_heads * heads, context).add_(bias_NHS)
    if group.read_min < context:
        tail = scores_BGS.view(rows, kv_heads * heads, context)[:, :, group.read_min :]
        # Replaced, not added to: NaN plus -inf is NaN.
        tail.masked_fill_(group.unread_NS[:, None, :], float("-inf"))
    if group.left_NS is not None:
        head = scores_BGS.view(rows, kv_heads * heads, context)[:, :, :PAGE_TOKENS]
        head.masked_fill_(group.left_NS[:, None], float("-inf"))
    weights_BGS = softmax_with(None if sinks_TH is None else sinks_TH.index_select(0, group.rows_N), scores_BGS)
    if scales is not None:
        v_scale_NHS = _token_scales(scales[:, 1], group.pages_NP)
        if group.read_min < context:
            # A scale of unwritten memory may be NaN, and 0 x NaN is NaN.
            v_scale_NHS[..., group.read_min :].masked_fill_(group.unread_NS[:, None], 0.0)
        if group.left_NS is not None:
            v_scale_NHS[..., :PAGE_TOKENS].masked_fill_(group.left_NS[:, None], 0.0)
        weights_BGS.view(rows, kv_heads, heads, context).mul_(v_scale_NHS[:, :, None])
    out_BGD = torch.zeros(rows * kv_heads, heads, dim, device=q_THD.device)
    for first, last in cuts:
        values_NHSD = _wide_values(cache_v, group.pages_NP[:, first:last])
        begin, end = first * PAGE_TOKENS, last * PAGE_TOKENS
        if group.read_min < end:
            masked_from = max(begin, group.read_min)
            unread = group.unread_NS[:, masked_from - group.read_min : end - group.read_min]
            # 0 x NaN is NaN: a weight of 0 does not hide unwritten memory.
            values_NHSD[:, :, masked_from - begin :].masked_fill_(unread[:, None, :, None], 0.0)
        out_BGD.baddbmm_(weights_BGS[:, :, begin:end], values_NHSD.flatten(0, 1))
    out_THD.index_copy_(0, group.rows_N, out_BGD.view(rows, kv_heads * heads, dim).to(out_THD.dtype))


def _lane_order(q_NHD: torch.Tensor, pack: int) -> torch.Tensor:
    """Return D in the order of ``_wide_keys``: all first elements of the packed lanes, then all second."""
    if pack == 1:
        return q_NHD
    rows, heads, dim = q_NHD.shape
    return q_NHD.view(rows, heads, dim // pack, pack).transpose(-1, -2).reshape(rows, heads, dim)


def _token_scales(scales_PH: torch.Tensor, pages_NP: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, kv_heads, P x 16] of bfloat16 [pages, kv_heads, 16]."""
    gathered = scales_PH[pages_NP].float()
    return gathered.transpose(1, 2).flatten(2)


def _gather(cache: torch.Tensor, pages: torch.Tensor, name: str) -> torch.Tensor:
    gathered = scratch.take(name, (pages.numel(), *cache.shape[1:]), cache.dtype)
    return torch.index_select(cache, 0, pages.reshape(-1), out=gathered)


def _wide_keys(cache_k: torch.Tensor, pages_NP: torch.Tensor) -> torch.Tensor:
    """Return fp32 [N x kv_heads, D, P x 16], D in lane order."""
    rows, pages = pages_NP.shape
    _, kv_heads, lanes, tokens, pack = cache_k.shape
    packed = _gather(cache_k, pages_NP, "paged_attention.k")
    wide = scratch.take("paged_attention.k_wide", (rows, kv_heads, pack, lanes, pages, tokens), torch.float32)
    lane_major = packed.view(rows, pages, kv_heads, lanes, tokens, pack).permute(0, 2, 3, 1, 4, 5)
    if packed.dtype == torch.bfloat16 and pack == 2:
        _split_pairs(lane_major, wide[:, :, 0], wide[:, :, 1])
    else:
        wide.copy_(lane_major.permute(0, 1, 5, 2, 3, 4))
    return wide.view(rows * kv_heads, pack * lanes, pages * tokens)


def _wide_values(cache_v: torch.Tensor, pages_NP: torch.Tensor) -> torch.Tensor:
    """Return fp32 [N, kv_heads, P x 16, D]."""
    rows, pages = pages_NP.shape
    _, kv_heads, lanes, dim, pack = cache_v.shape
    packed = _gather(cache_v, pages_NP, "paged_attention.v")
    wide = scratch.take("paged_attention.v_wide", (rows, kv_heads, pages, lanes, pack, dim), torch.float32)
    head_major = packed.view(rows, pages, kv_heads, lanes, dim, pack).permute(0, 2, 1, 3, 4, 5)
    if packed.dtype == torch.bfloat16 and pack == 2:
        _split_pairs(head_major, wide[:, :, :, :, 0], wide[:, :, :, :, 1])
    else:
        wide.copy_(head_major.transpose(-1, -2))
    return wide.view(rows, kv_heads, pages * lanes * pack, dim)


def _split_pairs(pairs: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Split bf16 ``[..., 2]`` into fp32 halves, by a shift of 32-bit lanes, without touching single elements."""
    # A bf16 is the upper half of the fp32 of the same value.
    lanes = pairs.view(torch.int32).squeeze(-1)
    torch.bitwise_left_shift(lanes, 16, out=first.view(torch.int32))
    torch.bitwise_and(lanes, -65536, out=second.view(torch.int32))


def _attend_run(
    q_LHD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scales: torch.Tensor | None,
    pages: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
    sinks_LH: torch.Tensor | None,
    bank_RE: torch.Tensor | None,
    cap: float,
) -> torch.Tensor:
    """Return the attention of all queries of one prefill run over its context: [L, heads, D] float32. ``pages`` and
    ``context`` begin with the first page that any query reads.
    """
    q_LHD, states_LHR = apart(q_LHD, bank_RE)
    length, q_heads, dim = q_LHD.shape
    _, kv_heads, lanes, tokens, pack = cache_k.shape
    padded = pages.numel() * tokens
    k_packed = _gather(cache_k, pages, "paged_attention.k")
    k_HSD = scratch.take("paged_attention.k_wide", (kv_heads, padded, dim), torch.float32)
    k_HSD.view(kv_heads, pages.numel(), tokens, lanes, pack).copy_(k_packed.permute(1, 0, 3, 2, 4))
    v_packed = _gather(cache_v, pages, "paged_attention.v")
    v_HSD = scratch.take("paged_attention.v_wide", (kv_heads, padded, dim), torch.float32)
    v_HSD.view(kv_heads, pages.numel(), *cache_v.shape[2::2], dim).copy_(v_packed.permute(1, 0, 2, 4, 3))
    if scales is not None:
        for part, x_HSD in enumerate((k_HSD, v_HSD)):
            x_HSD.mul_(_token_scales(scales[:, part], pages[None])[0, ..., None])
    group = q_heads // kv_heads
    q_HGLD = q_LHD.float().view(length, kv_heads, group, dim).permute(1, 2, 0, 3)
    # The query heads of a KV head share its keys by a stride of 0. The cut at `context` drops unwritten
    # memory.
    k_HGSD = k_HSD[:, None, :context].expand(kv_heads, group, context, dim)
    v_HGSD = v_HSD[:, None, :context].expand(kv_heads, group, context, dim)
    places = torch.arange(context, device=q_LHD.device)
    queries_L1 = places[context - length :, None]
    if bank_RE is None and sinks_LH is None and not cap and length == context and (window is None or window >= context):
        attended = F.scaled_dot_product_attention(q_HGLD, k_HGSD, v_HGSD, is_causal=True, scale=scale)
        return attended.permute(2, 0, 1, 3).reshape(length, q_heads, dim)
    count = max(1, _BIASES // (q_heads * context)) if cap or bank_RE is not None else length
    parts = []
    for a in range(0, length, count):
        rows = slice(a, a + count)
        distance_LS = queries_L1[rows] - places
        if bank_RE is None:
            seen = (distance_LS >= 0) & (distance_LS < (context if window is None else window))
        else:
            seen = bias_mask(states_LHR[rows], bank_RE, distance_LS, kv_heads, window)
        own_sinks = None if sinks_LH is None else sinks_LH[rows]
        parts.append(attended_with(own_sinks, q_HGLD[:, :, rows], k_HGSD, v_HGSD, seen, scale, cap))
    attended = torch.cat(parts, dim=2)
    return attended.permute(2, 0, 1, 3).reshape(length, q_heads, dim)


def capped_(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Return ``scores``, which hold cap x tanh(score / cap) then (Gemma 2); unchanged for a ``cap`` of 0."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def softmax_with(sinks_NH: torch.Tensor | None, scores_BGS: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dim of ``scores_BGS`` [n x kv_heads, G, S], the sinks in its sums."""
    if sinks_NH is None:
        return torch.softmax(scores_BGS, dim=-1)
    heads_BG1 = sinks_NH.reshape(*scores_BGS.shape[:2], 1)
    # e^x / (sum + e^sink) is e^x / sum times the logistic of log sum - sink, so the scores need no further column.
    rest_BG1 = torch.sigmoid(torch.logsumexp(scores_BGS, dim=-1, keepdim=True) - heads_BG1)
    return torch.softmax(scores_BGS, dim=-1) * rest_BG1


def attended_with(
    sinks_LH: torch.Tensor | None,
    q_HGLD: torch.Tensor,
    k_HGSD: torch.Tensor,
    v_HGSD: torch.Tensor,
    seen_LS: torch.Tensor,
    scale: float,
    cap: float = 0.0,
) -> torch.Tensor:
    """Compute one fused attention call, the sinks in its sums: [kv_heads, G, L, D]. A sink is one more key, whose
    product with a query is the sink through one more dim, and whose value is zero. Scores with a ``cap`` are separate
    products and a softmax. ``seen_LS``: bool, or float32 numbers [kv_heads, G, L, S] that are added to the scores.
    """
    if cap:
        assert sinks_LH is None, "scores with a cap have no sinks"
        scores_HGLS = capped_(torch.matmul(q_HGLD * scale, k_HGSD.transpose(-1, -2)), cap)
        scores_HGLS.masked_fill_(~seen_LS, float("-inf"))
        return scores_HGLS.softmax(-1).matmul(v_HGSD)
    if sinks_LH is None:
        return F.scaled_dot_product_attention(q_HGLD, k_HGSD, v_HGSD, attn_mask=seen_LS, scale=scale)
    kv_heads, group, length, dim = q_HGLD.shape
    own_HGL1 = (sinks_LH.float() / scale).T.reshape(kv_heads, group, length, 1)
    q_HGLD = torch.cat((q_HGLD, own_HGL1), dim=-1)
    key_HSD, value_HSD = (F.pad(x_HGSD[:, 0], (0, 1, 0, 1)) for x_HGSD in (k_HGSD, v_HGSD))
    key_HSD[:, -1, -1] = 1.0
    wide = (kv_heads, group, *key_HSD.shape[1:])
    attended = F.scaled_dot_product_attention(
        q_HGLD,
        key_HSD[:, None].expand(wide),
        value_HSD[:, None].expand(wide),
        attn_mask=F.pad(seen_LS, (0, 1), value=seen_LS.dtype == torch.bool),
        scale=scale,
    )
    return attended[..., :dim]
