"""The choice of blocks by means of an attention's own keys (InfLLM-v2): each KV head chooses for its queries.

    keys of a sequence      | k k k k | k k k k | k k k k | k k k k | k ..     in pages
    means of ``stride``     |    m0   |    m1   |    m2   |    m3   |          index rows
    windows of two means       (m0 + m1) / 2,  (m1 + m2) / 2,  ..
    wide windows of eight      (m0 + .. + m7) / 8,  (m4 + .. + m11) / 8,  ..

    share of a window       sum over the queries of a KV head of exp(q . window - log sum over the wide
                            windows of exp(q . wide))
    score of a block        the largest share of the windows that touch it
    the token at p sees     the best ``chosen`` blocks, up to itself; the first ones, its own and those near
                            it are always among them

A token sees all earlier tokens while the text up to it is shorter than ``dense`` tokens. A token sees windows that end
before or at it. So the choice depends on the token's place and the text before it, not on chunks. The tokens of a mean
are in one page and store it together: each has a part of its numbers. A draft that turns out wrong may have ended a
mean; the token that replaces it ends the mean again.

The wide windows represent all windows in the sum of the softmax: their number is a quarter. All operators are torch's.
Scores are float64 and rounded once, as in ``chosen_blocks``.

Sources: Zhao et al., "InfLLM-V2" (2025); ``modeling_minicpm_sala.py`` of openbmb's repository MiniCPM-SALA. Where this
differs: decision 0077.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.families.mixers.attention import KeyIndex
from weft.tensor.inputs import LayerCache, Runs
from weft.tensor.ops.chosen_blocks import SCORES_AT_ONCE, Seen, ended_blocks, keys_of
from weft.tensor.ops.latent_attention import put_rows, read_rows
from weft.units import PAD, pages_for

STEP_MEANS = 4
"""Means from one wide window to the next; a wide window has twice this number."""


def write_means(cache: LayerCache, runs: Runs, shape: KeyIndex) -> None:
    """Write the means that end in this step, whose keys are written."""
    index, pages = _index_of(cache)
    pages_NK, places_NK, numbers_N = ended_blocks(runs, shape.stride)
    if not len(numbers_N):
        return
    mean_NHD = keys_of(cache, pages_NK, places_NK).double().mean(1)
    if cache.head_scales is not None:
        mean_NHD = mean_NHD * cache.head_scales[0, :, None].double()
    if index.head_scales is not None:
        mean_NHD = mean_NHD / index.head_scales[0, 0].double()
    width = pages.shape[2] * pages.shape[4]
    mean_NC = mean_NHD.flatten(1).float()
    rows_NC = F.pad(mean_NC, (0, width * shape.stride - mean_NC.shape[1]))
    put_rows(rows_NC.view(-1, width), pages, index.token_scales, pages_NK.flatten(), places_NK.flatten())


def _index_of(cache: LayerCache) -> tuple[LayerCache, torch.Tensor]:
    """Return the index of ``cache``, with its pages."""
    index = cache.index
    assert index is not None, "an index without pages"
    assert index.k is not None, "an index without pages"
    return index, index.k


def sees_all(runs: Runs, shape: KeyIndex) -> bool:
    """Return whether no token of the step has blocks that are not chosen."""
    return all(
        _sees_all(start + length, shape)
        for start, length in zip(runs.starts, runs.lengths, strict=True)
        if start != PAD
    )


def _sees_all(context: int, shape: KeyIndex) -> bool:
    return context < shape.dense or -(-context // shape.block) <= shape.chosen


def choose_by_means(q_THD: torch.Tensor, cache: LayerCache, runs: Runs, shape: KeyIndex, scale: float) -> Seen:
    """Return the tokens that each token sees, by run: bool [KV heads, L, context]. ``q_THD`` [T, heads, D]: as
    multiplied with keys. ``cache``: with the step's keys and means.
    """
    seen: Seen = []
    for run in range(runs.run_count):
        context = runs.starts[run] + runs.lengths[run]
        if runs.starts[run] == PAD or _sees_all(context, shape):
            seen.append(None)
            continue
        mean_MKD = _means(cache, runs.page_table_RP[run], context // shape.stride, shape)
        rows = slice(runs.offsets[run], runs.offsets[run] + runs.lengths[run])
        positions_L = torch.arange(runs.starts[run], context, device=q_THD.device)
        q_LKGD = torch.unflatten(q_THD[rows], 1, (mean_MKD.shape[1], -1))
        seen.append(
            torch.stack(
                [
                    _seen_by(q_LKGD[:, head].double() * scale, mean_MD, positions_L, context, shape)
                    for head, mean_MD in enumerate(mean_MKD.transpose(0, 1).contiguous())
                ]
            )
        )
    return seen


def _means(cache: LayerCache, table_P: torch.Tensor, count: int, shape: KeyIndex) -> torch.Tensor:
    """Return the first ``count`` means of a sequence: float64 [count, KV heads, D]."""
    index, pages = _index_of(cache)
    assert cache.k is not None, "an attention layer without pages"
    heads, dim = cache.k.shape[1], cache.k.shape[2] * cache.k.shape[4]
    pages_1P = table_P[None, : pages_for(count * shape.stride)].long()
    rows_SW = read_rows(pages, index.token_scales, pages_1P)[0, : count * shape.stride]
    mean_MKD = rows_SW.reshape(count, -1)[:, : heads * dim].view(count, heads, dim).double()
    return mean_MKD if index.head_scales is None else mean_MKD * index.head_scales[0, 0].double()


def _seen_by(
    q_LGD: torch.Tensor, mean_MD: torch.Tensor, positions_L: torch.Tensor, context: int, shape: KeyIndex
) -> torch.Tensor:
    """Return the tokens that tokens at ``positions_L`` see for the queries of one KV head: bool [L, context]."""
    windows_WD = (mean_MD[:-1] + mean_MD[1:]) / 2
    four_VD = mean_MD[: len(mean_MD) // STEP_MEANS * STEP_MEANS].view(-1, STEP_MEANS, mean_MD.shape[1]).sum(1)
    wide_VD = (four_VD[:-1] + four_VD[1:]) / (2 * STEP_MEANS)
    step = max(1, SCORES_AT_ONCE // (q_LGD.shape[1] * len(windows_WD)))
    parts = []
    for first in range(0, len(q_LGD), step):
        rows = slice(first, first + step)
        share_LW = _shares(q_LGD[rows], windows_WD, wide_VD, positions_L[rows], shape.stride)
        parts.append(_best(share_LW, positions_L[rows], context, shape))
    return torch.cat(parts)


def _shares(
    q_LGD: torch.Tensor, windows_WD: torch.Tensor, wide_VD: torch.Tensor, positions_L: torch.Tensor, stride: int
) -> torch.Tensor:
    """Return the shares summed over the queries: float32 [L, W]. Shares of windows that a token does not see are
    unused.
    """
    # The first wide window is used if there is none yet: such tokens see everything.
    wide_L = ((positions_L + 1) // stride // STEP_MEANS - 1).clamp_(min=1)
    later_LV = torch.arange(len(wide_VD), device=q_LGD.device) >= wide_L[:, None]
    wide_LGV = (q_LGD @ wide_VD.T).masked_fill_(later_LV[:, None], -torch.inf)
    return (q_LGD @ windows_WD.T - wide_LGV.logsumexp(-1, keepdim=True)).exp_().sum(1).float()


def _best(share_LW: torch.Tensor, positions_L: torch.Tensor, context: int, shape: KeyIndex) -> torch.Tensor:
    """Return bool [L, context], the tokens of the best blocks."""
    blocks, each = -(-context // shape.block), shape.block // shape.stride
    # The window before a block's first reaches into it. Padding belongs to blocks near the last token.
    share_LW = F.pad(share_LW, (0, blocks * each - share_LW.shape[1]))
    score_LB = F.max_pool1d(share_LW[:, None], each + 1, each, padding=1)[:, 0, :blocks]
    numbers_B, own_L1 = torch.arange(blocks, device=share_LW.device), (positions_L // shape.block)[:, None]
    known_LB = numbers_B <= own_L1
    always_LB = (numbers_B < shape.first) | (numbers_B >= own_L1 - shape.near)
    score_LB = score_LB.masked_fill(always_LB, torch.inf).masked_fill(~known_LB, -torch.inf)
    # Ties are usual: a window between two blocks may give both their score. The earlier block wins.
    best_LK = score_LB.sort(descending=True, stable=True).indices[:, : shape.chosen]
    chosen_LB = torch.zeros_like(known_LB).scatter_(1, best_LK, True)
    seen_LS = chosen_LB.repeat_interleave(shape.block, 1)[:, :context]
    places_S = torch.arange(context, device=share_LW.device)
    return (seen_LS | (positions_L + 1 < shape.dense)[:, None]) & (places_S <= positions_L[:, None])
