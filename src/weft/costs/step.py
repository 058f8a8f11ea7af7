"""Seconds of a step by the work in it, with which all parts price computing.

    step      fixed_s + prefill tokens x token_s + (query, key) pairs x pair_s
              + decodes x decode_s + tokens that these read x context_s

``prefill_s`` is the time that computing a span of a prompt adds to the steps that run anyway. It is linear and
quadratic in the length of a prompt, as attention is. ``weft.costs.fit`` measures the terms.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Any, NamedTuple, Protocol

import msgspec

from weft.errors import ConfigError

MEASURED = "measured"


class Work(NamedTuple):
    """Amounts of work of a step. ``pairs``: (query, key) pairs of the prefills, which grow with the square of a prompt.
    ``context``: tokens whose KV the decodes read."""

    prefill_tokens: int
    pairs: int
    decodes: int
    context: int


def pairs_of(start: int, end: int) -> int:
    """Return the (query, key) pairs of a prefill of the positions [start, end): each sees itself and all before."""
    return (end * (end + 1) - start * (start + 1)) // 2


class CostModel(Protocol):
    def step_s(self, work: Work) -> float:
        """Return the seconds of a step."""

    def moved_s(self, moved: int) -> float:
        """Return by how many seconds ``moved`` bytes read or written in the arena of one device lengthen a step."""

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds that computing positions [start, end) of a prompt adds to the other work."""

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the numbers, for the report."""


class StepCost(msgspec.Struct, frozen=True):
    """Terms of a linear cost, which are a ``CostModel`` and a message to routers. No term is negative. ``error``:
    median relative error of the steps of a recording. ``steps``: how many were measured, 0 for a guess.
    """

    fixed_s: float
    token_s: float
    pair_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 0.0
    error: float = 0.0
    steps: int = 0

    def step_s(self, work: Work) -> float:
        return (
            self.fixed_s
            + work.prefill_tokens * self.token_s
            + work.pairs * self.pair_s
            + work.decodes * self.decode_s
            + work.context * self.context_s
        )

    def moved_s(self, moved: int) -> float:
        return 0.0  # measured step times already include moves

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) * self.token_s + pairs_of(start, end) * self.pair_s

    def tokens_within(self, start: int, seconds: float) -> float:
        """Return the prefill tokens from position ``start`` on that take ``seconds``; a fraction, or infinity."""
        # n token_s + (n start + n (n + 1) / 2) pair_s = seconds, solved for n
        linear = self.token_s + self.pair_s * (start + 0.5)
        divisor = linear + sqrt(linear * linear + 2 * self.pair_s * seconds)
        return 2 * seconds / divisor if divisor else float("inf")

    def times(self, factor: float) -> StepCost:
        """Return the cost on a machine that takes ``factor`` times as long."""
        return StepCost(
            self.fixed_s * factor,
            self.token_s * factor,
            self.pair_s * factor,
            self.decode_s * factor,
            self.context_s * factor,
            self.error,
            self.steps,
        )

    def to_json(self) -> dict[str, Any]:
        return {"kind": "fitted", **msgspec.structs.asdict(self)}


GUESSED_COST = StepCost(fixed_s=5e-3, token_s=1e-4)
"""Cost of a replica before any step was measured. All replicas have the same guess, so it decides nothing between
them.
"""


TERMS = ("fixed_s", "token_s", "pair_s", "decode_s", "context_s")


def mean_cost(costs: list[StepCost]) -> StepCost:
    """Return the mean of each term; without any costs the guess."""
    if not costs:
        return GUESSED_COST
    return StepCost(**{term: sum(getattr(cost, term) for cost in costs) / len(costs) for term in TERMS})


def given_cost(text: str) -> StepCost | None:
    """Return the costs that ``debug.step_costs`` gives, such as "fixed_s=0.1,token_s=0.01"; None for "measured".
    Raises ConfigError for another text."""
    if text == MEASURED:
        return None
    terms: dict[str, float] = {}
    for pair in text.split(","):
        term, _, number = pair.partition("=")
        try:
            seconds = float(number)
        except ValueError:
            seconds = -1.0
        if term not in TERMS or term in terms or not 0 <= seconds < inf:
            raise ConfigError(
                f"debug.step_costs is {text!r}, and {pair!r} is not valid in it: it may be {MEASURED}, or seconds for "
                f"each of {', '.join(TERMS)} that is not 0, such as fixed_s=0.1,token_s=0.01",
                param="debug.step_costs",
            )
        terms[term] = seconds
    if not terms.get("token_s"):
        raise ConfigError(
            f"debug.step_costs is {text!r}, and token_s is missing: the seconds of a prefill token, more than 0",
            param="debug.step_costs",
        )
    return msgspec.convert({"fixed_s": 0.0, **terms}, StepCost)
