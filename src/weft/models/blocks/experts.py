"""Mixture of experts: a router picks experts per token, a shared feed-forward sees every token.

    scores = softmax(x @ router)  ->  top k  ->  sum of weight_e * expert_e(x)   (+ shared(x), maybe gated)

Normalised weights are computed as a softmax over the k picked scores. That equals softmax over all experts,
picked and divided by their sum. It needs no pass over all experts and is how Granite is defined; Qwen's order
gives the same numbers. Later routers score each expert by a sigmoid. A bias takes part in the choice, not in
the weights, and groups of experts may be chosen first (DeepSeek-V3, 2024).

Sources: transformers ``Qwen2MoeSparseMoeBlock`` (Qwen3-Next, Qwen3.5-MoE), ``GraniteMoeHybridMoE``,
``NemotronHMoE``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.architecture import Experts
from weft.models.blocks.linear import Linear, Projection
from weft.tensor.ops.add_gated import add_gated
from weft.tensor.ops.moe import ExpertWeights, moe
from weft.units import PAD


@dataclass(slots=True)
class ExpertsBlock:
    """``router``: [experts, D]; ``gate_up``: [experts, 2 width, D], [experts, width, D] without gates;
    ``down``: [experts, D, width]; ``choice_bias``: float32 [experts]. With ``latent_in`` and ``latent_out``
    the D of the experts is the latent width."""

    shape: Experts
    router: Linear
    gate_up: ExpertWeights
    down: ExpertWeights
    shared: Projection | None = None
    shared_gate: Linear | None = None
    choice_bias: torch.Tensor | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None
    own: range | None = None
    """The experts that ``gate_up`` and ``down`` hold; None for all. Choices of others are skipped."""
    choices: torch.Tensor | None = None
    """int64 [experts]: how often each was chosen, where that is counted."""

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = self.route(x_TD)
        if self.choices is not None:
            self.choices = self.choices + torch.bincount(ids_TK.flatten(), minlength=self.shape.count)
        if self.own is not None:
            ids_TK = _of_own(ids_TK, self.own)
        routed = x_TD if self.latent_in is None else self.latent_in(x_TD)
        y_TD = moe(routed, ids_TK, weights_TK.to(x_TD.dtype), self.gate_up, self.down,
                   activation=self.shape.activation, gated=self.shape.gated)
        if self.latent_out is not None:
            y_TD = self.latent_out(y_TD)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            return add_gated(y_TD, shared_TD, self.shared_gate(x_TD))
        return y_TD + shared_TD

    @property
    def router_device(self) -> torch.device:
        weight = self.router.weight
        assert isinstance(weight, torch.Tensor), "routers are never quantised"
        return weight.device

    def route(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> weights float32 [T, k], expert ids int64 [T, k], best first."""
        shape = self.shape
        weight = self.router.weight
        assert isinstance(weight, torch.Tensor), "routers are never quantised"
        scores_TE = self.router(x_TD.to(weight.dtype)).float()
        if shape.scoring == "sigmoid":
            return self._route_by_sigmoid(scores_TE.sigmoid())
        assert self.choice_bias is None, "a bias on the choice goes with sigmoid scores"
        assert shape.groups == 1, "groups of experts go with sigmoid scores"
        top_TK, ids_TK = scores_TE.topk(shape.per_token, dim=-1)
        if shape.normalized:
            return torch.softmax(top_TK, dim=-1) * shape.scale, ids_TK
        return (top_TK - scores_TE.logsumexp(dim=-1, keepdim=True)).exp() * shape.scale, ids_TK

    def _route_by_sigmoid(self, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        choice_TE = scores_TE if self.choice_bias is None else scores_TE + self.choice_bias
        if shape.groups > shape.groups_chosen:
            choice_TGE = choice_TE.view(-1, shape.groups, shape.count // shape.groups)
            best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
            out_TG = best_TG.topk(shape.groups - shape.groups_chosen, dim=-1, largest=False).indices
            left = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, out_TG, True)
            choice_TE = choice_TGE.masked_fill(left[..., None], -torch.inf).flatten(1)
        ids_TK = choice_TE.topk(shape.per_token, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if shape.normalized:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + shape.normalizer_eps)
        return weights_TK * shape.scale, ids_TK


def _of_own(ids_TK: torch.Tensor, own: range) -> torch.Tensor:
    """Numbers of experts -> their places among ``own``, PAD for others."""
    places_TK = ids_TK - own.start
    return places_TK.masked_fill((places_TK < 0) | (places_TK >= len(own)), PAD)
