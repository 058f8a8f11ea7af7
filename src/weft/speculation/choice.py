"""How many drafts a step verifies: those that bring more tokens per second.

    survival   .97  .95  .93  .90  .82  .60  .55  .31 ...      candidates of all rows, the best first
    tokens     R + .97  + .95 ...                              expected of the step, R rows
    seconds    cost(R + 1), cost(R + 2), ...                   of a step with windows of R + 1 rows, ...
               '-- as many as make tokens / seconds largest

Survivals of one sequence never rise, so the best n of all are always the first ones of each sequence. The
whole list is tried, not only the next one: cost rises in steps, and four drafts may pay where one does not.

A step without drafts is preferred unless drafts promise GAIN_MIN more. Chances and costs are estimates, and
a draft that pays nothing still costs a longer step for all others.

With many sequences a step has no cheap rows left, and nothing pays even if all drafts were right
(``may_pay``). Then no source is asked at all.

Rejected: a number for each row by itself (32 rows that take 3 drafts each make a step of 128 rows); a fixed
number (right for one load, wrong for the others).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.costs.rows import RowCosts

GAIN_MIN = 1.03
SURVIVAL_MIN = 0.05
"""A draft below it is not verified."""
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of drafts that ``may_pay`` tries; the cost bends at powers of two."""


def choose(survivals: Sequence[Sequence[float]], decodes: int, costs: RowCosts) -> list[int]:
    """For each list of survivals, how many of its drafts to verify. ``decodes``: rows of the step without
    drafts."""
    if decodes == 1:
        return [_best_of_one(survivals[0], costs)]
    ranked = sorted(((survival, at) for at, row in enumerate(survivals) for survival in row
                     if survival >= SURVIVAL_MIN), key=_first, reverse=True)
    counts = [0] * len(survivals)
    for _, at in ranked[:_best_number([survival for survival, _ in ranked], decodes, costs)]:
        counts[at] += 1
    return counts


def _best_of_one(survivals: Sequence[float], costs: RowCosts) -> int:
    """The usual case. Its survivals are in order, and the pace of the machine changes no comparison."""
    if not survivals:
        return 0
    best_rate, best, expected = GAIN_MIN / costs.figure(1), 0, 1.0
    figures = costs.verify_figures(len(survivals))   # or more of them
    for number, (survival, figure) in enumerate(zip(survivals, figures, strict=False), 1):
        if survival < SURVIVAL_MIN:
            break
        expected += survival
        if expected > best_rate * figure:
            best_rate, best = expected / figure, number
    return best


def _best_number(ranked: Sequence[float], decodes: int, costs: RowCosts) -> int:
    """How many of the drafts with these survivals, the best first, make tokens per second largest."""
    best_rate, best = GAIN_MIN * decodes / costs.seconds(decodes), 0
    expected = float(decodes)
    for number, survival in enumerate(ranked, 1):
        expected += survival
        seconds = costs.verify_seconds(decodes, number)
        if expected > best_rate * seconds:
            best_rate, best = expected / seconds, number
    return best


def may_pay(decodes: int, drafts_max: int, costs: RowCosts) -> bool:
    """Whether any number of drafts up to ``drafts_max`` in all would pay, were all of them right."""
    least = GAIN_MIN * decodes / costs.seconds(decodes)
    numbers = [number for number in _NUMBERS if number < drafts_max]
    return any((decodes + number) / costs.verify_seconds(decodes, number) > least
               for number in (*numbers, drafts_max))


def _first(pair: tuple[float, int]) -> float:
    return pair[0]
