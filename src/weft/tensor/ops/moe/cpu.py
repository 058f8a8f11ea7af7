"""moe in torch: sort the (token, choice) pairs by expert, one pair of matmuls per expert hit.

    pairs sorted by expert   [ e0 e0 e3 e3 e3 e7 ]
    per expert               its rows of x -> gate_up -> silu x up -> down -> rows [a, b) of one buffer
    at the end               for each choice, its row of the buffer weighted and added to the token

The choices of a token are added in the router's order, in float32, whatever else is in the batch.
"""

from __future__ import annotations

import torch

from weft.tensor.activation import Activation, activate
from weft.tensor.ops.moe.weights import ExpertWeights, count_of, product
from weft.tensor.scratch import scratch
from weft.units import PAD


def moe(x_TD: torch.Tensor, expert_ids_TX: torch.Tensor, expert_weights_TX: torch.Tensor,
        gate_up_EJD: ExpertWeights, down_EDI: ExpertWeights, *, activation: Activation = "silu",
        gated: bool = True) -> torch.Tensor:
    tokens, choices = expert_ids_TX.shape
    ids = expert_ids_TX.flatten()
    order = torch.argsort(ids, stable=True)
    # Ids start at PAD (-1), so that the first count is of the pairs to skip.
    counts = torch.bincount(ids - PAD, minlength=count_of(gate_up_EJD) + 1).tolist()
    pair_rows = scratch.take("moe.pair_rows", (ids.numel(), x_TD.shape[1]), x_TD.dtype)
    begin = counts[0]
    pair_rows[:begin] = 0
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        rows = x_TD.index_select(0, order[begin : begin + count] // choices)
        inner = product(rows, gate_up_EJD, expert)
        if gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate, activation) * up
        else:
            inner = activate(inner, activation)
        pair_rows[begin : begin + count] = product(inner, down_EDI, expert)
        begin += count
    place_TX = torch.empty_like(order).scatter_(0, order, torch.arange(ids.numel(), device=ids.device))
    place_TX = place_TX.view(tokens, choices)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for choice in range(choices):
        out_TD.addcmul_(pair_rows.index_select(0, place_TX[:, choice]).float(),
                        expert_weights_TX[:, choice, None].float())
    return out_TD.to(x_TD.dtype)
