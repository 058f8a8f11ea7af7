"""A mixture of experts: the router's choice, the experts, and the shared expert.

In torch the (token, choice) pairs are sorted by expert, with one pair of products per expert hit:

    pairs sorted by expert   [ e0 e0 e3 e3 e3 e7 ]
    per expert               its rows of x -> gate_up -> silu x up -> down -> rows [a, b) of one buffer
    at the end               for each choice, its row of the buffer weighted and added to the token

The C++ kernels have no loop over experts in Python:

    tiles       csrc/moe_tiles.hpp     any number of tokens: float experts wherever tiles serve
    quantised   csrc/moe.hpp           any number of tokens
    rows        csrc/moe.hpp           few tokens for each expert; for many, the loop of torch costs nothing
                                       next to its products, and oneDNN computes them faster
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops.elementwise import Activation, Caps, activate, each, situ, softmax_, within
from weft.tensor.ops.linear import NativeWeight, product
from weft.tensor.scratch import scratch
from weft.tensor.weights.quantized import LINE, QuantizedWeight
from weft.tensor.weights.tiles import ExpertTiles, native_rows
from weft.units import PAD

ExpertWeights = torch.Tensor | QuantizedWeight | ExpertTiles
"""Matrices of experts, [experts, rows, columns], each a ``linear.Matrix``. Each quantised one may have an order of
columns.
"""

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "relu2": 2, "clamped_swiglu": 3, "gelu_tanh": 4}
CLAMP, GAIN = 7.0, 1.702
"""Limit and gain of ``clamped_swiglu``."""
_FEW_ROWS = 8
"""Rows per expert, on average, up to which the kernel is faster with float weights."""


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Biases of the two products of an expert, float32, [experts, rows of the matrix] each."""

    gate_up_EJ: torch.Tensor
    down_ED: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """Output [T, D] of a shared expert, and the gate [T, 1] through which it is added; None for no gate."""

    x_TD: torch.Tensor
    gate_T1: torch.Tensor | None

    def added_to(self, y_TD: torch.Tensor) -> torch.Tensor:
        """Return the sum with the output of the routed experts."""
        return y_TD + self.x_TD if self.gate_T1 is None else add_gated(y_TD, self.x_TD, self.gate_T1)


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Rule that chooses ``per_token`` experts with the best scores. ``normalized``: their weights sum to 1
    (``normalizer_eps`` is added to the sum), times ``scale``. "late_sigmoid": scores choose, and their sigmoids weigh.
    "sparsemixer": an expert's weight is its share among the scores within ``band`` of it, those of better experts left
    out.
    With ``groups`` of experts, only the ``groups_chosen`` groups with the largest sum of their ``group_best`` best
    scores take part. ``others_zero``: the experts of other groups take part with scores of 0.
    """

    per_token: int
    normalized: bool
    scoring: Literal["softmax", "sigmoid", "late_sigmoid", "sparsemixer", "sqrtsoftplus"] = "softmax"
    scale: float = 1.0
    normalizer_eps: float = 0.0
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 2
    band: float = 0.0
    others_zero: bool = False

    def by_logits(self, bias_E: torch.Tensor | None) -> bool:
        """Return whether unchanged scores choose and weigh: a softmax without a bias and without groups."""
        return self.scoring == "softmax" and bias_E is None and self.groups <= self.groups_chosen


@op("weft.tensor.kernels.expert_choice")
def choose_experts(
    scores_TE: torch.Tensor,
    rule: ChoiceRule,
    bias_E: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, X] of ``dtype``, expert ids int64 [T, X], best first, X = ``rule.per_token``.

    ``scores_TE``: the router's product. ``bias_E`` (float32) is only added for the choice. A PAD of ``positions_T``
    gives ids of PAD; None: no row is PAD. Scores are computed in float32.

    Sources: Shazeer et al., 2017; DeepSeek-V3, 2024, for sigmoids, the bias and groups; DeepSeek-V2, 2024, for groups
    by their best score; SparseMixer (Liu et al., 2024), as transformers' ``phimoe`` has it.
    """
    choose = _by_softmax if rule.by_logits(bias_E) else _by_scores
    choose = _by_nearness if rule.scoring == "sparsemixer" else choose
    weights_TX, ids_TX = choose(scores_TE.float(), rule, bias_E)
    return weights_TX.to(dtype), _without_pads(ids_TX, positions_T)


