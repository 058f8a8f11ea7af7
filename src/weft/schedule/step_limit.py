"""A step's prefill, limited by time: how many prompt tokens fit beside the decodes (``--max-step-ms``).

    |<------------- max_s ------------->|        prefill_s = max(max_s - decodes, decodes)
    | decodes   | prefill chunks        |
    | decodes                   | prefill chunks            |      slow decodes: prefill takes as long

A sequence that decodes waits for the whole step, so a long prefill is a gap in its answer. A budget in tokens
does not bound the gap: a token costs a hundred times more on one machine than on another. The limit holds
for steps with decodes. A step of prefills alone delays no answer and has the whole token budget.

If the decodes alone take most of ``max_s``, prefill takes as long as they do. Otherwise a busy server would
compute one chunk per step, and queues would grow for the sake of a bound that the decodes break anyway.

The limit is a value. The scheduler reads it, and the engine replaces it between two steps by one with a newer
estimate. So a plan stays a pure function of its state. Chunks end on the grid wherever the limit falls, so
tokens do not depend on it (promise 1).

**The estimate** has five terms, as in ``weft.schedule.work``. A measured step scales each term by the ratio
of measured and estimated seconds. A term with a larger share of the estimate moves more. So steps of decodes
correct the terms of decodes, and prefills those of prefills. Terms stay positive, and old errors fade within
some ten steps. The first measured step sets the unit. Before it, the proportions are a guess from the model's
geometry. A ratio is cut to ``_RATIO_MAX``, so one stalled step does not shrink the budget for long.

Rejected: least squares (prefills of one length make its terms ambiguous, and an extrapolation to shorter ones
is then arbitrary); a budget that shrinks after a long step and grows after a short one (it swings with the
prompts and knows nothing of contexts); a limit without decodes (it delays first tokens and shortens no gap).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.schedule.plan import StepPlan
from weft.schedule.work import Work, pairs_of, work_of

_RATE = 0.5
"""Share of an error that one step corrects."""
_RATIO_MAX = 4.0
"""Most, and inverse least, ratio of measured and estimated seconds that counts."""
_FIXED_TOKENS = 32.0
_DECODE_TOKENS = 2.0
"""Guessed costs of a step and of a decode, in prefill tokens."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step by kind of work: the step itself, a prefill token, a (query, key) pair, a decode, a
    token of a decode's context."""

    fixed_s: float
    token_s: float
    pair_s: float
    decode_s: float
    context_s: float

    def parts_s(self, work: Work) -> tuple[float, ...]:
        return (self.fixed_s, work.prefill_tokens * self.token_s, work.pairs * self.pair_s,
                work.decodes * self.decode_s, work.context * self.context_s)

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds that a prefill of [start, end) adds to a step."""
        return (end - start) * self.token_s + pairs_of(start, end) * self.pair_s

    def corrected(self, work: Work, seconds: float) -> StepEstimate:
        """After a step of ``work`` took ``seconds``."""
        parts = self.parts_s(work)
        total = sum(parts)
        ratio = min(max(seconds / total, 1 / _RATIO_MAX), _RATIO_MAX)
        rate = _RATE * total / sum(part * part for part in parts)
        return StepEstimate(*(term * ratio ** (rate * part)
                              for term, part in zip(self._terms(), parts, strict=True)))

    def scaled(self, unit: float) -> StepEstimate:
        return StepEstimate(*(term * unit for term in self._terms()))

    def _terms(self) -> tuple[float, ...]:
        return self.fixed_s, self.token_s, self.pair_s, self.decode_s, self.context_s


def guessed_estimate(pair_tokens: float) -> StepEstimate:
    """Proportions before any measurement; a prefill token takes one second. ``pair_tokens``: the cost of a
    (query, key) pair in prefill tokens."""
    return StepEstimate(_FIXED_TOKENS, 1.0, pair_tokens, _DECODE_TOKENS, pair_tokens)


@dataclass(frozen=True, slots=True)
class StepLimit:
    """``max_s``: see the module. ``estimate``: None before the first measured step; nothing is limited
    then."""

    max_s: float
    estimate: StepEstimate | None = None

    def prefill_s(self, decodes: int, context: int) -> float:
        """Seconds of prefill in a step of ``decodes`` sequences that read ``context`` tokens."""
        if self.estimate is None or not decodes:
            return math.inf
        decodes_s = sum(self.estimate.parts_s(Work(0, 0, decodes, context)))
        return max(self.max_s - decodes_s, decodes_s)

    def tokens_within(self, start: int, seconds: float) -> int:
        """Prefill tokens from position ``start`` on that take ``seconds``."""
        if self.estimate is None or math.isinf(seconds):
            return 1 << 62
        # n token_s + (n start + n (n + 1) / 2) pair_s = seconds, solved for n
        linear = self.estimate.token_s + self.estimate.pair_s * (start + 0.5)
        seconds = max(seconds, 0.0)
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.estimate.pair_s * seconds)))

    def spent_s(self, start: int, end: int) -> float:
        return 0.0 if self.estimate is None else self.estimate.prefill_s(start, end)


NO_LIMIT = StepLimit(math.inf)


class StepLimiter:
    """Learns the estimate from measured steps. ``use`` takes each new limit. ``pair_tokens``: see
    ``guessed_estimate``."""

    def __init__(self, max_s: float, pair_tokens: float, use: Callable[[StepLimit], None]) -> None:
        self._max_s = max_s
        self._guess = guessed_estimate(pair_tokens)
        self._estimate: StepEstimate | None = None
        self._use = use

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """The step ``plan`` took ``seconds``. Steps with windows of drafts are other work."""
        if seconds <= 0 or plan.window_count or not plan.run_count:
            return
        work = work_of(plan)
        if self._estimate is None:
            self._estimate = self._guess.scaled(seconds / sum(self._guess.parts_s(work)))
        else:
            self._estimate = self._estimate.corrected(work, seconds)
        self._use(StepLimit(self._max_s, self._estimate))
