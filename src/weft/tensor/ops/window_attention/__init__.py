"""Causal attention over the last tokens of each sequence, stored as a ring in its state slot."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.window_attention import cpu
from weft.tensor.state_rows import restored


def window_attention(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor,
                     ring_S2HWD: torch.Tensor, runs: Runs, scale: float) -> torch.Tensor:
    """softmax(scale * Q K^T) V; the token at position p sees positions (p - W, p] of its own sequence.

    ``q_THD`` [T, heads, D] with heads = G x kv_heads, query head h reading KV head h // G; ``k_THD`` and
    ``v_THD`` [T, kv_heads, D], after rotary. Any float dtypes; keys and values are rounded to the ring's,
    then softmax and sums are float32. Returns [T, heads, D] in the dtype of ``q_THD``.

    ``ring_S2HWD`` [S, 2, kv_heads, W, D]: keys in [:, 0], values in [:, 1]; position p is at place p mod W.
    The ring is the history before each run, and is updated in place. A fresh run sees nothing before its
    start and leaves zeros at unwritten places; any other run finds all positions from 0 on. Runs with slot
    PAD see only themselves and write nothing. A tap writes the ring after ``offset`` tokens of its run.

    Source: Beltagy et al., "Longformer" (2020), the causal window of Mistral 7B (2023).
    """
    if runs.log is not None:
        def replay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, again: Runs) -> torch.Tensor:
            return window_attention(q, k, v, ring_S2HWD, again, scale)

        runs.log.note(replay, q_THD, k_THD, v_THD)
    if gpu.fits(q_THD, ring_S2HWD):
        from weft.tensor.kernels import window_attention as triton
        with restored(ring_S2HWD, runs):
            return triton.window_attention(q_THD, k_THD, v_THD, ring_S2HWD, runs, scale)
    return cpu.window_attention(q_THD, k_THD, v_THD, ring_S2HWD, runs, scale)