def _without_pads(ids_TX: torch.Tensor, positions_T: torch.Tensor | None) -> torch.Tensor:
    """Return ``ids_TX`` with PAD in PAD rows, which must read no expert's weights (law L4)."""
    return ids_TX if positions_T is None else ids_TX.masked_fill((positions_T == PAD)[:, None], PAD)


def _by_softmax(scores_TE: torch.Tensor, rule: ChoiceRule, _: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    top_TX, ids_TX = scores_TE.topk(rule.per_token, dim=-1)
    if rule.normalized:
        return softmax_(top_TX.contiguous(), 1.0) * rule.scale, ids_TX
    return softmax_(scores_TE.clone(memory_format=torch.contiguous_format), 1.0).gather(1, ids_TX) * rule.scale, ids_TX


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


def _scored(scores_TE: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    if rule.scoring == "softmax":
        return softmax_(scores_TE.clone(memory_format=torch.contiguous_format), 1.0)
    return each(_SCORES[rule.scoring], scores_TE) if rule.scoring in _SCORES else scores_TE


def weigh_experts(
    scores_TE: torch.Tensor,
    ids_TX: torch.Tensor,
    rule: ChoiceRule,
    positions_T: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``choose_experts`` returns, for experts ``ids_TX`` [T, X] that something else chose."""
    weights_TX = _weights(_scored(scores_TE.float(), rule).gather(1, ids_TX), rule)
    return weights_TX.to(dtype), _without_pads(ids_TX, positions_T)


def _by_scores(
    scores_TE: torch.Tensor, rule: ChoiceRule, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = _scored(scores_TE, rule)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.groups > rule.groups_chosen:
        choice_TGE = choice_TE.view(-1, rule.groups, choice_TE.shape[1] // rule.groups)
        best_TG = choice_TGE.topk(rule.group_best, dim=-1).values.sum(-1)
        out_TG = best_TG.topk(rule.groups - rule.groups_chosen, dim=-1, largest=False).indices
        # Excluded by -inf: with a negative bias, a choice of 0 could win over an expert of a chosen group.
        left = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, out_TG, True)
        choice_TE = choice_TGE.masked_fill(left[..., None], 0.0 if rule.others_zero else -torch.inf).flatten(1)
    ids_TX = choice_TE.topk(rule.per_token, dim=-1).indices
    # The bias decides the choice and weighs nothing.
    return _weights(scores_TE.gather(1, ids_TX), rule), ids_TX


def _weights(weights_TX: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    if rule.scoring == "late_sigmoid":
        weights_TX = each(torch.sigmoid, weights_TX)
    if rule.normalized:
        weights_TX = weights_TX / (weights_TX.sum(-1, keepdim=True) + rule.normalizer_eps)
    return weights_TX * rule.scale


def _by_nearness(
    scores_TE: torch.Tensor, rule: ChoiceRule, _: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids, left_TE = [], [], scores_TE
    for _choice in range(rule.per_token):
        best_T1, id_T1 = left_TE.max(-1, keepdim=True)
        far_TE = (best_T1 - scores_TE) / scores_TE.abs().clamp_min(best_T1) > rule.band
        shares_TE = softmax_(left_TE.masked_fill(far_TE, -torch.inf), 1.0)
        weights.append(shares_TE.gather(1, id_T1))
        ids.append(id_T1)
        left_TE = left_TE.scatter(1, id_T1, -torch.inf)
    return torch.cat(weights, 1), torch.cat(ids, 1)


@op("weft.tensor.kernels.moe")
def moe(
    x_TD: torch.Tensor,
    expert_ids_TX: torch.Tensor,
    expert_weights_TX: torch.Tensor,
    gate_up_EJD: ExpertWeights,
    down_EDI: ExpertWeights,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    biases: ExpertBiases | None = None,
    limit: float = 0.0,
    caps: Caps = (0.0, 0.0),
    shared: SharedOutput | None = None,
) -> torch.Tensor:
    """Return ``y_t = sum_x weight[t, x] * down_e(silu(gate_e(x_t)) * up_e(x_t))`` with e = ids[t, x] and
    ``activation`` instead of silu; ``down_e(act(up_e(x_t)))`` for experts that are not ``gated``.

    ``x_TD`` [T, D]; ``expert_ids_TX`` int64 [T, X] (PAD: that choice is skipped) and ``expert_weights_TX`` [T, X],
    both from the router; ``gate_up_EJD`` [E, 2 I, D], the gate's rows first ([E, I, D] without gates); ``down_EDI``
    [E, D, I]; either may be quantised. Returns [T, D] in the dtype of ``x_TD``; the choices of a token are added in
    float32. Experts without a token are not computed. ``biases``: added to each product. ``clamped_swiglu`` replaces
    both factors: (up + 1) gate sigmoid(1.702 gate), with a limit of 7. ``limit``: ``families.architecture.Dense``.
    ``caps``: of ``situ``. ``shared``: added to the result after its rounding.

    Source: Shazeer et al., 2017; the stacked weights of transformers' granitemoehybrid and qwen3_next;
    ``GptOssExperts`` for biases and the clamp.
    """

    def expert(rows: torch.Tensor, number: int) -> torch.Tensor:
        inner = product(rows, gate_up_EJD[number])
        if biases is not None:
            inner = inner + biases.gate_up_EJ[number].to(inner.dtype)
        y = product(activated(inner, activation, gated=gated, limit=limit, caps=caps), down_EDI[number])
        return y if biases is None else y + biases.down_ED[number].to(y.dtype)

    y_TD = by_expert(x_TD, expert_ids_TX, expert_weights_TX, gate_up_EJD.shape[0], expert)
    return y_TD if shared is None else shared.added_to(y_TD)


def activated(
    inner: torch.Tensor, activation: Activation, *, gated: bool, limit: float = 0.0, caps: Caps = (0.0, 0.0)
) -> torch.Tensor:
    """Return the activation between the two products of an expert. ``limit``: see ``families.architecture.Dense``."""
    if activation == "situ":
        gate, up = inner.chunk(2, dim=-1)
        return situ(gate, up, caps)
    if not gated:
        return activate(inner, activation)
    gate, up = within(inner.chunk(2, dim=-1), limit_of(activation, limit))
    if activation == "clamped_swiglu":
        return (up + 1) * (gate * each(torch.sigmoid, gate * GAIN))
    return activate(gate, activation) * up


def limit_of(activation: Activation, limit: float) -> float:
    return CLAMP if activation == "clamped_swiglu" else limit


def by_expert(
    x_TD: torch.Tensor,
    expert_ids_TX: torch.Tensor,
    expert_weights_TX: torch.Tensor,
    expert_count: int,
    expert: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Return ``moe`` with any ``expert``, a function of its rows [n, D] and its number -> [n, D]."""
    tokens, choices = expert_ids_TX.shape
    ids = expert_ids_TX.flatten()
    # Stable: the rows of an expert keep the order of the tokens.
    order = torch.argsort(ids, stable=True)
    # Ids start at PAD (-1), so that the first count is of the pairs to skip.
    counts = torch.bincount(ids - PAD, minlength=expert_count + 1).tolist()
    pair_rows = scratch.take("moe.pair_rows", (ids.numel(), x_TD.shape[1]), x_TD.dtype)
    begin = counts[0]
    # Skipped pairs come first, and are gathered below with their weights: they must be zeros, not old memory.
    pair_rows[:begin] = 0
    for number, count in enumerate(counts[1:]):
        if count == 0:
            continue
        rows = x_TD.index_select(0, order[begin : begin + count] // choices)
        pair_rows[begin : begin + count] = expert(rows, number)
        begin += count
    place_TX = torch.empty_like(order).scatter_(0, order, torch.arange(ids.numel(), device=ids.device))
    place_TX = place_TX.view(tokens, choices)
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    # In the router's order, so that a token's sum does not depend on the rest of the batch.
    for choice in range(choices):
        out_TD.addcmul_(
            pair_rows.index_select(0, place_TX[:, choice]).float(), expert_weights_TX[:, choice, None].float()
        )
    return out_TD.to(x_TD.dtype)


@op()
def expert_products(x_TXD: torch.Tensor, expert_ids_TX: torch.Tensor, weights_EJD: ExpertWeights) -> torch.Tensor:
    """Return ``weights[ids[t, x]] @ x[t, x]``, [T, X, J] in the dtype of ``x_TXD``; zeros for ids of PAD.

    ``x_TXD`` [T, X, D]; ``expert_ids_TX`` int64 [T, X]; ``weights_EJD`` [E, J, D]: values, quantised or in tiles. On a
    CPU experts without a token are not computed. On a GPU all are, as counting tokens would wait for the device.

    Source: transformers ``JetMoeParallelExperts``.
    """
    x_PD, ids_P = x_TXD.flatten(0, 1), expert_ids_TX.flatten()
    products = _by_count if x_PD.is_cpu else _of_all
    return products(x_PD, ids_P, weights_EJD).view(*expert_ids_TX.shape, weights_EJD.shape[1])


def _by_count(x_PD: torch.Tensor, ids_P: torch.Tensor, weights_EJD: ExpertWeights) -> torch.Tensor:
    out_PJ = x_PD.new_zeros((len(x_PD), weights_EJD.shape[1]))
    order = torch.argsort(ids_P, stable=True)
    # Ids start at PAD (-1), so that the first count is of the pairs to skip.
    begin, *counts = torch.bincount(ids_P - PAD, minlength=weights_EJD.shape[0] + 1).tolist()
    for number, pairs in enumerate(counts):
        if pairs:
            own = order[begin : begin + pairs]
            out_PJ[own] = product(x_PD[own], weights_EJD[number])
            begin += pairs
    return out_PJ


def _of_all(x_PD: torch.Tensor, ids_P: torch.Tensor, weights_EJD: ExpertWeights) -> torch.Tensor:
    out_PJ = x_PD.new_zeros((len(x_PD), weights_EJD.shape[1]))
    for number in range(weights_EJD.shape[0]):
        out_PJ = torch.where((ids_P == number)[:, None], product(x_PD, weights_EJD[number]), out_PJ)
    return out_PJ


@moe.in_cpp
def _moe(
    x_TD: torch.Tensor,
    expert_ids_TX: torch.Tensor,
    expert_weights_TX: torch.Tensor,
    gate_up_EJD: ExpertWeights,
    down_EDI: ExpertWeights,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    biases: ExpertBiases | None = None,
    limit: float = 0.0,
    caps: Caps = (0.0, 0.0),
    shared: SharedOutput | None = None,
) -> torch.Tensor | Unfit:
    if shared is not None or activation not in _ACTIVATIONS or not _fits(x_TD, expert_ids_TX, gate_up_EJD, down_EDI):
        return UNFIT
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    ids, weights = expert_ids_TX.contiguous(), expert_weights_TX.float().contiguous()
    assert ids.dtype == torch.int64
    (gate_up, gate_up_table), (down, down_table) = _native(gate_up_EJD), _native(down_EDI)
    out_TD = x_TD.new_empty(x_TD.shape)
    native.extension().moe(
        x_TD.data_ptr(),
        x_TD.stride(0),
        native.DTYPES[x_TD.dtype],
        *ids.shape,
        gate_up_EJD.shape[0],
        ids.data_ptr(),
        weights.data_ptr(),
        gate_up,
        down,
        gate_up_table,
        down_table,
        native.address_of(None if biases is None else biases.gate_up_EJ),
        native.address_of(None if biases is None else biases.down_ED),
        _ACTIVATIONS[activation],
        limit_of(activation, limit),
        gated,
        getattr(gate_up_EJD, "exact", False),
        out_TD.data_ptr(),
    )
    return out_TD


def _fits(x_TD: torch.Tensor, ids_TX: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    if not native.fits(x_TD) or not x_TD.shape[0] or type(gate_up) is not type(down):
        return False
    if not isinstance(gate_up, torch.Tensor) and not isinstance(down, torch.Tensor):
        return gate_up.fits_experts(x_TD) and down.fits_experts(x_TD)
    return (
        x_TD.dtype == gate_up.dtype == down.dtype
        and gate_up.shape[2] % LINE == down.shape[2] % LINE == 0
        and ids_TX.numel() <= _FEW_ROWS * gate_up.shape[0]
    )


def _native(weights: ExpertWeights) -> tuple[NativeWeight, int]:
    if not isinstance(weights, torch.Tensor):
        return weights.native_experts()
    assert weights.is_contiguous()
    return native_rows(weights[0]), 0


def rows_alone(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """Return ``product`` with rows that do not depend on each other: those of plain matrices are multiplied one by
    one, as torch's own products differ with the number of rows.
    """
    weight = weights[expert]
    if not isinstance(weight, torch.Tensor) or len(x) == 1 or not x.is_cpu:
        return product(x, weight)
    return torch.cat([product(row, weight) for row in torch.split(x, 1)])


@op("weft.tensor.kernels.moe")
def add_gated(y_TD: torch.Tensor, x_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """Return the output of a shared expert, added to that of the routed experts through a gate for each token:
    ``y + sigmoid(gate) * x`` in the dtype of ``y_TD``. torch rounds each step to it, Triton only the sum.

    Source: transformers ``Qwen2MoeSparseMoeBlock``.
    """
    return y_TD + each(torch.sigmoid, gate_T1) * x_TD
