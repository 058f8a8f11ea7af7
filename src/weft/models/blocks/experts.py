"""Mixture of experts: a router picks experts per token, a shared feed-forward sees every token.

    scores = softmax(x @ router)  ->  top k  ->  sum of weight_e * expert_e(x)   (+ shared(x), maybe gated)

With normalised weights, softmax over all experts, picking k and dividing by their sum equals softmax over
the k picked scores, which is what is computed: it needs no pass over all experts and is how Granite is
defined; Qwen's order gives the same numbers. Sources: transformers ``Qwen2MoeSparseMoeBlock`` (Qwen3-Next,
Qwen3.5-MoE) and ``GraniteMoeHybridMoE``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.architecture import Experts
from weft.models.blocks.linear import Linear, SwiGlu
from weft.tensor.ops.moe import moe


@dataclass(slots=True)
class ExpertsBlock:
    """``router``: [experts, D]; ``gate_up``: [experts, 2 width, D]; ``down``: [experts, D, width]."""

    shape: Experts
    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SwiGlu | None = None
    shared_gate: Linear | None = None

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = self.route(x_TD)
        y_TD = moe(x_TD, ids_TK, weights_TK.to(x_TD.dtype), self.gate_up, self.down)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = torch.sigmoid(self.shared_gate(x_TD)) * shared_TD
        return y_TD + shared_TD

    def route(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> weights float32 [T, k], expert ids int64 [T, k], best first."""
        scores_TE = self.router(x_TD).float()
        top_TK, ids_TK = scores_TE.topk(self.shape.per_token, dim=-1)
        if self.shape.normalized:
            return torch.softmax(top_TK, dim=-1), ids_TK
        return (top_TK - scores_TE.logsumexp(dim=-1, keepdim=True)).exp(), ids_TK
