"""Twin of write_kv: one token, one head, one element at a time, by the definition of the layout."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.units import PAD, PAGE_TOKENS


def write_kv(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
             positions_T: torch.Tensor, runs: Runs) -> None:
    pack = cache_k.shape[-1]
    for run in range(runs.run_count):
        for token in range(runs.offsets[run], runs.offsets[run] + runs.lengths[run]):
            position = int(positions_T[token])
            page = PAD if position == PAD else int(runs.page_table_RP[run, position // PAGE_TOKENS])
            if page == PAD:
                continue
            place = position % PAGE_TOKENS
            for dim in range(k_THD.shape[2]):
                cache_k[page, :, dim // pack, place, dim % pack] = k_THD[token, :, dim].to(cache_k.dtype)
                cache_v[page, :, place // pack, dim, place % pack] = v_THD[token, :, dim].to(cache_v.dtype)
