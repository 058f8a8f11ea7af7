"""The cost of computing a prompt, fitted to the measured steps of an engine: linear + quadratic, online.

    seconds of a step  =  fixed + a x prefill tokens + b x pairs + c x decodes + d x context

    a prompt of n tokens adds  a n + b n (n + 1) / 2        so its linear term is a + b / 2, and its
                                                            quadratic one b / 2

The sums are in ``step_fit``. The measurements are those of ``weft.schedule.work.Work``.

A policy compares states of one model, so only the ratio of the two terms matters. The linear term is 1 by
definition, so earlier values keep their unit. The sizes of the model give the ratio until the prompts are
long enough, and numerous enough, to tell the terms apart. Short prompts make the ratio irrelevant anyway.

Rejected: the ratio of a long and a short prompt's times (steps are shared with decodes); a fit at every step.
"""

from __future__ import annotations

from weft.memory.prefix.policy import PrefillCost
from weft.memory.prefix.value.step_fit import StepFit

FIT_EVERY = 256
"""Steps with prefill between two fits."""
STEPS_REMEMBERED = 16384
"""Steps after which everything in the sums counts half."""
PAIRS_SHARE_MIN = 0.05
"""The least share of attention in the guessed cost of all prefill so far."""


class PrefillFit:
    """``guess``: linear term 1; the cost until enough steps were measured."""

    __slots__ = ("_fit", "_guess", "_pairs", "_prefills", "_tokens")

    def __init__(self, guess: PrefillCost) -> None:
        self._guess = guess
        self._fit = StepFit()
        self._tokens = self._pairs = 0
        self._prefills = 0

    def add(self, prefill_tokens: int, pairs: int, decodes: int, context: int, seconds: float) -> bool:
        """A step took ``seconds``. True if ``cost`` is due."""
        if seconds <= 0:
            return False
        self._fit.add(prefill_tokens, pairs, decodes, context, seconds)
        if not prefill_tokens:
            return False
        self._tokens += prefill_tokens
        self._pairs += pairs
        self._prefills += 1
        if self._prefills % STEPS_REMEMBERED == 0:
            self._fit.weigh(0.5)
        return self._prefills % FIT_EVERY == 0

    def cost(self) -> PrefillCost:
        """The cost in units of the linear term."""
        guessed = 2 * self._guess.quadratic * self._pairs
        if self._prefills < FIT_EVERY or guessed < PAIRS_SHARE_MIN * (self._tokens + guessed):
            return self._guess
        _, token_s, pair_s, _, _ = self._fit.terms()
        if not token_s:
            return self._guess
        return PrefillCost(1.0, pair_s / (2 * token_s + pair_s))
