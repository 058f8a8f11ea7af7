"""Pages of prompts as plain rows, for the attention of other libraries: one launch for keys and values.

    pages (packed, in no order)   --program: (4 pages, KV head, run)-->   k, v [rows, kv_heads, D]
                                                                          runs one after the other, no gaps

No other library reads packed pages (``tensor.layout``): keys lie transposed, and two neighbours of a 16-bit
value share a lane. The copy reads and writes a context once; attention over a prompt of n tokens multiplies n
times as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.pages import TRITON_TYPES, block_dim, load_keys, load_values, page_ids
from weft.tensor.inputs import Runs
from weft.units import PAGE_TOKENS, ceil_div

PAGES = 4


@triton.jit(do_not_specialize=["first_run", "table_stride"],
            do_not_specialize_on_alignment=["context", "begins"])
def _gather(cache_k, cache_v, k_stride, v_stride, table, table_stride, context, begins, k_out, v_out,
            first_run, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr,
            AT_ONCE: tl.constexpr):
    """``context`` int64 [runs]; ``begins`` int64: the first output row of each run from ``first_run`` on."""
    head, number = tl.program_id(1), tl.program_id(2)
    run = (first_run + number).to(tl.int64)
    seen = tl.load(context + run).to(tl.int32)
    first = tl.program_id(0) * AT_ONCE
    if first * 16 >= seen:
        return
    pages = page_ids(table + run * table_stride, first, (seen + 15) // 16, AT_ONCE)
    keys = load_keys(cache_k + head * (D * 16), k_stride, pages, D, BLOCK_D, PACK, AT_ONCE)
    values = load_values(cache_v + head * (D * 16), v_stride, pages, D, BLOCK_D, PACK, AT_ONCE)
    token, d = first * 16 + tl.arange(0, AT_ONCE * 16), tl.arange(0, BLOCK_D)
    row = (tl.load(begins + number) + token) * KV_HEADS + head
    stored = (token < seen)[:, None] & (d < D)[None, :]
    tl.store(k_out + row[:, None] * D + d[None, :], tl.trans(keys), mask=stored)
    tl.store(v_out + row[:, None] * D + d[None, :], values, mask=stored)


def rows_of_prefills(cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs,
                     ) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the contexts of the prefill runs, [rows, kv_heads, D] each, in the pages' dtype."""
    first, kv_heads, pack = runs.decode_count, cache_k.shape[1], cache_k.shape[-1]
    dim = cache_k.shape[2] * pack
    contexts = [start + length
                for start, length in zip(runs.starts[first:], runs.lengths[first:], strict=True)]
    context_N = runs.context_R[first:]
    begins_N = context_N.cumsum(0) - context_N
    k, v = (torch.empty((sum(contexts), kv_heads, dim), dtype=cache_k.dtype, device=cache_k.device)
            for _ in range(2))
    table = runs.page_table_RP
    grid = (ceil_div(ceil_div(max(contexts), PAGE_TOKENS), PAGES), kv_heads, len(contexts))
    launch(_gather, grid)(
        cache_k, cache_v, cache_k.stride(0), cache_v.stride(0), table, table.stride(0), runs.context_R,
        begins_N, k, v, first, KV_HEADS=kv_heads, D=dim, BLOCK_D=block_dim(dim), PACK=pack, AT_ONCE=PAGES)
    return k, v


def compilations() -> list[Compilation]:
    variants = []
    for dim in (64, 256):
        pages = "*" + TRITON_TYPES[torch.bfloat16]
        constants = {"KV_HEADS": 8, "D": dim, "BLOCK_D": dim, "PACK": 2, "AT_ONCE": PAGES}
        signature = {"cache_k": pages, "cache_v": pages, "k_stride": "i32", "v_stride": "i32",
                     "table": "*i32", "table_stride": "i32", "context": "*i64", "begins": "*i64",
                     "k_out": "*bf16", "v_out": "*bf16", "first_run": "i32"}
        variants.append(Compilation(f"gather prompts bf16 {dim}", _gather,
                                 signature | dict.fromkeys(constants, "constexpr"), constants))
    return variants
