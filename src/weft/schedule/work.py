"""The work of a step, in the four numbers that its time depends on: for cost models, recordings and the
engine's own estimate of what a prompt costs.

    prefill tokens     weights are applied to each of them; those of windows of drafts are among them
    pairs              (query, key) pairs of their attention: grows with the square of a prompt
    decodes            sequences that compute one token
    context            tokens whose KV the decodes read

These are readings of a plan; nothing is measured here.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.schedule.plan import StepPlan


class Work(NamedTuple):
    """``pairs``: (query, key) pairs of the prefill runs. ``context``: tokens whose KV the decodes read."""

    prefill_tokens: int
    pairs: int
    decodes: int
    context: int


def pairs_of(start: int, end: int) -> int:
    """(query, key) pairs of a prefill of the positions [start, end): each sees itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


def work_of(plan: StepPlan) -> Work:
    """The work of the step ``plan``."""
    decodes = plan.decode_count
    starts, lengths = plan.starts, plan.lengths
    context = int(starts[:decodes].sum()) + decodes
    if decodes == plan.run_count:
        return Work(0, 0, decodes, context)
    runs = zip(starts[decodes:].tolist(), lengths[decodes:].tolist(), strict=True)
    return Work(int(lengths[decodes:].sum()), sum(pairs_of(start, start + length) for start, length in runs),
                decodes, context)
