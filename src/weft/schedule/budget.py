"""The budget of one step, in tokens and in seconds: one object per plan, spent in order of claim.

    step_tokens_max   | d d d d | p0 p0 p0 p0 p0 p0 p0 p0 | p1 p1 p1 p1 |
                        decodes   first prefill              next prefill, to a multiple of CHUNK_TOKENS

Decodes come first, and always all of them. A prefill that does not reach the end of its known tokens stops on
the absolute grid of CHUNK_TOKENS. So a prompt goes through the same chunks of the recurrent kernels however
it is cut (promise 1). Where prompts are whole (a model that is not causal), a prompt that does not fit waits for
the next step.

**Time** (``--max-step-ms``). A sequence that decodes waits for the whole step, so a long prefill is a gap in
its answer. Tokens do not bound the gap: one costs a hundred times more on one machine than on another.

    |<------------- max_s ------------->|        prefill_s = max(max_s - decodes, decodes)
    | decodes   | prefill chunks        |
    | decodes                   | prefill chunks            |      slow decodes: prefill takes as long

A step of only prefills delays no answer and has the complete token budget. The limit is a value that the engine
replaces between two steps (``weft.costs.fit``), so a plan stays a pure function of its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.costs.step import StepCost, Work
from weft.units import CHUNK_TOKENS

_ANY_TOKENS = 1 << 62


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The limit of a step in seconds. ``max_s``: see the module. ``cost``: None before the first measured step; nothing
    is limited then."""

    max_s: float
    cost: StepCost | None = None

    def prefill_s(self, decodes: int, context: int) -> float:
        """Return seconds of prefill in a step of ``decodes`` sequences that read ``context`` tokens."""
        if self.cost is None or not decodes:
            return math.inf
        decodes_s = self.cost.step_s(Work(0, 0, decodes, context))
        # If the decodes take most of the limit, prefill gets the same time again. Otherwise a busy server would compute
        # one chunk in each step, and queues would grow for a bound that the decodes break anyway.
        return max(self.max_s - decodes_s, decodes_s)

    def tokens_within(self, start: int, seconds: float) -> int:
        """Return the prefill tokens from position ``start`` on that take ``seconds``."""
        if self.cost is None or math.isinf(seconds):
            return _ANY_TOKENS
        return int(min(self.cost.tokens_within(start, max(seconds, 0.0)), _ANY_TOKENS))

    def spent_s(self, start: int, end: int) -> float:
        return 0.0 if self.cost is None else self.cost.prefill_s(start, end)


NO_LIMIT = StepLimit(math.inf)


def step_tokens_bound(step_tokens_max: int, rows_max: int) -> int:
    # One chunk is always left: a grid has a smallest step, and decodes could starve every prefill.
    """Return the most tokens that one step can have: the size of per-token buffers."""
    return max(step_tokens_max, rows_max + CHUNK_TOKENS)


class Budget:
    """Tokens and seconds left for prefill in this step, after ``decode_count`` decodes that read ``context`` tokens.
    ``keys``: API keys that have prompts, where they are several. ``whole``: no prompt is cut."""

    __slots__ = ("_granted", "_left_s", "_limit", "_unserved", "_whole", "left")

    def __init__(
        self,
        step_tokens_max: int,
        decode_count: int,
        limit: StepLimit = NO_LIMIT,
        context: int = 0,
        keys: frozenset[str] = frozenset(),
        *,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self.left = max(step_tokens_max - decode_count, CHUNK_TOKENS)
        self._limit = limit
        self._left_s = limit.prefill_s(decode_count, context)
        self._granted = CHUNK_TOKENS
        """Tokens of the one chunk that is computed even if no time is left."""
        self._unserved = set(keys)

    def chunk_end(self, start: int, end: int, key: str = "") -> int:
        """Return where a prefill of ``key`` at ``start`` with known tokens up to ``end`` stops in this step. Equal to
        ``start`` when the rest does not reach the next grid point. Keys without a prefill in this step keep an even
        part of the rest, in chunks: the key that has used least comes first."""
        if self._whole:
            return end if end - start <= self.left else start
        in_time = max(self._limit.tokens_within(start, self._left_s), self._granted)
        most = min(self.left, in_time)
        if self._unserved:
            chunks = math.ceil(most / len(self._unserved | {key}) / CHUNK_TOKENS)
            most = min(most, chunks * CHUNK_TOKENS)
        reach = start + most
        return end if reach >= end else max(start, reach - reach % CHUNK_TOKENS)

    def spend(self, start: int, end: int, key: str = "") -> None:
        """Spend the tokens and seconds of positions [start, end), which are computed in this step."""
        self._unserved.discard(key)
        tokens = end - start
        assert 0 < tokens <= self.left, f"{tokens} tokens of {self.left}"
        self.left -= tokens
        self._left_s -= self._limit.spent_s(start, end)
        self._granted = max(0, self._granted - tokens)
