"""Attention over blocks that an index chooses: the choice, and the reading of the chosen blocks.

    index rows of a sequence   | r0 r1 r2 K0 | r4 r5 r6 K1 | r8 r9 ..    one for each token, in pages
                                          ^ the last token of a block has the block's key, made of all its
                                          rows
    score of a query           sum over its heads of weight x relu(q . K)
    the token at p sees        the best ``chosen`` blocks that end before or at p, and all later tokens up to p

A key takes the place of its block's last row, which nothing reads again. So a step reads one row for each block. A
draft that turns out wrong may have ended a block; the token that replaces it ends the block again. The row of a block
of one token is its key.

A step none of whose tokens has more blocks than ``chosen`` reads everything, by the ordinary ops. Otherwise each run
is computed by itself. A few tokens gather the tokens that they see; those of a prompt read, with a mask, the pages
that any of them sees, at the price of full attention. All operators are torch's. Scores are float64 and rounded once,
so that the choice does not depend on the shape of a product.

MiniMax M3 chooses apart for each KV head, among blocks whose score is that of their best token.

Sources: transformers ``Qwen4ExpTextQSAIndexer``, ``Glm5NextTextIndexer``, ``DeepseekV32Indexer``,
``MiniMaxM3VLIndexer``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from weft.families.mixers.attention import Index
from weft.tensor.inputs import LayerCache, Runs
from weft.tensor.layout import unpack_k, unpack_v
from weft.tensor.ops.latent_attention import put_rows, read_rows, rows_of, write_rows
from weft.tensor.ops.paged_attention import softmax_with
from weft.units import PAD, PAGE_TOKENS, pages_for

Seen = list[torch.Tensor | None]
"""Tokens seen, by run: bool [L, context] or [KV heads, L, context], one row for each token of the run; None if each
token sees all tokens up to itself.
"""
BlockKeys = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from index rows float32 [N, block, W] of blocks, and their numbers [N], to keys [N, key_dim]."""
SCORES_AT_ONCE = 1 << 22
"""Scores (of head, block and token) computed at once."""
_FEW = 8
"""Most tokens of a run whose seen tokens are gathered for each of them."""


def write_index(
    row_TW: torch.Tensor, block_keys: BlockKeys, cache: LayerCache, positions_T: torch.Tensor, runs: Runs, shape: Index
) -> None:
    """Write the index rows of the step's tokens into their pages, and the keys of blocks that end in the step."""
    assert cache.k is not None, "an index without pages"
    scale = None if cache.head_scales is None else cache.head_scales[0, 0]
    write_rows(row_TW if scale is None else row_TW / scale, cache.k, positions_T, runs, cache.token_scales)
    if shape.keeps_keys:
        return
    pages_NK, places_NK, numbers_N = ended_blocks(runs, shape.block)
    if not len(numbers_N):
        return
    rows_NKW = rows_of(cache.k, cache.token_scales, pages_NK, places_NK)
    keys_ND = block_keys(rows_NKW if scale is None else rows_NKW * scale.float(), numbers_N).to(row_TW.dtype)
    keys_NW = F.pad(keys_ND if scale is None else keys_ND / scale, (0, row_TW.shape[1] - keys_ND.shape[1]))
    put_rows(keys_NW, cache.k, cache.token_scales, pages_NK[:, -1], places_NK[:, -1])


