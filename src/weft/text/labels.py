"""Labels of a score head: names, and probabilities from logits.

    problem_type                       logits to probabilities
    regression                         as they are
    single_label_classification        softmax
    multi_label_classification         sigmoid of each
    none                               sigmoid of one label, softmax of several

Sources: ``PretrainedConfig.problem_type`` of transformers, vLLM's pooling of classifiers and of steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["none", "softmax", "sigmoid"]
_BY_PROBLEM: Mapping[Any, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_STEPS = "ForProcessRewardModel"
_OF_TOKENS = ("ForTokenClassification", _OF_STEPS)
STEP_TAG = "<extra_0>"
"""Token that the client writes after each step of a solution, for a model that rewards steps (Qwen2.5-Math-PRM)."""


@dataclass(frozen=True, slots=True)
class Labels:
    """``names``: of the labels, in the order of the head's rows. ``of_tokens``: whether the head was trained to be read
    at each token; ``of_steps``: only at the tokens STEP_TAG."""

    names: tuple[str, ...]
    activation: Activation
    of_tokens: bool
    of_steps: bool = False

    def probabilities(self, pooled: bytes, *, raw: bool = False) -> list[list[float]]:
        """Return the probabilities in ``pooled`` (float32 rows of logits), by row; ``raw``: the logits."""
        values, count = array("f", pooled).tolist(), len(self.names)
        rows = [values[first : first + count] for first in range(0, len(values), count)]
        activation = "none" if raw else self.activation
        if activation == "softmax":
            return [_softmax(row) for row in rows]
        return [[sigmoid(value) for value in row] for row in rows] if activation == "sigmoid" else rows


def read_labels(config: Mapping[str, Any], count: int) -> Labels:
    """Return the ``count`` labels of a checkpoint's ``config``; a label without a name has transformers' default."""
    named = config.get("id2label")
    names = named if isinstance(named, dict) else {}
    known = config.get("problem_type")
    activation = _BY_PROBLEM.get(known) if isinstance(known, str) else None
    classes = [str(name) for name in config.get("architectures") or ()]
    return Labels(
        tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(count)),
        activation or ("softmax" if count > 1 else "sigmoid"),
        any(name.endswith(_OF_TOKENS) for name in classes),
        any(name.endswith(_OF_STEPS) for name in classes),
    )


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    shares = [math.exp(value - top) for value in row]
    total = math.fsum(shares)
    return [share / total for share in shares]
