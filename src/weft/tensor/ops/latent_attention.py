"""Causal attention over cached latents: one row per token, shared by all heads as key and value. In torch:

    decode   rows in groups of similar context (as in ``paged_attention``):
             gather pages once -> to fp32 [n, W, context] -> q.x -> mask -> softmax -> weights.x
    prefill  per run: gather -> to fp32 -> one fused attention call whose keys and values are the same tensor

Prefill uses the absorbed form too. It costs 2 W / (key + value width of a head) times the arithmetic of expanded
heads. But it does not expand the full context for every chunk of a prompt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.few_bits import as_bytes, narrowed, quantized
from weft.tensor.inputs import Runs
from weft.tensor.op import op
from weft.tensor.ops.paged_attention import Group, group_decodes
from weft.tensor.ops.write_kv import places_of
from weft.tensor.scratch import scratch
from weft.units import PAD, PAGE_TOKENS, pages_for


@op("weft.tensor.kernels.latent_attention")
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
    """Write the rows ``x_TW`` of this step's tokens into their pages. Then return the first ``value_dim``
    numbers of ``softmax(scale * q . x_[0..p]) x_[0..p]`` for the token at position p and each head:
    [T, heads, value_dim] in the dtype of ``q_THW``.

    ``q_THW`` [T, heads, W]: the query in the latent's space (the key projection is absorbed). ``cache`` [P,
    1, W/pack, 16, pack]: a K block as in ``tensor.layout``, without a V block; int8 pages have ``scales``
    bfloat16 [P, 1, 1, 16]. Pages, PAD and unwritten memory as in ``write_kv`` and ``paged_attention``.
    Softmax and sums are float32.

    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """
    write_rows(x_TW, cache, positions_T, runs, scales)
    # Zeros: PAD rows are in no group, and return them.
    out_THV = torch.zeros(*q_THW.shape[:2], value_dim, dtype=q_THW.dtype, device=q_THW.device)
    page_bytes = cache[0].numel() * cache.itemsize if cache.shape[0] else 1
    groups, _ = runs.once(f"latent_attention.{page_bytes}", lambda: group_decodes(runs, page_bytes))
    for group in groups:
        _attend_group(q_THW, cache, scales, group, scale, out_THV)
    for run in range(runs.decode_count, runs.run_count):
        if runs.starts[run] == PAD:
            continue
        begin, length = runs.offsets[run], runs.lengths[run]
        context = runs.starts[run] + length
        pages = runs.page_table_RP[run, : pages_for(context)].long()
        rows_SW = read_rows(cache, scales, pages[None])[0, :context]
        attended = _attend_run(q_THW[begin : begin + length], rows_SW, scale)
        out_THV[begin : begin + length] = attended[..., :value_dim]
    return out_THV


@op("weft.tensor.kernels.latent_attention")
def write_latents(
    x_TW: torch.Tensor, cache: torch.Tensor, positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None = None
) -> None:
    """Write the rows ``x_TW`` as ``latent_attention`` does, and nothing more."""
    write_rows(x_TW, cache, positions_T, runs, scales)


def write_rows(
    x_TW: torch.Tensor, cache: torch.Tensor, positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None
) -> None:
    where = places_of(positions_T, runs)
    put_rows(x_TW if where.tokens is None else x_TW[where.tokens], cache, scales, where.pages, where.places)


def put_rows(
    x_NW: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, places: torch.Tensor
) -> None:
    """Write row i to place ``places[i]`` of page ``pages[i]``."""
    lanes, pack = cache.shape[2], cache.shape[4]
    if scales is not None:
        x_N1W, scale_N1 = quantized(x_NW[:, None])
        x_NW = x_N1W[:, 0]
        scales[pages, 0, 0, places] = scale_N1[:, 0]
    rows_NLP = as_bytes(narrowed(x_NW, cache.dtype)).view(-1, lanes, pack)
    as_bytes(cache)[pages, 0, :, places] = rows_NLP


def rows_of(
    cache: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Return float32 [*pages.shape, W]: single rows. ``places``: of the shape of ``pages``."""
    wide = cache[pages, 0, :, places].float().flatten(-2)
    return wide if scales is None else wide * scales[pages, 0, 0, places].float()[..., None]


