"""Reference of rotary: one head, one pair of dims at a time."""

from __future__ import annotations

import torch


def rotary(q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor,
           sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate(q_THD, cos_TD, sin_TD), _rotate(k_THD, cos_TD, sin_TD)


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    out = x_THD.double().clone()
    half = cos_TD.shape[-1] // 2
    for token in range(x_THD.shape[0]):
        for head in range(x_THD.shape[1]):
            for dim in range(half):
                a, b = x_THD[token, head, dim].double(), x_THD[token, head, half + dim].double()
                cos, sin = cos_TD[token, dim].double(), sin_TD[token, dim].double()
                out[token, head, dim] = a * cos - b * sin
                out[token, head, half + dim] = b * cos + a * sin
    return out.to(x_THD.dtype)
