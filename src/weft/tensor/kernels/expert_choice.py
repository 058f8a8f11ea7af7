"""expert_choice in Triton: a program is a token; one launch instead of four to fifteen.

    scores [E] in registers  ->  groups that take part  ->  X times: the best, removed  ->  weights, ids

X is about 8, so X passes over registers cost less than a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.moe import ChoiceRule

WARP = Blocks(1, warps=1)


@triton.jit
def _best(numbers, expert, free, EP: tl.constexpr):
    """Return (the highest of ``numbers`` [EP] where ``free``, its expert)."""
    best = tl.max(tl.where(free, numbers, float("-inf")), 0)
    # Among equal scores the expert with the lower number comes first.
    return best, tl.min(tl.where(free & (numbers == best), expert, EP), 0)


@triton.jit
def _in_chosen_groups(
    choice,
    expert,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    EP: tl.constexpr,
    GP: tl.constexpr,
):
    """Return which experts [EP] are of the groups of SIZE with the largest sums of two."""
    group, sums = tl.arange(0, GP), tl.full((GP,), float("-inf"), tl.float32)
    for candidate in range(GROUPS):
        member = expert // SIZE == candidate
        first, place = _best(choice, expert, member, EP)
        second, _ = _best(choice, expert, member & (expert != place), EP)
        sums = tl.where(group == candidate, first + second, sums)
    free, chosen = group < GROUPS, expert < 0
    for _ in range(GROUPS_CHOSEN):
        _, candidate = _best(sums, group, free, GP)
        free = free & (group != candidate)
        chosen = chosen | (expert // SIZE == candidate)
    return chosen


@triton.jit
def _choose(
    scores,
    bias,
    positions,
    weights,
    ids,
    scores_row,
    scale,
    normalizer_eps,
    E: tl.constexpr,
    EP: tl.constexpr,
    X: tl.constexpr,
    XP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    GP: tl.constexpr,
):
    """Choose the X best experts of a token. Grid: tokens.

    ``scores`` [T, E] by ``scores_row``; ``bias`` float32 [E] or None, only for the choice; ``positions`` int64 [T]
    or None: PAD rows get ids of PAD and weights of 0. Writes ``weights`` [T, X] and ``ids`` int64 [T, X], best
    first.
    """
    token, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, EP), tl.arange(0, XP)
    offset, mask = token * X + place, place < X
    # A row of PAD reads no score.
    pad = token < 0
    if positions is not None:
        pad = tl.load(positions + token) < 0
    if pad:
        tl.store(ids + offset, tl.full((XP,), -1, tl.int64), mask=mask)
        tl.store(weights + offset, tl.zeros((XP,), weights.dtype.element_ty), mask=mask)
        return
    free = expert < E
    score = tl.load(scores + token * scores_row + expert, mask=free, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(score)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=free, other=0.0)
    # NaN is the lowest score for the choice, so an id is always an expert's; weights keep it, to be seen.
    choice = tl.where(choice != choice, float("-inf"), choice)
    if GROUPS > GROUPS_CHOSEN:
        free = free & _in_chosen_groups(choice, expert, GROUPS, GROUPS_CHOSEN, E // GROUPS, EP, GP)
    picked, chosen = tl.zeros((XP,), tl.float32), tl.zeros((XP,), tl.int32)
    for number in range(X):
        _, best = _best(choice, expert, free, EP)
        free = free & (expert != best)
        picked = tl.where(place == number, tl.sum(tl.where(expert == best, score, 0.0), 0), picked)
        chosen = tl.where(place == number, best, chosen)
    if SIGMOID:
        weight = picked
        if NORMALIZED:
            weight = picked / (tl.sum(tl.where(mask, picked, 0.0), 0) + normalizer_eps)
    elif NORMALIZED:
        top = tl.max(tl.where(mask, picked, float("-inf")), 0)
        weight = tl.exp(picked - top)
        weight = weight / tl.sum(tl.where(mask, weight, 0.0), 0)
    else:
        top = tl.max(score, 0)
        weight = tl.exp(picked - (top + tl.log(tl.sum(tl.exp(score - top), 0))))
    tl.store(weights + offset, (weight * scale).to(weights.dtype.element_ty), mask=mask)
    tl.store(ids + offset, chosen.to(tl.int64), mask=mask)


def choose_experts(
    scores_TE: torch.Tensor,
    rule: ChoiceRule,
    bias_E: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor] | Unfit:
    served = rule.scoring == "sigmoid" and rule.group_best == 2 and not rule.others_zero
    if not rule.by_logits(bias_E) and not served:
        return UNFIT
    scores_TE = dense_rows(scores_TE)
    tokens, experts = scores_TE.shape
    weights_TX = torch.empty((tokens, rule.per_token), dtype=dtype, device=scores_TE.device)
    ids_TX = torch.empty((tokens, rule.per_token), dtype=torch.int64, device=scores_TE.device)
    if tokens:
        launch(_choose, (tokens,))(
            scores_TE,
            bias_E,
            positions_T,
            weights_TX,
            ids_TX,
            scores_TE.stride(0),
            float(rule.scale),
            float(rule.normalizer_eps),
            **_constants(rule, experts),
            num_warps=WARP.warps,
        )
    return weights_TX, ids_TX


def _constants(rule: ChoiceRule, experts: int) -> dict[str, int | bool]:
    return {
        "E": experts,
        "EP": triton.next_power_of_2(experts),
        "X": rule.per_token,
        "XP": triton.next_power_of_2(rule.per_token),
        "SIGMOID": rule.scoring == "sigmoid",
        "NORMALIZED": rule.normalized,
        "GROUPS": rule.groups,
        "GROUPS_CHOSEN": rule.groups_chosen,
        "GP": triton.next_power_of_2(rule.groups),
    }
