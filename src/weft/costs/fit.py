"""The terms of ``StepCost``, fitted to the steps of an engine: one least-squares fit, with two horizons.

    each step with a prefill, and one in 16 of the others
        |--> recent   fades over 64 steps        cost       router: seconds by replica
        |                                        cost_now   --max-step-ms: the same at the present pace
        '--> long     half after 16,384 steps    quadratic  the cache's currency: pairs against tokens

The fit minimises the relative error, stored as the sums of the five normal equations: a step costs 25 multiplications
and no memory. Terms that would be negative are left out, the worst first.

**Two horizons.** An engine whose device became slow must be known to be slow within some 200 steps. The ratio of the
two terms of a prompt needs long prompts, which are rare, and a slow device does not change it.

**The pace.** A limit on the time of the next step cannot wait for 200. So each step moves one factor by a share of its
error. **The guess.** The first steps are often prefills of one length. So the fit begins with steps as the geometry of
the model expects them, in the unit of the first step. Steps that verify drafts are left out: ``weft.costs.rows`` has
the cost of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from weft.costs.step import StepCost, Work, pairs_of
from weft.errors import ConfigError

TERMS = 5
FADE_STEPS = 64
STEPS_MIN = 8
"""Steps with a prefill before their cost is reported to a router."""
STEPS_REMEMBERED = 16384
FIT_EVERY = 256
"""Steps with a prefill between two fits of the long horizon."""
PAIRS_SHARE_MIN = 0.05
"""Least share of attention in the guessed cost of all prefill so far that allows its term to be fitted."""
_REFIT_EVERY = 8
_DECODE_STEPS_EACH = 16
_FIRST_STEPS = 16
"""Steps of an engine with a guess after each of which the terms are fitted again."""
_PACE_SHARE = 0.3
_RATIO_MAX = 4.0
"""Factor: a stalled step counts as at most this many times its estimate, and is forgotten within some six steps."""
_GUESS_WEIGHT = 0.01
"""Weight of guessed steps: they only decide terms that measurements leave open."""
_GUESS_FIXED_TOKENS, _GUESS_DECODE_TOKENS = 32.0, 2.0
"""Guessed costs of a step and of a decode, in prefill tokens."""
_GUESS_STEPS = (
    Work(64, pairs_of(0, 64), 0, 0),
    Work(1024, pairs_of(0, 1024), 0, 0),
    Work(0, 0, 1, 1000),
    Work(0, 0, 16, 16_000),
    Work(64, pairs_of(30_000, 30_064), 4, 4000),
)


class StepFit:
    """Sums of a least-squares fit. ``fade``: the factor by which each step lowers the weight of earlier ones."""

    __slots__ = ("_fade", "_matrix", "_sums")

    def __init__(self, fade: float = 1.0) -> None:
        self._fade = fade
        self._matrix = np.zeros((TERMS, TERMS))
        self._sums = np.zeros(TERMS)

    def add(self, work: Work, seconds: float, weight: float = 1.0) -> None:
        """Add a step that took ``seconds``, more than 0."""
        # Divided by the seconds, so that the fit minimises the relative error.
        row = np.array([1.0, *work]) / seconds
        if self._fade != 1.0:
            self._matrix *= self._fade
            self._sums *= self._fade
        self._matrix += weight * np.outer(row, row)
        self._sums += weight * row

    def terms(self) -> list[float]:
        """Return the seconds of each kind of work, none negative."""
        size = np.sqrt(np.diag(self._matrix))
        columns = np.flatnonzero(size)
        if not columns.size:
            return [0.0] * TERMS
        while True:
            scaled = self._matrix[np.ix_(columns, columns)] / np.outer(size[columns], size[columns])
            solution, *_ = np.linalg.lstsq(scaled, self._sums[columns] / size[columns], rcond=1e-12)
            if solution.min() >= 0 or len(columns) == 1:
                break
            # A negative term is left out, the worst first.
            columns = np.delete(columns, solution.argmin())
        terms = np.zeros(TERMS)
        terms[columns] = np.maximum(solution, 0.0) / size[columns]
        values: list[float] = terms.tolist()
        return values


class StepMeter:
    """Meter of the steps of one engine. ``pair_tokens``: guessed cost of a (query, key) pair in prefill tokens; None:
    no guess, and terms are fitted when they are read.
    """

    def __init__(self, pair_tokens: float | None = None) -> None:
        self.prefill_steps = 0
        self._recent = StepFit(1 - 1 / FADE_STEPS)
        self._long = StepFit(0.5 ** (1 / STEPS_REMEMBERED))
        self._pair_tokens = pair_tokens
        self._steps = self._unfitted = 0
        self._tokens = self._pairs = 0
        self._cost: StepCost | None = None
        self._pace = 1.0
        self.last = Work(0, 0, 0, 0)

    def stepped(self, step: int, work: Work, seconds: float) -> None:
        """Record that step number ``step`` took ``seconds``, and verified no drafts."""
        if seconds <= 0:
            return
        self.last = work
        if self._cost is not None and (expected_s := self._cost.step_s(work)):
            ratio = seconds / (self._pace * expected_s)
            self._pace *= min(max(ratio, 1 / _RATIO_MAX), _RATIO_MAX) ** _PACE_SHARE
        if self._pair_tokens is not None and not self._steps:
            self._add_guess(
                StepCost(_GUESS_FIXED_TOKENS, 1.0, self._pair_tokens, _GUESS_DECODE_TOKENS, self._pair_tokens),
                work,
                seconds,
            )
        counts_all = self._pair_tokens is not None and self._steps < FADE_STEPS
        if not work.prefill_tokens and step % _DECODE_STEPS_EACH and not counts_all:
            return  # a step of decodes is like the one before it
        self._recent.add(work, seconds)
        self._long.add(work, seconds)
        self._steps += 1
        self._unfitted += 1
        self.prefill_steps += work.prefill_tokens > 0
        self._tokens += work.prefill_tokens
        self._pairs += work.pairs
        if self._pair_tokens is not None:
            self._fitted(1 if self._steps <= _FIRST_STEPS else _REFIT_EVERY)

    def cost(self) -> StepCost | None:
        """Return the fitted cost; None until enough steps were measured."""
        return self._fitted(_REFIT_EVERY) if self.prefill_steps >= STEPS_MIN else None

    def cost_now(self) -> StepCost | None:
        """Return the cost at the pace of the last steps; None before the first step."""
        return None if self._cost is None else self._cost.times(self._pace)

    @property
    def quadratic_is_due(self) -> bool:
        """Whether enough prefills were measured since the last fit to change ``quadratic``."""
        return self.prefill_steps % FIT_EVERY == 0

    def quadratic(self, guess: float) -> float:
        """Return the quadratic term of a prompt's cost over the linear one, by the long horizon. ``guess``: the value
        used while prompts are too few or too short to tell the two terms apart.
        """
        guessed = 2 * guess * self._pairs
        if self.prefill_steps < FIT_EVERY or guessed < PAIRS_SHARE_MIN * (self._tokens + guessed):
            return guess
        # n tokens cost n a + n (n + 1) / 2 b: the linear term is a + b / 2
        _, token_s, pair_s, _, _ = self._long.terms()
        return pair_s / (2 * token_s + pair_s) if token_s else guess

    def _fitted(self, every: int) -> StepCost:
        before = self._cost
        if before is None or self._unfitted >= every:
            fixed_s, token_s, pair_s, decode_s, context_s = self._recent.terms()
            self._cost = StepCost(fixed_s, token_s, pair_s, decode_s, context_s, steps=self.prefill_steps)
            self._unfitted = 0
            if before is not None and (expected_s := self._cost.step_s(self.last)):
                # The new terms have the last steps' pace in them: the expected seconds of such a step stay.
                self._pace *= (before.step_s(self.last) / expected_s) or 1.0
            return self._cost
        return before

    def _add_guess(self, guess: StepCost, work: Work, seconds: float) -> None:
        unit_s = seconds / guess.step_s(work)
        for guess_step in _GUESS_STEPS:
            self._recent.add(guess_step, unit_s * guess.step_s(guess_step), _GUESS_WEIGHT)


def fit_steps(steps: Sequence[tuple[Work, float]], *, name: str = "the recording") -> StepCost:
    """Return the cost of recorded steps. Raises ConfigError if there are too few to fit."""
    timed = [(work, seconds) for work, seconds in steps if seconds > 0]
    if len(timed) < STEPS_MIN:
        raise ConfigError(
            f"{name} has the times of {len(timed)} steps; a fit needs {STEPS_MIN} at least", param="--fit"
        )
    fit = StepFit()
    for work, seconds in timed:
        fit.add(work, seconds)
    fixed_s, token_s, pair_s, decode_s, context_s = fit.terms()
    cost = StepCost(fixed_s, token_s, pair_s, decode_s, context_s, steps=len(timed))
    errors = [abs(cost.step_s(work) - seconds) / seconds for work, seconds in timed]
    return msgspec.structs.replace(cost, error=float(np.median(errors)))
