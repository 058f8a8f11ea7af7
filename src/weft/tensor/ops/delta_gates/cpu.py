"""delta_gates in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def delta_gates(a_TC: torch.Tensor, bias_C: torch.Tensor, decay_H: torch.Tensor, b_TH: torch.Tensor, *,
                beta_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    steps_TC = F.softplus(a_TC.float() + bias_C)
    lines = a_TC.shape[1] // decay_H.shape[0]
    if lines == 1:
        g_TC = decay_H * steps_TC
    else:
        g_TC = (steps_TC.view(-1, decay_H.shape[0], lines) * decay_H[:, None]).flatten(1)
    return g_TC, torch.sigmoid(b_TH.float()) * beta_scale
