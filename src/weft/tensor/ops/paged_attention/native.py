"""paged_attention by ``csrc/attention.inl``: reads pages in place, in one pass."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs

DIM_MAX = 512


def supported(q_THD: torch.Tensor, cache_k: torch.Tensor) -> bool:
    return (native.fits(q_THD) and cache_k.dtype in native.KV_DTYPES and q_THD.stride(-1) == 1
            and q_THD.shape[2] % native.LANES == 0 and q_THD.shape[2] <= DIM_MAX)


def paged_attention(q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs,
                    scale: float, window: int | None = None,
                    scales: torch.Tensor | None = None) -> torch.Tensor:
    tokens, heads, dim = q_THD.shape
    kv_heads = cache_k.shape[1]
    table_address, table_stride = native.page_table_of(runs)
    assert cache_k.dtype == cache_v.dtype, f"K pages of {cache_k.dtype}, V pages of {cache_v.dtype}"
    out_THD = torch.empty((tokens, heads, dim), dtype=q_THD.dtype)
    native.extension().attention(
        native.runs_of(runs), native.rows_of(q_THD), out_THD.data_ptr(), cache_k.data_ptr(),
        cache_v.data_ptr(), native.slot_stride(cache_k), native.slot_stride(cache_v), kv_heads,
        heads // kv_heads, dim, table_address, table_stride, scale,
        native.KV_DTYPES[cache_k.dtype], *native.token_scales(scales),
        window or 0)
    return out_THD
