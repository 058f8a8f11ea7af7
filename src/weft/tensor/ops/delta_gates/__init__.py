"""The gates of a delta rule: log decays and step sizes, of what a layer projects."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.delta_gates import cpu


def delta_gates(a_TC: torch.Tensor, bias_C: torch.Tensor, decay_H: torch.Tensor, b_TH: torch.Tensor, *,
                beta_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """-> ``g_TC`` = decay * softplus(a + bias), ``beta_TH`` = beta_scale * sigmoid(b), both float32.

    C is H, or H x K for a decay of each line of the state: column c has the decay of head c // K. ``bias_C``
    and ``decay_H`` (-exp(A_log)) are float32.

    Sources: Yang et al., "Gated Delta Networks" (2025); Kimi Team, "Kimi Linear" (2025).
    """
    if gpu.fits(a_TC, b_TH, bias_C, decay_H):
        from weft.tensor.kernels import delta_gates as triton
        return triton.delta_gates(a_TC, bias_C, decay_H, b_TH, beta_scale=beta_scale)
    return cpu.delta_gates(a_TC, bias_C, decay_H, b_TH, beta_scale=beta_scale)
