"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.rotary import cpu, native


def rotary(q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor,
           sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first ``rotary_dim`` dims of every head; the rest passes through (partial rotary).

    ``q_THD`` [T, heads, D] and ``k_THD`` [T, kv_heads, D] of any float dtype; ``cos_TD``, ``sin_TD``
    [T, rotary_dim] float32 or the model's dtype, both halves carrying the same angles; rotary_dim <= D
    and even. Dim i of the first half is paired with dim i of the second half. Returns new tensors of the
    inputs' dtypes; the product is taken in float32.

    Source: RoPE (Su et al., 2021) in the half-split order of GPT-NeoX, as transformers applies it.
    """
    if gpu.fits(q_THD, k_THD, cos_TD, sin_TD):
        from weft.tensor.kernels import rotary as triton
        return triton.rotary(q_THD, k_THD, cos_TD, sin_TD)
    if native.supported(q_THD, k_THD, cos_TD):
        return native.rotary(q_THD, k_THD, cos_TD, sin_TD)
    return cpu.rotary(q_THD, k_THD, cos_TD, sin_TD)
