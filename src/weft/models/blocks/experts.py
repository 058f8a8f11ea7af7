"""Mixture of experts: a router picks experts per token, a shared feed-forward sees every token.

    scores = softmax(x @ router)  ->  top k  ->  sum of weight_e * expert_e(x)   (+ shared(x), maybe gated)

Sources: transformers ``Qwen2MoeSparseMoeBlock`` (Qwen3-Next, Qwen3.5-MoE), ``GraniteMoeHybridMoE``,
``NemotronHMoE``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import Experts
from weft.models.blocks.linear import Linear, Projection
from weft.tensor.ops.moe import ChoiceRule, ExpertWeights, add_gated, choose_experts, moe
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
    _rule: ChoiceRule = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._rule = ChoiceRule(shape.per_token, shape.normalized, shape.scoring, shape.scale,
                                shape.normalizer_eps, shape.groups, shape.groups_chosen)

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        weights_TX, ids_TX = self.route(x_TD, positions_T)
        if self.choices is not None:
            # Ids start at PAD (-1), so the first count is of the choices to skip.
            counts = torch.bincount(ids_TX.flatten() - PAD, minlength=self.shape.count + 1)
            self.choices = self.choices + counts[1:]
        if self.own is not None:
            ids_TX = _of_own(ids_TX, self.own)
        routed = x_TD if self.latent_in is None else self.latent_in(x_TD)
        y_TD = moe(routed, ids_TX, weights_TX, self.gate_up, self.down, activation=self.shape.activation,
                   gated=self.shape.gated)
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

    def route(self, x_TD: torch.Tensor,
              positions_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> weights [T, X] in the dtype of ``x_TD``, expert ids int64 [T, X], best first, PAD for rows of
        PAD."""
        weight = self.router.weight
        assert isinstance(weight, torch.Tensor), "routers are never quantised"
        return choose_experts(self.router(x_TD.to(weight.dtype)), self._rule, self.choice_bias, positions_T,
                              dtype=x_TD.dtype)


def _of_own(ids_TX: torch.Tensor, own: range) -> torch.Tensor:
    """Numbers of experts -> their places among ``own``, PAD for others."""
    places_TX = ids_TX - own.start
    return places_TX.masked_fill((places_TX < 0) | (places_TX >= len(own)), PAD)
