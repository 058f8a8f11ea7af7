"""Reference of silu_mul: the formula, in float64."""

from __future__ import annotations

import torch


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    width = gate_up_TJ.shape[-1] // 2
    gate, up = gate_up_TJ[..., :width].double(), gate_up_TJ[..., width:].double()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TJ.dtype)