def read_rows(cache: torch.Tensor, scales: torch.Tensor | None, pages_NP: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, P x 16, W] in scratch memory: the rows of each list of pages."""
    count, pages = pages_NP.shape
    _, _, lanes, tokens, pack = cache.shape
    packed = scratch.take("latent_attention.packed", (count * pages, *cache.shape[1:]), cache.dtype)
    torch.index_select(cache, 0, pages_NP.reshape(-1), out=packed)
    wide = scratch.take("latent_attention.rows", (count, pages, tokens, lanes, pack), torch.float32)
    wide.copy_(packed.view(count, pages, lanes, tokens, pack).transpose(2, 3))
    if scales is not None:
        wide.mul_(scales[:, 0, 0][pages_NP].float()[..., None, None])
    return wide.view(count, pages * tokens, lanes * pack)


def _attend_group(
    q_THW: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    group: Group,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    count, page_count = group.pages_NP.shape
    heads, value_dim = out_THV.shape[1:]
    context = page_count * PAGE_TOKENS
    # Every head reads the same rows, so the heads are the rows of one product.
    q_NHW = q_THW.index_select(0, group.rows_N).float() * scale
    scores_NHS = scratch.take("latent_attention.scores", (count, heads, context), torch.float32)
    cuts = [(a, min(a + group.segment, page_count)) for a in range(0, page_count, group.segment)]
    rows_NSW = None
    for first, last in cuts:
        rows_NSW = read_rows(cache, scales, group.pages_NP[:, first:last])
        begin, end = first * PAGE_TOKENS, last * PAGE_TOKENS
        scores_NHS[:, :, begin:end] = torch.bmm(q_NHW, rows_NSW.transpose(1, 2))
    if group.read_min < context:
        scores_NHS[:, :, group.read_min :].masked_fill_(group.unread_NS[:, None], float("-inf"))
    weights_NHS = torch.softmax(scores_NHS, dim=-1)
    out_NHV = torch.zeros(count, heads, value_dim, device=q_THW.device)
    for first, last in cuts:
        if len(cuts) > 1 or rows_NSW is None:
            # With one cut the rows of the scores are still in the buffer: gathered once, read twice.
            rows_NSW = read_rows(cache, scales, group.pages_NP[:, first:last])
        begin, end = first * PAGE_TOKENS, last * PAGE_TOKENS
        masked_from = max(begin, group.read_min)
        if masked_from < end:
            unread = group.unread_NS[:, masked_from - group.read_min : end - group.read_min]
            # 0 x NaN is NaN: a weight of 0 does not hide unwritten memory (L6).
            rows_NSW[:, masked_from - begin :].masked_fill_(unread[..., None], 0.0)
        out_NHV.baddbmm_(weights_NHS[:, :, begin:end], rows_NSW[..., :value_dim])
    out_THV.index_copy_(0, group.rows_N, out_NHV.to(out_THV.dtype))


def _attend_run(q_LHW: torch.Tensor, rows_SW: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of all queries of one prefill run over its context: [L, heads, W] float32."""
    length, heads, width = q_LHW.shape
    context = rows_SW.shape[0]
    q_1HLW = q_LHW.float().transpose(0, 1)[None]
    known_1HSW = rows_SW.expand(1, heads, context, width)
    # The fused form needs no mask in memory; it only takes a square.
    if length == context:
        attended = F.scaled_dot_product_attention(q_1HLW, known_1HSW, known_1HSW, is_causal=True, scale=scale)
    else:
        places = torch.arange(context, device=rows_SW.device)
        seen = places <= places[context - length :, None]
        attended = F.scaled_dot_product_attention(q_1HLW, known_1HSW, known_1HSW, attn_mask=seen, scale=scale)
    return attended[0].transpose(0, 1)
