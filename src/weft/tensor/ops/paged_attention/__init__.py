"""Causal attention of a step's queries over the pages of their own sequences."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.paged_attention import cpu, native


def paged_attention(q_THD: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, runs: Runs,
                    scale: float, window: int | None = None,
                    scales: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(scale * Q K^T) V; the token at position p sees positions [0, p] of its own sequence. With a
    ``window`` it sees the last ``window`` of them, itself included.

    ``q_THD`` [T, heads, D] with heads = G x kv_heads, query head h reading KV head h // G. Caches as in
    ``tensor.layout``; int8 caches have ``scales`` bfloat16 [P, 2, kv_heads, 16]. ``write_kv`` must have
    written the step's own keys and values. Returns [T, heads, D] in the dtype of ``q_THD``. Softmax and sums
    are float32.

    Only pages [0, ceil(context / 16)) of a row of ``page_table_RP`` are used, and of the last page only the
    written places. Unwritten memory, NaN included, does not reach the output (L6). PAD rows (start PAD) read
    nothing and return zeros.
    """
    if gpu.fits(q_THD, cache_k):
        from weft.tensor.kernels import paged_attention as triton
        if triton.supported(q_THD):
            return triton.paged_attention(q_THD, cache_k, cache_v, runs, scale, window, scales)
    if native.supported(q_THD, cache_k):
        return native.paged_attention(q_THD, cache_k, cache_v, runs, scale, window, scales)
    return cpu.paged_attention(q_THD, cache_k, cache_v, runs, scale, window, scales)
