"""add_norm as a sum and a norm: the definition of the fused kernel, and its fallback."""

from __future__ import annotations

import torch

from weft.tensor.ops.rms_norm import rms_norm


def add_norm(x_TD: torch.Tensor, y_TD: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float,
             plus_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TD = (y_TD if scale == 1.0 else y_TD.mul_(scale)).add_(x_TD)
    return sum_TD, rms_norm(sum_TD, weight, eps, plus_one=plus_one)
