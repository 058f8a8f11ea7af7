"""The budget of one step, in tokens and in seconds: one object per plan, spent in order of claim.

    step_tokens_max   | d d d d | p0 p0 p0 p0 p0 p0 p0 p0 | p1 p1 p1 p1 |
                        decodes   first prefill              next prefill, to a multiple of CHUNK_TOKENS

Decodes come first, and always all of them. A prefill that does not reach the end of its known tokens stops on
the absolute grid of CHUNK_TOKENS. So a prompt goes through the same chunks of the recurrent kernels however
it is cut. Its numbers do not depend on other sequences in the batch (promise 1).

A grid has a smallest step, so a small budget could starve every prefill while decodes run. Therefore one
chunk is always left for prefill, of tokens and of time. A step has at most ``step_tokens_bound`` tokens,
which is ``step_tokens_max`` unless decodes nearly use it up. Buffers are sized by the bound.

Beside decodes, prefills also end where their time does (``step_limit``): ``limit`` says how long that is.

Rejected: a prefill cut off the grid to fill the budget to the last token (the answer would depend on the rest
of the batch); skipped decodes in favour of prefill (a stall that the reader of the stream sees).
"""

from __future__ import annotations

from weft.schedule.step_limit import NO_LIMIT, StepLimit
from weft.units import CHUNK_TOKENS


def step_tokens_bound(step_tokens_max: int, rows_max: int) -> int:
    """Most tokens that one step can have: the size of per-token buffers."""
    return max(step_tokens_max, rows_max + CHUNK_TOKENS)


class Budget:
    """Tokens and seconds left for prefill in this step, after ``decode_count`` decodes that read ``context``
    tokens."""

    __slots__ = ("_granted", "_left_s", "_limit", "left")

    def __init__(self, step_tokens_max: int, decode_count: int, limit: StepLimit = NO_LIMIT,
                 context: int = 0) -> None:
        self.left = max(step_tokens_max - decode_count, CHUNK_TOKENS)
        self._limit = limit
        self._left_s = limit.prefill_s(decode_count, context)
        self._granted = CHUNK_TOKENS
        """Tokens of the one chunk that needs no time."""

    def chunk_end(self, start: int, end: int) -> int:
        """Where a prefill at ``start`` with known tokens up to ``end`` stops in this step. Equal to
        ``start`` when what is left does not reach the next grid point."""
        in_time = max(self._limit.tokens_within(start, self._left_s), self._granted)
        reach = start + min(self.left, in_time)
        return end if reach >= end else max(start, reach - reach % CHUNK_TOKENS)

    def spend(self, start: int, end: int) -> None:
        """The positions [start, end) are computed in this step."""
        tokens = end - start
        assert 0 < tokens <= self.left, f"{tokens} tokens of {self.left}"
        self.left -= tokens
        self._left_s -= self._limit.spent_s(start, end)
        self._granted = max(0, self._granted - tokens)
