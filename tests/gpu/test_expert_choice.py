"""expert_choice in Triton, against torch's operators; and rows of PAD, which read no expert."""

from __future__ import annotations

import pytest
import torch

from weft.tensor.ops.moe import ChoiceRule, choose_experts
from weft.units import PAD

RULES = {
    "softmax": ChoiceRule(3, True, scale=2.0),
    "softmax over all": ChoiceRule(1, False),
    "sigmoid": ChoiceRule(4, False, "sigmoid", scale=1.5),
    "groups": ChoiceRule(3, True, "sigmoid", 2.5, 1e-20, groups=4, groups_chosen=2),
}


def scores_of(tokens: int, experts: int) -> torch.Tensor:
    return torch.randn(tokens, experts + 1, generator=torch.Generator().manual_seed(5))[:, :experts] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_choices_and_weights_equal_those_of_torch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    rule, scores = RULES[name], scores_of(5, 12).to(device)
    bias = None
    if rule.scoring == "sigmoid":
        bias = torch.linspace(-0.5, 0.5, 12, device=device)
    positions = torch.tensor([4, PAD, 0, 9, PAD], device=device)
    weights, ids = choose_experts(scores, rule, bias, positions, dtype=dtype)
    exact_weights, exact_ids = choose_experts.torch(scores, rule, bias, positions, dtype=dtype)
    assert ids.tolist() == exact_ids.tolist()
    assert ids.dtype == torch.int64
    live = positions != PAD
    torch.testing.assert_close(
        weights[live], exact_weights[live], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    assert weights.dtype == dtype
    assert (ids[~live] == PAD).all()
    assert (choose_experts(scores, rule, bias, None, dtype=dtype)[1] >= 0).all(), "the control"


def test_a_bias_and_groups_change_the_choice(device: torch.device) -> None:
    """The control: neither is ignored."""
    scores, rule = scores_of(8, 12).to(device), RULES["groups"]
    plain = choose_experts(scores, rule, None, None, dtype=torch.float32)[1]
    biased = choose_experts(scores, rule, torch.linspace(-2, 2, 12, device=device), None, dtype=torch.float32)[1]
    ungrouped = choose_experts(scores, RULES["sigmoid"], None, None, dtype=torch.float32)[1][:, :3]
    assert plain.tolist() != biased.tolist()
    assert plain.tolist() != ungrouped.tolist()


def test_experts_of_other_groups_have_a_score_of_zero_where_the_rule_says_so(device: torch.device) -> None:
    scores, bias = torch.tensor([[5.0, 4.0, 1.0, 2.0]], device=device), torch.full((4,), -2.0, device=device)
    for zero, best in ((False, 0), (True, 2)):
        rule = ChoiceRule(1, True, "sigmoid", groups=2, groups_chosen=1, others_zero=zero)
        assert choose_experts(scores, rule, bias, None, dtype=torch.float32)[1].item() == best


def test_scores_that_are_not_finite_choose_experts_that_exist(device: torch.device) -> None:
    scores = scores_of(3, 5).to(device)
    scores[1] = float("nan")
    scores[2, 1:] = float("-inf")
    for rule in (RULES["softmax"], RULES["sigmoid"]):
        weights, ids = choose_experts(scores, rule, None, None, dtype=torch.float32)
        assert ((ids >= 0) & (ids < 5)).all()
        assert all(len(set(row)) == rule.per_token for row in ids.tolist())
        assert weights[1].isnan().all(), "NaN stays visible"
        assert weights[0].isfinite().all()
