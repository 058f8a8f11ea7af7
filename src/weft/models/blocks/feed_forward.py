"""Feed-forwards: SwiGLU and its less usual forms, and mixtures of experts.

    dense      down(act(gate(x)) * up(x))      or, without a gate,      down(act(up(x)))
    experts    scores = softmax(x @ router)  ->  top k  ->  sum of weight_e * expert_e(x)
               (+ shared(x), maybe gated); later routers score each expert by a sigmoid

Sources: Shazeer (2020) for SwiGLU; Primer (So et al., 2021) for squared relu; transformers ``FalconH1MLP``,
``NemotronHMLP``, ``Zamba2MLP``, ``Qwen2MoeSparseMoeBlock``, ``GraniteMoeHybridMoE``, ``NemotronHMoE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.families.architecture import Dense, Experts
from weft.models.blocks.adapted import AdaptedBlock, ExpertsChange
from weft.models.blocks.linear import Linear, Norm, Projection, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.ops.elementwise import activate, silu_mul, staged
from weft.tensor.ops.moe import (
    ChoiceRule,
    ExpertBiases,
    ExpertWeights,
    activated,
    add_gated,
    by_expert,
    choose_experts,
    count_of,
    moe,
    rows_alone,
)
from weft.tensor.weights.tiles import TiledWeight
from weft.units import PAD


@dataclass(slots=True)
class SwiGlu:
    """down(silu(gate(x)) * up(x)); ``gate_up`` has the gate's rows first."""

    gate_up: Linear
    down: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.gate_up, self.down)

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x_TD)))

    def staged(self, x_TD: torch.Tensor) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        return None if self.fused is None else staged(self.fused, x_TD)


@dataclass(slots=True)
class DenseBlock:
    """``into``: rows gate, up when ``shape.gated``, else up alone."""

    shape: Dense
    into: Projection
    down: Linear

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.into(x_TD)
        gate_factor, factor = self.shape.multipliers
        if self.shape.gated and self.shape.activation == "silu" and (gate_factor == 1.0 or inner.is_cpu):
            if gate_factor != 1.0:
                inner[:, : inner.shape[1] // 2].mul_(gate_factor)
            inner = silu_mul(inner, self.shape.limit)
        elif self.shape.limit:
            inner = activated(inner, self.shape.activation, gated=True, limit=self.shape.limit)
        elif self.shape.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate if gate_factor == 1.0 else gate * gate_factor, self.shape.activation) * up
        else:
            inner = activate(inner, self.shape.activation)
        y_TD = self.down(inner)
        return y_TD if factor == 1.0 else y_TD * factor


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
    biases: ExpertBiases | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None
    own: range | None = None
    """The experts that ``gate_up`` and ``down`` hold; None for all. Choices of others are skipped."""
    choices: torch.Tensor | None = None
    """int64 [experts]: how often each was chosen, where that is counted."""
    adapted: AdaptedBlock[ExpertsChange] | None = None
    _rule: ChoiceRule = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._rule = ChoiceRule(
            shape.per_token,
            shape.normalized,
            shape.scoring,
            shape.scale,
            shape.normalizer_eps,
            shape.groups,
            shape.groups_chosen,
        )

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        y_TD = self.of_choices(x_TD, *reversed(self.route(x_TD, positions_T)))
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            return add_gated(y_TD, shared_TD, self.shared_gate(x_TD))
        return y_TD + shared_TD

    def of_choices(self, x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
        """The routed experts alone."""
        if self.choices is not None:
            # Ids start at PAD (-1), so the first count is of the choices to skip.
            counts = torch.bincount(ids_TX.flatten() - PAD, minlength=self.shape.count + 1)
            self.choices = self.choices + counts[1:]
        if self.own is not None:
            ids_TX = _of_own(ids_TX, self.own)
        routed = x_TD if self.latent_in is None else self.latent_in(x_TD)
        y_TD = self._routed(routed, ids_TX, weights_TX)
        return y_TD if self.latent_out is None else self.latent_out(y_TD)

    def _routed(self, x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
        own = [] if self.adapted is None else self.adapted.of_step(len(x_TD))
        if own:
            # Rows of an adapter go through its experts below; here they are skipped.
            all_ids_TX, ids_TX = ids_TX, ids_TX.clone()
            for group, _ in own:
                ids_TX[group.rows] = PAD
        y_TD = moe(
            x_TD,
            ids_TX,
            weights_TX,
            self.gate_up,
            self.down,
            activation=self.shape.activation,
            gated=self.shape.gated,
            biases=self.biases,
            limit=self.shape.limit,
        )
        for group, change in own:
            expert = partial(self._adapted_expert, change)
            y_TD[group.rows] = by_expert(
                x_TD[group.rows], all_ids_TX[group.rows], weights_TX[group.rows], count_of(self.gate_up), expert
            )
        return y_TD

    def _adapted_expert(self, change: ExpertsChange, x: torch.Tensor, number: int) -> torch.Tensor:
        inner = change.product("into", number, x, rows_alone(x, self.gate_up, number))
        if self.biases is not None:
            inner = inner + self.biases.gate_up_EJ[number].to(inner.dtype)
        inner = activated(inner, self.shape.activation, gated=self.shape.gated, limit=self.shape.limit)
        y = change.product("down", number, inner, rows_alone(inner, self.down, number))
        return y if self.biases is None else y + self.biases.down_ED[number].to(y.dtype)

    @property
    def router_weight(self) -> torch.Tensor | TiledWeight:
        weight = self.router.weight
        assert isinstance(weight, torch.Tensor | TiledWeight), "routers are never quantised"
        return weight

    def route(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> weights [T, X] in the dtype of ``x_TD``, expert ids int64 [T, X], best first, PAD for rows of
        PAD."""
        scores_TE = self.router(x_TD.to(self.router_weight.dtype))
        return choose_experts(scores_TE, self._rule, self.choice_bias, positions_T, dtype=x_TD.dtype)


@dataclass(slots=True)
class ExpertsApart:
    """The expert that every token passes (``dense``) and the routed ones, each between norms of its own; the
    router has a third. ``factors``: on the weight of each expert.

        y = norm(dense(norm(x))) + norm(sum of factor_e weight_e expert_e(norm(x)))

    Source: transformers ``Gemma4TextDecoderLayer``, ``Gemma4TextRouter``."""

    experts: ExpertsBlock
    routed: Callable[..., torch.Tensor]
    dense: Projection
    norms: tuple[Norm, Norm]
    out_norms: tuple[Norm, Norm]
    router_norm: Norm
    factors: torch.Tensor

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        dense_norm, norm = self.norms
        dense_out_norm, out_norm = self.out_norms
        weights_TX, ids_TX = self.experts.route(self.router_norm(x_TD), positions_T)
        weights_TX = weights_TX * self.factors[ids_TX.clamp_min(0)]  # PAD rows weigh nothing
        y_TD = self.routed(norm(x_TD), ids_TX, weights_TX)
        return dense_out_norm(self.dense(dense_norm(x_TD))) + out_norm(y_TD)


def _of_own(ids_TX: torch.Tensor, own: range) -> torch.Tensor:
    """Numbers of experts -> their places among ``own``, PAD for others."""
    places_TX = ids_TX - own.start
    return places_TX.masked_fill((places_TX < 0) | (places_TX >= len(own)), PAD)
