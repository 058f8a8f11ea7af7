"""write_kv in torch: one scatter for K and one for V, over the whole step.

K is scattered in words of 32 bits, which lie together in both layouts. V's pairs are two tokens in packed
pages, so its elements go one by one. The destination of each token is the same for every layer and is
computed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.tensor.inputs import Runs
from weft.tensor.kv_numbers import as_bytes, narrowed, quantized
from weft.units import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Places:
    """``tokens``: indices into T of the written tokens; None if every token is written."""

    tokens: torch.Tensor | None
    pages: torch.Tensor
    places: torch.Tensor


def write_kv(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
             positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None = None) -> None:
    where = runs.memo.get("write_kv")
    if where is None:
        where = runs.memo["write_kv"] = find_places(positions_T, runs)
    assert isinstance(where, Places)
    if where.tokens is not None:
        k_THD, v_THD = k_THD[where.tokens], v_THD[where.tokens]
    if scales is not None:
        k_THD, k_scale_TH = quantized(k_THD)
        v_THD, v_scale_TH = quantized(v_THD)
        scales.permute(0, 3, 1, 2).index_put_((where.pages, where.places),
                                              torch.stack((k_scale_TH, v_scale_TH), dim=1))
    word_view = cache_k.view(torch.int32).permute(0, 3, 1, 2, 4)
    k_words = narrowed(k_THD, cache_k.dtype).contiguous().view(torch.int32)
    word_view.index_put_((where.pages, where.places), k_words.view(-1, *word_view.shape[2:]))
    pack = cache_v.shape[-1]
    token_view = as_bytes(cache_v).permute(0, 2, 4, 1, 3)
    token_view.index_put_((where.pages, where.places // pack, where.places % pack),
                          as_bytes(narrowed(v_THD, cache_v.dtype)))


def find_places(positions_T: torch.Tensor, runs: Runs) -> Places:
    device = positions_T.device
    lengths = torch.tensor(runs.lengths, dtype=torch.int64, device=device)
    run_T = torch.repeat_interleave(torch.arange(runs.run_count, device=device), lengths,
                                    output_size=positions_T.numel())
    known_T = positions_T.clamp_min(0)
    page_T = runs.page_table_RP[run_T, known_T // PAGE_TOKENS].long()
    written_T = (positions_T >= 0) & (page_T >= 0)
    if bool(written_T.all()):
        return Places(None, page_T, known_T % PAGE_TOKENS)
    tokens = written_T.nonzero().squeeze(1)
    return Places(tokens, page_T[tokens], known_T[tokens] % PAGE_TOKENS)
