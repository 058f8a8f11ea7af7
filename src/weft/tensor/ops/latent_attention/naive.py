"""Reference of latent_attention: one token at a time in float64, rows fetched one by one."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.units import PAD, PAGE_TOKENS


def latent_attention(q_THW: torch.Tensor, x_TW: torch.Tensor, cache: torch.Tensor, positions_T: torch.Tensor,
                     runs: Runs, scale: float, value_dim: int,
                     scales: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(*q_THW.shape[:2], value_dim, dtype=torch.float64)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        for index in range(runs.lengths[run]):
            token, position = runs.offsets[run] + index, runs.starts[run] + index
            page = int(runs.page_table_RP[run, position // PAGE_TOKENS])
            if page != PAD:
                _store(x_TW[token], cache, scales, page, position % PAGE_TOKENS)
            rows_SW = torch.stack([_fetch(cache, scales, runs, run, seen) for seen in range(position + 1)])
            weights_HS = (q_THW[token].double() @ rows_SW.T * scale).softmax(dim=-1)
            out[token] = weights_HS @ rows_SW[:, :value_dim]
    return out.to(q_THW.dtype)


def _store(x_W: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, page: int,
           place: int) -> None:
    if scales is not None:
        scale = scales[page, 0, 0, place] = (x_W.float().abs().max() * (1 / 127)).bfloat16()
        x_W = (x_W.float() / (scale.float() or 1)).round().clamp(-127, 127)
    elif cache.dtype == torch.float8_e4m3fn:
        x_W = x_W.float().clamp(-448, 448)
    for index, number in enumerate(x_W.to(cache.dtype)):
        cache[page, 0, index // cache.shape[-1], place, index % cache.shape[-1]] = number


def _fetch(cache: torch.Tensor, scales: torch.Tensor | None, runs: Runs, run: int,
           position: int) -> torch.Tensor:
    page, place = int(runs.page_table_RP[run, position // PAGE_TOKENS]), position % PAGE_TOKENS
    assert page != PAD, "a position inside the context has no page"
    row_W = cache[page, 0, :, place].flatten().double()
    return row_W if scales is None else row_W * scales[page, 0, 0, place].double()
