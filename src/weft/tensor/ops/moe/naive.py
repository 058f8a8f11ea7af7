"""Twin of moe: one token, one choice at a time, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.units import PAD


def moe(x_TD: torch.Tensor, expert_ids_TX: torch.Tensor, expert_weights_TX: torch.Tensor,
        gate_up_EJD: torch.Tensor, down_EDI: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token in range(x_TD.shape[0]):
        for choice in range(expert_ids_TX.shape[1]):
            expert = int(expert_ids_TX[token, choice])
            if expert == PAD:
                continue
            gate, up = (gate_up_EJD[expert].double() @ x_TD[token].double()).chunk(2)
            made = down_EDI[expert].double() @ (F.silu(gate) * up)
            out[token] += expert_weights_TX[token, choice].double() * made
    return out.to(x_TD.dtype)
