"""Requests to replay: arrival times, lengths, and made-up tokens that are equal where the real tokens were equal.

A trace has no text. It names the blocks of a prompt by ids, and equal ids are equal tokens. Memory, tree and scheduler
need no more, so tokens are made up here: each block number has a range of integers, and an unshared block gets a new
range.

    blocks        [ 7 | 3 | 9 | 12.. ]     block b is tokens b * block_tokens + (0, 1, 2, ...)
    fronts        {9: [...]}               first tokens of a block that equal another block's
    tokens(i)     prompt and answer of request i, int32, made on demand

Made lazily: 53 million prompt tokens would be 213 MB, and a replay holds only the tokens in its cache. A front
describes a conversation that continues in the middle of a block: the next turn's block begins with the tokens that end
the last turn, and then differs.

Tokens are not random: they differ by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError

Int32s = npt.NDArray[np.int32]

_TOKENS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One sequence. ``at_s``: arrival, seconds from the start of the trace. ``output_tokens``: how many it made.
    ``blocks``: numbers of the blocks of the prompt, or of prompt and answer where ``whole``. ``next_turn``: the request
    whose prompt goes on with this one's answer. ``cancelled_at_s``: time at which the client left before the first
    token."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = field(repr=False)
    next_turn: int | None = None
    whole: bool = False
    salt: str = ""
    priority: int = 0
    boundaries: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    cancelled_at_s: float | None = None


class Traffic:
    """Requests to replay. ``requests`` in order of arrival. ``fronts``: by block number, tokens that begin it instead
    of its own. ``block_count``: number of used block numbers, if larger than in ``requests``. Raises ConfigError for
    more different tokens than an int32 can represent."""

    def __init__(
        self,
        requests: Sequence[TrafficRequest],
        *,
        block_tokens: int,
        fronts: Mapping[int, Int32s] | None = None,
        block_count: int | None = None,
    ) -> None:
        self.requests = list(requests)
        self.block_tokens = block_tokens
        self.fronts = dict(fronts or {})
        self._offsets = np.arange(block_tokens, dtype=np.int64)
        if block_count is None:
            block_count = 1 + max((max(request.blocks, default=-1) for request in self.requests), default=-1)
        self.block_count = block_count
        free = block_count * block_tokens
        self._own_outputs: list[int] = []
        for request in self.requests:
            self._own_outputs.append(free)
            if request.next_turn is None and not request.whole:
                free += request.output_tokens
        if free > _TOKENS_MAX:
            raise ConfigError(
                f"the trace has {free} different tokens; a replay can tell {_TOKENS_MAX} "
                "apart: take fewer requests (--limit)",
                param="--limit",
            )

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def length_max(self) -> int:
        """Tokens of the longest request, answer included."""
        return max((request.prompt_tokens + request.output_tokens for request in self.requests), default=0)

    def prompt(self, index: int) -> Int32s:
        """Return int32 [prompt_tokens]."""
        return self._blocks(index)[: self.requests[index].prompt_tokens]

    def tokens(self, index: int) -> Int32s:
        """Return prompt and answer, int32 [prompt_tokens + output_tokens]."""
        request = self.requests[index]
        length = request.prompt_tokens + request.output_tokens
        if request.whole:
            return self._blocks(index)[:length]
        if request.next_turn is not None:
            later = self.prompt(request.next_turn)
            assert later.size >= length, f"the turn after request {index} is shorter than its beginning"
            return np.concatenate([self.prompt(index), later[request.prompt_tokens : length]])
        first = self._own_outputs[index]
        answer = np.arange(first, first + request.output_tokens, dtype=np.int32)
        return np.concatenate([self.prompt(index), answer])

    def _blocks(self, index: int) -> Int32s:
        numbers = self.requests[index].blocks
        tokens = (np.asarray(numbers, dtype=np.int64)[:, None] * self.block_tokens + self._offsets).astype(np.int32)
        for row, block in enumerate(numbers):
            mine = self.fronts.get(block)
            if mine is not None:
                tokens[row, : mine.size] = mine
        return tokens.reshape(-1)

    def faster(self, rate: float) -> Traffic:
        """Return the same requests, arriving ``rate`` times as fast."""
        requests = [
            replace(
                request,
                at_s=request.at_s / rate,
                cancelled_at_s=None if request.cancelled_at_s is None else request.cancelled_at_s / rate,
            )
            for request in self.requests
        ]
        return Traffic(requests, block_tokens=self.block_tokens, fronts=self.fronts, block_count=self.block_count)
