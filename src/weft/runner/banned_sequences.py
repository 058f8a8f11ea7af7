"""Token sequences that an answer must not contain (``bad_words``): which tokens would complete one now.

    sequences   [[7], [4, 5, 9]]
    answer      ... 4 5            --> 7 and 9 are refused
    answer      ... 4 6            --> 7 is refused

A sequence is refused at its last token, since the tokens before it alone are no bad word. So the state of one
row is the tail of its answer, as long as the longest sequence less one. The prompt does not count: an answer
may complete a sequence that begins in the prompt.

The tokens of the step before must be home before the next choice (``Sampler.looks_back``), if a sequence has
more than one token. A step costs one dictionary look for each distinct length.

Laws: L11 (``SamplingParams.check`` bounds the number of sequences and their tokens).

Rejected: an automaton over all sequences (the tails are a few tokens long); a grammar that refuses the text
(exact, but it refuses marker tokens of reasoning and tool calls too, and cannot be combined with a schema).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class BannedSequences:
    """Of one row. ``generated``: the tokens of its answer so far."""

    __slots__ = ("_last_by_head", "_lengths", "_tail", "_tail_max")

    def __init__(self, sequences: Iterable[Sequence[int]], generated: Sequence[int] = ()) -> None:
        self._last_by_head: dict[tuple[int, ...], list[int]] = {}
        for *head, last in sequences:
            self._last_by_head.setdefault(tuple(head), []).append(last)
        self._lengths = sorted({len(head) for head in self._last_by_head})
        self._tail_max = max(self._lengths, default=0)
        self._tail = list(generated)[-self._tail_max:] if self._tail_max else []

    @property
    def looks_back(self) -> bool:
        """Whether what is refused depends on the answer's tokens."""
        return self._tail_max > 0

    def add(self, token: int) -> None:
        """``token`` was generated."""
        if self._tail_max:
            self._tail.append(token)
            del self._tail[:-self._tail_max]

    def refused_ids(self) -> npt.NDArray[np.int64]:
        """The tokens that would complete a sequence."""
        refused: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                head = tuple(self._tail[len(self._tail) - length:])
                refused += self._last_by_head.get(head, ())
        return np.array(refused, np.int64)
