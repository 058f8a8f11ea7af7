"""Reference of write_kv: one token, one head, one element at a time, by the definition of the layout."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.units import PAD, PAGE_TOKENS


def write_kv(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
             positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None = None) -> None:
    k_pack, v_pack = cache_k.shape[-1], cache_v.shape[-1]
    for run in range(runs.run_count):
        for token in range(runs.offsets[run], runs.offsets[run] + runs.lengths[run]):
            position = int(positions_T[token])
            page = PAD if position == PAD else int(runs.page_table_RP[run, position // PAGE_TOKENS])
            if page == PAD:
                continue
            place = position % PAGE_TOKENS
            for head in range(k_THD.shape[1]):
                k_D, v_D = k_THD[token, head], v_THD[token, head]
                if scales is not None:
                    k_D, scales[page, 0, head, place] = _whole(k_D)
                    v_D, scales[page, 1, head, place] = _whole(v_D)
                for dim in range(k_THD.shape[2]):
                    key, value = _stored(k_D[dim], cache_k.dtype), _stored(v_D[dim], cache_v.dtype)
                    cache_k[page, head, dim // k_pack, place, dim % k_pack] = key
                    cache_v[page, head, place // v_pack, dim, place % v_pack] = value


def _whole(x_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers up to 127, and their scale."""
    scale = (x_D.float().abs().max() * (1 / 127)).bfloat16()
    if scale == 0:
        return torch.zeros_like(x_D), scale
    return (x_D.float() / scale.float()).round().clamp(-127, 127), scale


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        x = x.float().clamp(-448, 448)
    elif dtype == torch.float16:
        x = x.float().clamp(-65504, 65504)
    return x.to(dtype)