Ended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Ended blocks: pages and places of their tokens [N, block], and numbers [N]."""


def ended_blocks(runs: Runs, block: int) -> Ended:
    """Return the blocks that end in this step."""
    return runs.once(f"chosen_blocks.{block}", lambda: _ended(runs, block))


def _ended(runs: Runs, block: int) -> Ended:
    device = runs.page_table_RP.device
    run_N: list[int] = []
    number_N: list[int] = []
    for run, (start, length) in enumerate(zip(runs.starts, runs.lengths, strict=True)):
        if start != PAD:
            own = range(start // block, (start + length) // block)
            run_N += [run] * len(own)
            number_N += own
    numbers_N = torch.tensor(number_N, dtype=torch.int64, device=device)
    runs_N1 = torch.tensor(run_N, dtype=torch.int64, device=device)[:, None]
    tokens_NK = numbers_N[:, None] * block + torch.arange(block, device=device)
    return runs.page_table_RP[runs_N1, tokens_NK // PAGE_TOKENS].long(), tokens_NK % PAGE_TOKENS, numbers_N


def sees_all(runs: Runs, shape: Index) -> bool:
    """Return whether no token of the step has blocks that are not chosen."""
    return all(
        shape.blocks_of(start + length) <= shape.chosen for start, length in zip(runs.starts, runs.lengths, strict=True)
    )


def choose_blocks(q_THD: torch.Tensor, weights_TH: torch.Tensor, cache: LayerCache, runs: Runs, shape: Index) -> Seen:
    """Return the tokens that each token sees. ``q_THD`` [T, queries, key_dim]; ``weights_TH``: of the queries in the
    sum. ``cache``: the index rows, with those of this step.
    """
    assert cache.k is not None, "an index without pages"
    seen: Seen = []
    for run in range(runs.run_count):
        context = runs.starts[run] + runs.lengths[run]
        blocks = context // shape.block
        if runs.starts[run] == PAD or blocks <= shape.chosen:
            seen.append(None)
            continue
        ends_B = torch.arange(1, blocks + 1, device=q_THD.device) * shape.block - 1
        keys_BD = _keys_at(ends_B, run, cache, runs, shape)
        positions_L = torch.arange(runs.starts[run], context, device=q_THD.device)
        begin, step = runs.offsets[run], max(1, SCORES_AT_ONCE // (shape.queries * blocks))
        parts = []
        for first in range(0, runs.lengths[run], step):
            rows = slice(begin + first, begin + min(first + step, runs.lengths[run]))
            scores_LHB = F.relu_(q_THD[rows].double() @ keys_BD.T)
            scores_LB = (scores_LHB * weights_TH[rows, :, None].double()).sum(1).float()
            parts.append(_best(scores_LB, positions_L[first : first + step], context, shape))
        seen.append(torch.cat(parts))
    return seen


def _keys_at(tokens_N: torch.Tensor, run: int, cache: LayerCache, runs: Runs, shape: Index) -> torch.Tensor:
    """Return float64 [N, key_dim], the keys in the rows of tokens of a run."""
    assert cache.k is not None, "an index without pages"
    pages_N = runs.page_table_RP[run, tokens_N // PAGE_TOKENS].long()
    rows_NW = rows_of(cache.k, cache.token_scales, pages_N, tokens_N % PAGE_TOKENS)
    keys_ND = rows_NW[:, : shape.key_dim].double()
    return keys_ND if cache.head_scales is None else keys_ND * cache.head_scales[0, 0].double()


def choose_by_maxima(q_THD: torch.Tensor, cache: LayerCache, runs: Runs, shape: Index) -> Seen:
    """Return the tokens that the queries of each KV head see, by the best token of each block. ``q_THD`` [T, KV heads,
    key_dim]. ``cache``: the index rows, with those of this step.
    """
    seen: Seen = []
    for run in range(runs.run_count):
        context = runs.starts[run] + runs.lengths[run]
        if runs.starts[run] == PAD or shape.blocks_of(context) <= shape.chosen:
            seen.append(None)
            continue
        places_S = torch.arange(context, device=q_THD.device)
        keys_SD = _keys_at(places_S, run, cache, runs, shape)
        begin, step = runs.offsets[run], max(1, SCORES_AT_ONCE // (q_THD.shape[1] * context))
        parts = []
        for first in range(0, runs.lengths[run], step):
            count = min(step, runs.lengths[run] - first)
            q_HLD = q_THD[begin + first : begin + first + count].transpose(0, 1).double()
            positions_L = places_S[runs.starts[run] + first :][:count]
            parts.append(_best_by_maxima(q_HLD @ keys_SD.T, positions_L, shape))
        seen.append(torch.cat(parts, dim=1))
    return seen


def _best_by_maxima(scores_HLS: torch.Tensor, positions_L: torch.Tensor, shape: Index) -> torch.Tensor:
    """Return bool [KV heads, L, context], the tokens of the best blocks."""
    context, blocks = scores_HLS.shape[2], shape.blocks_of(scores_HLS.shape[2])
    seen_LS = torch.arange(context, device=scores_HLS.device) <= positions_L[:, None]
    scores_HLS = F.pad(
        scores_HLS.masked_fill(~seen_LS, -torch.inf), (0, blocks * shape.block - context), value=-torch.inf
    )
    scores_HLB = torch.unflatten(scores_HLS, 2, (blocks, shape.block)).amax(-1).float()
    before_LB = positions_L[:, None] // shape.block - torch.arange(blocks, device=scores_HLS.device)
    scores_HLB = scores_HLB.masked_fill((before_LB >= 0) & (before_LB < shape.near), torch.inf)
    best_HLK = scores_HLB.sort(descending=True, stable=True).indices[..., : shape.chosen]
    chosen_HLB = torch.zeros_like(scores_HLB, dtype=torch.bool).scatter_(2, best_HLK, True)
    return chosen_HLB.repeat_interleave(shape.block, 2)[..., :context] & seen_LS


def _best(scores_LB: torch.Tensor, positions_L: torch.Tensor, context: int, shape: Index) -> torch.Tensor:
    """Return bool [L, context], the tokens of the best blocks."""
    blocks = scores_LB.shape[1]
    whole_L1 = ((positions_L + 1) // shape.block)[:, None]
    known_LB = torch.arange(blocks, device=scores_LB.device) < whole_L1
    # Among equal scores (all queries below 0) the earliest block wins: topk promises nothing.
    ranked_LB = scores_LB.masked_fill(~known_LB, -torch.inf).sort(descending=True, stable=True).indices
    best_LK = ranked_LB[:, : shape.chosen]
    chosen_LB = torch.zeros_like(known_LB).scatter_(1, best_LK, True) & known_LB
    places_S = torch.arange(context, device=scores_LB.device)
    seen_LS = F.pad(chosen_LB.repeat_interleave(shape.block, 1), (0, context - blocks * shape.block))
    return (seen_LS | (places_S >= whole_L1 * shape.block)) & (places_S <= positions_L[:, None])


def within(window: int, runs: Runs) -> Seen | None:
    """Return the last ``window`` tokens up to each token; None if they are all tokens before it."""
    return runs.once(f"chosen_blocks.within.{window}", lambda: _within(window, runs))


def _within(window: int, runs: Runs) -> Seen | None:
    contexts = [start + length for start, length in zip(runs.starts, runs.lengths, strict=True)]
    if max(contexts, default=0) <= window:
        return None
    seen: Seen = []
    for start, context in zip(runs.starts, contexts, strict=True):
        if start == PAD or context <= window:
            seen.append(None)
            continue
        places_S = torch.arange(context, device=runs.page_table_RP.device)
        before_LS = places_S[start:, None] - places_S
        seen.append((before_LS >= 0) & (before_LS < window))
    return seen


def attend_seen(
    q_THD: torch.Tensor,
    cache: LayerCache,
    runs: Runs,
    scale: float,
    seen: Seen,
    value_dim: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(scale q . k) v`` of each token over the tokens that it sees: [T, heads, value dim] in the dtype
    of ``q_THD``. The step's own keys are written. ``value_dim``: of latents, the first numbers of a row, which is the
    key of all heads. ``sinks_H`` float32 [heads]: scores that take part in the sum of the softmax, without a value. PAD
    rows give zeros; unwritten memory does not reach the output.
    """
    assert cache.k is not None, "an attention layer without pages"
    width = q_THD.shape[2] if value_dim is None else value_dim
    out_THV = torch.zeros(*q_THD.shape[:2], width, dtype=q_THD.dtype, device=q_THD.device)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        rows = slice(runs.offsets[run], runs.offsets[run] + runs.lengths[run])
        context = runs.starts[run] + runs.lengths[run]
        mask_LS = seen[run]
        if mask_LS is None:
            places = torch.arange(context, device=q_THD.device)
            mask_LS = places <= places[context - runs.lengths[run] :, None]
        table_P = runs.page_table_RP[run, : pages_for(context)].long()
        attend = _gathered if runs.lengths[run] <= _FEW else _masked
        q_LHD = q_THD[rows].float() * scale
        if mask_LS.ndim == 2:
            out_LHV = attend(q_LHD, cache, table_P, mask_LS, value_dim, slice(None), sinks_H)
        else:
            assert sinks_H is None, "heads that choose apart have no sinks"
            out_LHV = torch.cat(
                [
                    attend(q_LGD, cache, table_P, mask_LS[head], value_dim, slice(head, head + 1))
                    for head, q_LGD in enumerate(q_LHD.chunk(len(mask_LS), 1))
                ],
                dim=1,
            )
        out_THV[rows] = out_LHV.to(out_THV.dtype)
    return out_THV


