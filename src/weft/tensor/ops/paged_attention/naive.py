"""Reference of paged_attention: one query at a time in float64, keys fetched one token at a time."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.units import PAD, PAGE_TOKENS


def paged_attention(q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs,
                    scale: float, window: int | None = None,
                    scales: torch.Tensor | None = None) -> torch.Tensor:
    tokens, heads, dim = q_THD.shape
    group = heads // cache_k.shape[1]
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        for index in range(runs.lengths[run]):
            token, position = runs.offsets[run] + index, runs.starts[run] + index
            first = 0 if window is None else max(0, position - window + 1)
            fetched = [_fetch(cache_k, cache_v, scales, runs, run, seen)
                       for seen in range(first, position + 1)]
            k_SHD = torch.stack([k for k, _ in fetched]).repeat_interleave(group, dim=1)
            v_SHD = torch.stack([v for _, v in fetched]).repeat_interleave(group, dim=1)
            scores_SH = (k_SHD * q_THD[token].double()).sum(-1) * scale
            out[token] = (scores_SH.softmax(dim=0)[..., None] * v_SHD).sum(0)
    return out.to(q_THD.dtype)


def _fetch(cache_k: torch.Tensor, cache_v: torch.Tensor, scales: torch.Tensor | None, runs: Runs, run: int,
           position: int) -> tuple[torch.Tensor, torch.Tensor]:
    page, place = int(runs.page_table_RP[run, position // PAGE_TOKENS]), position % PAGE_TOKENS
    assert page != PAD, "a position inside the context has no page"
    pack = cache_v.shape[-1]
    k_HD = cache_k[page, :, :, place, :].flatten(1)
    v_HD = cache_v[page, :, place // pack, :, place % pack]
    k_HD, v_HD = k_HD.double(), v_HD.double()
    if scales is not None:
        k_HD, v_HD = (x_HD * scale_H[:, None].double()
                      for x_HD, scale_H in zip((k_HD, v_HD), scales[page, :, :, place], strict=True))
    return k_HD, v_HD
