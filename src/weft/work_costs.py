"""Seconds of a step by the work in it, as an engine has measured them: the currency of a router.

    step      fixed_s + prefill tokens x token_s + (query, key) pairs x pair_s
              + decodes x decode_s + tokens that these read x context_s

``prefill_s`` is what computing a span of a prompt adds to the steps that run anyway. It is linear and
quadratic in the length of a prompt, as attention is. The fit is in ``weft.schedule.measured_costs``.
"""

from __future__ import annotations

import msgspec


class WorkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Each one at least 0. ``steps``: how many were measured, 0 for a guess."""

    fixed_s: float
    token_s: float
    pair_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 0.0
    steps: int = 0

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds that computing positions [start, end) of a prompt takes."""
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return (end - start) * self.token_s + pairs * self.pair_s


GUESSED_COSTS = WorkCosts(fixed_s=5e-3, token_s=1e-4)
"""Before a step was measured. All replicas have the same guess, so it decides nothing between them."""
