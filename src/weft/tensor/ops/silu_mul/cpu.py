"""silu_mul in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TJ.chunk(2, dim=-1)
    return F.silu(gate) * up
