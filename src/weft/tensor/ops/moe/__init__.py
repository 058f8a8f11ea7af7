"""Mixture of experts: each token goes through the experts chosen by the router."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.activation import Activation
from weft.tensor.ops.moe import cpu, native
from weft.tensor.ops.moe.weights import ExpertWeights, held_in, in_tiles

__all__ = ["ExpertWeights", "moe"]


def moe(x_TD: torch.Tensor, expert_ids_TX: torch.Tensor, expert_weights_TX: torch.Tensor,
        gate_up_EJD: ExpertWeights, down_EDI: ExpertWeights, *, activation: Activation = "silu",
        gated: bool = True) -> torch.Tensor:
    """``y_t = sum_x weight[t, x] * down_e(silu(gate_e(x_t)) * up_e(x_t))`` with e = ids[t, x] and
    ``activation`` in the place of silu; ``down_e(act(up_e(x_t)))`` for experts that are not ``gated``.

    ``x_TD`` [T, D]; ``expert_ids_TX`` int64 [T, X] (PAD: that choice is skipped) and ``expert_weights_TX``
    [T, X], both from the router; ``gate_up_EJD`` [E, 2 I, D], the gate's rows first ([E, I, D] without
    gates); ``down_EDI`` [E, D, I]; either may be quantised. Returns [T, D] in the dtype of ``x_TD``; the
    choices of a token are added in float32. Experts without a token are not computed.

    Source: Shazeer et al., 2017; the stacked weights of transformers' granitemoehybrid and qwen3_next.
    """
    if (in_tiles(gate_up_EJD, down_EDI)
            and gpu.fits(x_TD, expert_ids_TX, expert_weights_TX, held_in(gate_up_EJD), held_in(down_EDI))):
        from weft.tensor.kernels import moe as triton

        return triton.moe(x_TD, expert_ids_TX, expert_weights_TX, gate_up_EJD, down_EDI,
                          activation=activation, gated=gated)
    if native.supported(x_TD, expert_ids_TX, gate_up_EJD, down_EDI):
        return native.moe(x_TD, expert_ids_TX, expert_weights_TX, gate_up_EJD, down_EDI,
                          activation=activation, gated=gated)
    return cpu.moe(x_TD, expert_ids_TX, expert_weights_TX, gate_up_EJD, down_EDI, activation=activation,
                   gated=gated)
