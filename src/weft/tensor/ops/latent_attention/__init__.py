"""Causal attention over cached latents: one row per token, shared by all heads as key and value."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.latent_attention import cpu


def latent_attention(q_THW: torch.Tensor, x_TW: torch.Tensor, cache: torch.Tensor, positions_T: torch.Tensor,
                     runs: Runs, scale: float, value_dim: int,
                     scales: torch.Tensor | None = None) -> torch.Tensor:
    """Write the rows ``x_TW`` of this step's tokens into their pages. Then, for the token at position p of
    its sequence and each head, compute ``softmax(scale * q . x_[0..p]) x_[0..p]``. Returns its first
    ``value_dim`` numbers: [T, heads, value_dim] in the dtype of ``q_THW``.

    ``q_THW`` [T, heads, W]: the query in the latent's space (the key projection is absorbed). ``cache`` [P,
    1, W/pack, 16, pack]: a K block as in ``tensor.layout``, without a V block; int8 pages have ``scales``
    bfloat16 [P, 1, 1, 16]. Token t of run r goes to page ``page_table_RP[r, position // 16]``; PAD positions
    and pages are not written (L4). Softmax and sums are float32. Unwritten memory does not reach the output
    (L6). PAD rows read nothing and return zeros.

    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """
    if gpu.fits(q_THW, x_TW, cache):
        from weft.tensor.kernels import latent_attention as triton
        return triton.latent_attention(q_THW, x_TW, cache, positions_T, runs, scale, value_dim, scales)
    return cpu.latent_attention(q_THW, x_TW, cache, positions_T, runs, scale, value_dim, scales)
