"""What computing a prompt costs, from the steps that an engine has measured: linear + quadratic, online.

    seconds of a step  =  fixed + a x prefill tokens + b x pairs + c x decodes + d x context

    a prompt of n tokens adds  a n + b n (n + 1) / 2        so its linear term is a + b / 2, and its
                                                            quadratic one b / 2

Least squares of the relative error, kept as the five sums of its normal equations: a step costs 25
multiplications and no memory. Terms that would be negative are left out, the worst first. What is told here
is ``weft.sim.cost.Work``: the same model that a recording is fitted with, which has all steps at hand.

A policy compares states of one model with each other, so only the ratio of the two terms matters to it, and
the linear one is 1 by definition: nothing that was valued before is in other units. Until prompts are long
enough to tell the terms apart, and there are enough of them, the ratio stays what the sizes of the model say;
as long as they are short, it makes no difference either.

Rejected: the ratio of a long and a short prompt's times (steps are shared with decodes); a fit at every step.
"""

from __future__ import annotations

import numpy as np

from weft.memory.prefix.policy import PrefillCost

FIT_EVERY = 256
"""Steps with prefill between two fits."""
STEPS_REMEMBERED = 16384
"""When so many are in the sums, each counts half from then on."""
PAIRS_SHARE_MIN = 0.05
"""Of the cost of all prefill so far, as guessed, so much must be attention's."""


class PrefillFit:
    """``guess``: linear term 1; what is assumed until there is more to go by."""

    __slots__ = ("_guess", "_matrix", "_pairs", "_prefills", "_sums", "_tokens")

    def __init__(self, guess: PrefillCost) -> None:
        self._guess = guess
        self._matrix = np.zeros((5, 5))
        self._sums = np.zeros(5)
        self._tokens = self._pairs = 0
        self._prefills = 0

    def told(self, prefill_tokens: int, pairs: int, decodes: int, context: int, seconds: float) -> bool:
        """A step took ``seconds``. Whether it is time to ask for ``cost``."""
        if seconds <= 0:
            return False
        row = np.array([1.0, prefill_tokens, pairs, decodes, context]) / seconds
        self._matrix += np.outer(row, row)
        self._sums += row
        if not prefill_tokens:
            return False
        self._tokens += prefill_tokens
        self._pairs += pairs
        self._prefills += 1
        if self._prefills % STEPS_REMEMBERED == 0:
            self._matrix /= 2
            self._sums /= 2
        return self._prefills % FIT_EVERY == 0

    def cost(self) -> PrefillCost:
        """In units of the linear term."""
        guessed = 2 * self._guess.quadratic * self._pairs
        if self._prefills < FIT_EVERY or guessed < PAIRS_SHARE_MIN * (self._tokens + guessed):
            return self._guess
        _, token_s, pair_s, _, _ = self._terms()
        if not token_s:
            return self._guess
        return PrefillCost(1.0, pair_s / (2 * token_s + pair_s))

    def _terms(self) -> list[float]:
        """Seconds of each kind of work, none negative."""
        size = np.sqrt(np.diag(self._matrix))
        kept = np.flatnonzero(size)
        while True:
            scaled = self._matrix[np.ix_(kept, kept)] / np.outer(size[kept], size[kept])
            found, *_ = np.linalg.lstsq(scaled, self._sums[kept] / size[kept], rcond=1e-12)
            if found.min() >= 0 or len(kept) == 1:
                break
            kept = np.delete(kept, found.argmin())
        terms = np.zeros(5)
        terms[kept] = np.maximum(found, 0.0) / size[kept]
        values: list[float] = terms.tolist()
        return values
