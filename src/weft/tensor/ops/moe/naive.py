"""Reference of moe: one token, one choice at a time, in float64."""

from __future__ import annotations

import torch

from weft.tensor.activation import Activation, activate
from weft.tensor.ops.moe.weights import ExpertWeights
from weft.units import PAD


def moe(x_TD: torch.Tensor, expert_ids_TX: torch.Tensor, expert_weights_TX: torch.Tensor,
        gate_up_EJD: ExpertWeights, down_EDI: ExpertWeights, *, activation: Activation = "silu",
        gated: bool = True) -> torch.Tensor:
    gate_up, down = (weights if isinstance(weights, torch.Tensor) else weights.dense()
                     for weights in (gate_up_EJD, down_EDI))
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token in range(x_TD.shape[0]):
        for choice in range(expert_ids_TX.shape[1]):
            expert = int(expert_ids_TX[token, choice])
            if expert == PAD:
                continue
            inner = gate_up[expert].double() @ x_TD[token].double()
            if gated:
                gate, up = inner.chunk(2)
                inner = activate(gate, activation) * up
            else:
                inner = activate(inner, activation)
            expert_out = down[expert].double() @ inner
            out[token] += expert_weights_TX[token, choice].double() * expert_out
    return out.to(x_TD.dtype)