def _gathered(
    q_LHD: torch.Tensor,
    cache: LayerCache,
    table_P: torch.Tensor,
    mask_LS: torch.Tensor,
    value_dim: int | None,
    heads: slice,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of each token over only the tokens that it sees. ``heads``: the KV heads of the queries."""
    out = []
    for q_HD, mask_S in zip(q_LHD, mask_LS, strict=True):
        [tokens_N] = mask_S.nonzero(as_tuple=True)
        pages_N, places_N = table_P[tokens_N // PAGE_TOKENS], tokens_N % PAGE_TOKENS
        k_NKD, v_NKV = _tokens(cache, pages_N, places_N, value_dim, heads)
        q_KGD = q_HD.view(k_NKD.shape[1], -1, q_HD.shape[1])
        weights_KGN = softmax_with(None if sinks_H is None else sinks_H[None], q_KGD @ k_NKD.permute(1, 2, 0))
        out.append((weights_KGN @ v_NKV.transpose(0, 1)).flatten(0, 1))
    return torch.stack(out)


def _tokens(
    cache: LayerCache, pages_N: torch.Tensor, places_N: torch.Tensor, value_dim: int | None, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [N, heads, dim]: keys and values of single tokens."""
    k, v, scales = cache.k, cache.v, cache.token_scales
    assert k is not None
    if value_dim is not None:
        rows_N1W = rows_of(k, scales, pages_N, places_N)[:, None]
        return rows_N1W, rows_N1W[..., :value_dim]
    assert v is not None, "an attention layer without pages"
    pack = v.shape[-1]
    v_NKD = v[pages_N, heads, places_N // pack, :, places_N % pack].float()
    if scales is not None:
        v_NKD = v_NKD * scales[pages_N, 1, heads, places_N].float()[..., None]
    return keys_of(cache, pages_N, places_N, heads), v_NKD


def keys_of(cache: LayerCache, pages: torch.Tensor, places: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
    """Return float32 [*pages.shape, heads, dim]: keys of single tokens, as they are in their pages."""
    assert cache.k is not None, "an attention layer without pages"
    keys = cache.k[pages, heads, :, places].float().flatten(-2)
    if cache.token_scales is None:
        return keys
    return keys * cache.token_scales[pages, 0, heads, places].float()[..., None]


def _masked(
    q_LHD: torch.Tensor,
    cache: LayerCache,
    table_P: torch.Tensor,
    mask_LS: torch.Tensor,
    value_dim: int | None,
    heads: slice,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of all tokens of a run over the pages that any of them sees."""
    length, context = mask_LS.shape
    mask_LPS = F.pad(mask_LS, (0, len(table_P) * PAGE_TOKENS - context)).view(length, -1, PAGE_TOKENS)
    read_P = mask_LPS.any(2).any(0)
    mask_LS = mask_LPS[:, read_P].flatten(1)
    k_SKD, v_SKV = _keys_and_values(cache, table_P[read_P], value_dim, heads)
    # NaN of unwritten memory would pass a mask.
    nobodys_S11 = ~mask_LS.any(0)[:, None, None]
    k_SKD, v_SKV = k_SKD.masked_fill(nobodys_S11, 0.0), v_SKV.masked_fill(nobodys_S11, 0.0)
    if sinks_H is not None:  # a further key, whose product with a query is the sink, and whose value is zero
        q_LHD = torch.cat((q_LHD, sinks_H[:, None].expand(length, -1, 1)), dim=-1)
        k_SKD, v_SKV = F.pad(k_SKD, (0, 1, 0, 0, 0, 1)), F.pad(v_SKV, (0, 0, 0, 0, 0, 1))
        k_SKD[-1, :, -1] = 1.0
        mask_LS = F.pad(mask_LS, (0, 1), value=True)
    q_1HLD, k_1KSD, v_1KSV = (x.transpose(0, 1)[None] for x in (q_LHD, k_SKD, v_SKV))
    return F.scaled_dot_product_attention(q_1HLD, k_1KSD, v_1KSV, attn_mask=mask_LS, scale=1.0, enable_gqa=True)[
        0
    ].transpose(0, 1)


def _keys_and_values(
    cache: LayerCache, pages: torch.Tensor, value_dim: int | None, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [S, heads, dim] of the tokens of ``pages``."""
    assert cache.k is not None
    scales = cache.token_scales
    if value_dim is not None:
        rows_S1W = read_rows(cache.k, scales, pages[None])[0, :, None]
        return rows_S1W, rows_S1W[..., :value_dim]
    assert cache.v is not None, "an attention layer without pages"
    k_SHD = unpack_k(cache.k[:, heads][pages]).float()
    v_SHV = unpack_v(cache.v[:, heads][pages]).float()
    if scales is None:
        return k_SHD, v_SHV
    k_scale_SH1, v_scale_SH1 = (
        scales[:, part, heads][pages].float().transpose(1, 2).flatten(0, 1)[..., None] for part in (0, 1)
    )
    return k_SHD * k_scale_SH1, v_SHV * v_scale_SH1
