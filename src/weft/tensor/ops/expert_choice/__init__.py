"""The router of a mixture of experts: the experts of each token and their weights, from its scores."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.expert_choice import cpu
from weft.tensor.ops.expert_choice.rule import ChoiceRule

__all__ = ["ChoiceRule", "choose_experts"]


def choose_experts(scores_TE: torch.Tensor, rule: ChoiceRule, bias_E: torch.Tensor | None = None,
                   positions_T: torch.Tensor | None = None, *,
                   dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """-> weights [T, X] of ``dtype``, expert ids int64 [T, X], best first, X = ``rule.per_token``.

    ``scores_TE``: what the router's product gives. ``bias_E`` (float32) is added for the choice alone, and
    goes with sigmoid scores. A token whose position is PAD gets ids of PAD, so that no expert's weights are
    read for it (law L4). ``positions_T`` None: no row is PAD. Scores are computed in float32.

    Sources: Shazeer et al., 2017; DeepSeek-V3, 2024, for sigmoids, the bias and groups.
    """
    assert rule.scoring == "sigmoid" or (bias_E is None and rule.groups == 1), (
        "a bias on the choice and groups of experts go with sigmoid scores")
    others = [one for one in (bias_E, positions_T) if one is not None]
    if gpu.fits(scores_TE, *others):
        from weft.tensor.kernels import expert_choice as triton
        return triton.choose_experts(scores_TE, rule, bias_E, positions_T, dtype=dtype)
    return cpu.choose_experts(scores_TE, rule, bias_E, positions_T, dtype=dtype)
