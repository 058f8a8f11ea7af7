"""Keys and values of a step's tokens into their pages."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.write_kv import cpu, native


def write_kv(k_THD: torch.Tensor, v_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
             positions_T: torch.Tensor, runs: Runs, scales: torch.Tensor | None = None) -> None:
    """Write token t of run r to page ``page_table_RP[r, position // 16]``, place ``position % 16``.

    ``k_THD``, ``v_THD`` [T, kv_heads, D] of any float dtype, rounded to the cache's as in ``kv_numbers``.
    int8 needs ``scales`` bfloat16 [P, 2, kv_heads, 16], which are written too. ``cache_k`` [P, kv_heads,
    D/pack, 16, pack] and ``cache_v`` [P, kv_heads, 16/pack, D, pack] as in ``tensor.layout``, written in
    place; ``positions_T`` int64 [T]. Tokens at position PAD, and tokens with a PAD page, are not written
    (L4). Nothing else of the cache changes.
    """
    if gpu.fits(k_THD, cache_k):
        from weft.tensor.kernels import write_kv as triton
        triton.write_kv(k_THD, v_THD, cache_k, cache_v, positions_T, runs, scales)
    elif native.supported(k_THD, v_THD, cache_k):
        native.write_kv(k_THD, v_THD, cache_k, cache_v, runs, scales)
    else:
        cpu.write_kv(k_THD, v_THD, cache_k, cache_v, positions_T, runs, scales)
