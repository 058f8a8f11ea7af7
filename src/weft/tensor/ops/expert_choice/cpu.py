"""expert_choice in torch.

Normalised weights are a softmax over the chosen scores. That equals a softmax over all experts, chosen and
divided by their sum.
"""

from __future__ import annotations

import torch

from weft.tensor.ops.expert_choice.rule import ChoiceRule
from weft.units import PAD


def choose_experts(scores_TE: torch.Tensor, rule: ChoiceRule, bias_E: torch.Tensor | None,
                   positions_T: torch.Tensor | None, *,
                   dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    choose = _by_sigmoid if rule.scoring == "sigmoid" else _by_softmax
    weights_TX, ids_TX = choose(scores_TE.float(), rule, bias_E)
    if positions_T is not None:
        ids_TX = ids_TX.masked_fill((positions_T == PAD)[:, None], PAD)
    return weights_TX.to(dtype), ids_TX


def _by_softmax(scores_TE: torch.Tensor, rule: ChoiceRule,
                _: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    top_TX, ids_TX = scores_TE.topk(rule.per_token, dim=-1)
    if rule.normalized:
        return torch.softmax(top_TX, dim=-1) * rule.scale, ids_TX
    return (top_TX - scores_TE.logsumexp(dim=-1, keepdim=True)).exp() * rule.scale, ids_TX


def _by_sigmoid(scores_TE: torch.Tensor, rule: ChoiceRule,
                bias_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = scores_TE.sigmoid()
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.groups > rule.groups_chosen:
        choice_TGE = choice_TE.view(-1, rule.groups, choice_TE.shape[1] // rule.groups)
        best_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
        out_TG = best_TG.topk(rule.groups - rule.groups_chosen, dim=-1, largest=False).indices
        left = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, out_TG, True)
        choice_TE = choice_TGE.masked_fill(left[..., None], -torch.inf).flatten(1)
    ids_TX = choice_TE.topk(rule.per_token, dim=-1).indices
    weights_TX = scores_TE.gather(1, ids_TX)
    if rule.normalized:
        weights_TX = weights_TX / (weights_TX.sum(-1, keepdim=True) + rule.normalizer_eps)
    return weights_TX * rule.scale, ids_TX
