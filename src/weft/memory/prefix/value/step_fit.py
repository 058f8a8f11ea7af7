"""Least squares over the steps of an engine, online: the seconds of each kind of work in a step.

    seconds of a step  =  fixed + a x prefill tokens + b x pairs + c x decodes + d x context

The relative error is what is least, stored as the sums of the five normal equations: a step costs 25
multiplications and no memory. Terms that would be negative are left out, the worst first. ``fade`` weighs the
sums so far before a step is added, so an engine that becomes slow is known to be slow.

Rejected: a list of the last steps (memory, and a fit that visits all of them).
"""

from __future__ import annotations

import numpy as np

TERMS = 5


class StepFit:
    __slots__ = ("_fade", "_matrix", "_sums")

    def __init__(self, fade: float = 1.0) -> None:
        self._fade = fade
        self._matrix = np.zeros((TERMS, TERMS))
        self._sums = np.zeros(TERMS)

    def add(self, prefill_tokens: int, pairs: int, decodes: int, context: int, seconds: float) -> None:
        """A step took ``seconds``, more than 0."""
        row = np.array([1.0, prefill_tokens, pairs, decodes, context]) / seconds
        if self._fade != 1.0:
            self.weigh(self._fade)
        self._matrix += np.outer(row, row)
        self._sums += row

    def weigh(self, share: float) -> None:
        """Everything so far counts ``share`` as much."""
        self._matrix *= share
        self._sums *= share

    def terms(self) -> list[float]:
        """Seconds of each kind of work, none negative."""
        size = np.sqrt(np.diag(self._matrix))
        columns = np.flatnonzero(size)
        if not columns.size:
            return [0.0] * TERMS
        while True:
            scaled = self._matrix[np.ix_(columns, columns)] / np.outer(size[columns], size[columns])
            solution, *_ = np.linalg.lstsq(scaled, self._sums[columns] / size[columns], rcond=1e-12)
            if solution.min() >= 0 or len(columns) == 1:
                break
            columns = np.delete(columns, solution.argmin())
        terms = np.zeros(TERMS)
        terms[columns] = np.maximum(solution, 0.0) / size[columns]
        values: list[float] = terms.tolist()
        return values
