"""How a router chooses: numbers of the model, the same for each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """``per_token`` experts with the best scores. ``normalized``: their weights sum to 1 (``normalizer_eps``
    is added to the sum of sigmoids), times ``scale``. With ``groups`` of experts, only the ``groups_chosen``
    groups with the largest sum of their two best scores take part."""

    per_token: int
    normalized: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    normalizer_eps: float = 0.0
    groups: int = 1
    groups_chosen: int = 1
