"""write_kv by ``csrc/elementwise.inl``. Positions are those of the runs."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs


def supported(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor) -> bool:
    return (native.fits(k_THD, v_THD) and cache_k.dtype in native.KV_DTYPES and k_THD.stride(-1) == 1
            and v_THD.stride(-1) == 1)


def write_kv(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
             runs: Runs, scales: torch.Tensor | None = None) -> None:
    table = runs.page_table_RP
    assert cache_k.dtype == cache_v.dtype
    assert table.dtype == torch.int32
    assert table.stride(1) == 1
    native.extension().write_kv(
        native.runs_of(runs), native.rows_of(k_THD), native.rows_of(v_THD), cache_k.data_ptr(),
        cache_v.data_ptr(), native.slot_stride(cache_k), native.slot_stride(cache_v), k_THD.shape[1],
        k_THD.shape[2], table.data_ptr(), table.stride(0), native.KV_DTYPES[cache_k.dtype],
        *native.token_scales(scales))
