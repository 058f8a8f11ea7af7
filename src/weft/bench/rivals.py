"""Other libraries' kernels on the same sizes, if installed and on a GPU: fla and FlashInfer.

They run under their best conditions: contiguous inputs, their own layouts, plans computed before the clock
runs. A library that is not installed, or refuses a size, has no column, and ``weft bench kernels`` says why.
No library is required.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from weft.bench.case import Bench, Call
from weft.families.architecture import Attention
from weft.units import PAGE_TOKENS, pages_for

_WORKSPACE_BYTES = 256 << 20


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def delta_rivals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                 state: torch.Tensor, rows: int, tokens: int) -> dict[str, Call]:
    """fla's gated delta rule: chunked for prefill, fused recurrent for decode. Its chunked form needs as many
    key heads as value heads; they are repeated before the clock runs."""
    if not (q.is_cuda and installed("fla")):
        return {}
    ops: Any = importlib.import_module("fla.ops.gated_delta_rule")
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    shaped = [x.reshape(rows, tokens, *x.shape[1:]) for x in (q, k, v, g, beta)]
    op = ops.fused_recurrent_gated_delta_rule if tokens == 1 else ops.chunk_gated_delta_rule
    own_state = state.clone()

    def call() -> object:
        return op(*shaped, scale=q.shape[-1] ** -0.5, initial_state=own_state, output_final_state=True,
                  use_qk_l2norm_in_kernel=True)

    return {"fla": call}


def attention_rivals(bench: Bench, of: Attention, rows: int, tokens: int, before: int) -> dict[str, Call]:
    """FlashInfer: paged decode over pages of 16 tokens; prefill without pages."""
    if not (bench.device.type == "cuda" and installed("flashinfer")):
        return {}
    library: Any = importlib.import_module("flashinfer")
    if tokens > 1:
        q = bench.noise(tokens, of.heads, of.head_dim)
        k, v = (bench.noise(before + tokens, of.kv_heads, of.head_dim) for _ in range(2))
        return {"flashinfer": lambda: library.single_prefill_with_kv_cache(q, k, v, causal=True,
                                                                           sm_scale=of.scale)}
    width = pages_for(before + 1)
    cache = bench.noise(rows * width, 2, PAGE_TOKENS, of.kv_heads, of.head_dim)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=bench.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    first_pages = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * width
    pages = torch.randperm(rows * width).to(bench.device, torch.int32)
    in_last_page = torch.full((rows,), before % PAGE_TOKENS + 1, dtype=torch.int32, device=bench.device)
    wrapper.plan(first_pages, pages, in_last_page, of.heads, of.kv_heads, of.head_dim, PAGE_TOKENS,
                 q_data_type=bench.dtype, kv_data_type=bench.dtype, sm_scale=of.scale)
    q = bench.noise(rows, of.heads, of.head_dim)
    return {"flashinfer": lambda: wrapper.run(q, cache)}
