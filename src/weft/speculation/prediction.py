"""Drafts from the client's own guess of the answer: OpenAI's ``prediction`` field.

    predicted   a b c d e f g h i j k
    answer      a b c X Y f g             X, Y: an edit; the answer rejoins the prediction at f
                    |   '-- near: the prediction around the place where it was left
                    '------ the next token is taken as replaced: guess d, then e

The follower holds one place in the prediction. A right token moves it on. After a difference it looks for the
last tokens of the answer near the place where the two parted. The longest match wins, then the nearest; one
equal token is enough there. If no place is near, three tokens anywhere in the prediction will do. Until one
of the two is found, the follower takes each new token as a replacement of one predicted token.

A place that was found by a short match may be wrong. So the search stays around the *base*: the place that
the last match of MATCH_MIN tokens or more leads to.

Rejected: aligning the whole answer with the whole prediction at each difference (quadratic); giving up after
a difference (a file with one edited line is the main use).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.speculation.proposal import Proposal
from weft.speculation.text_index import CONTEXT_TOKENS, MATCH_MIN, FrozenText

_NEAR_BEFORE = 32
_NEAR_AFTER = 96


class PredictionFollower:
    """``predicted``: tokens of the whole answer. ``answer``: tokens that the answer has already."""

    __slots__ = ("_base", "_index", "_match", "_place", "_recent", "_text")

    def __init__(self, predicted: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._text = tuple(predicted)
        self._index: FrozenText | None = None
        self._place = self._base = self._match = 0
        self._recent: list[int] = []
        self.extend(answer)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._recent.append(token)
            self._base += 1
            if self._place < len(self._text) and self._text[self._place] == token:
                self._place += 1
                self._match += 1
            else:
                self._rejoin()
            if self._match >= MATCH_MIN:
                self._base = self._place
        del self._recent[:-CONTEXT_TOKENS]

    def propose(self, count: int) -> Proposal | None:
        tokens = self._text[self._place:self._place + count]
        return Proposal(tokens, self._match) if tokens else None

    def _rejoin(self) -> None:
        """The newest token was not the predicted one."""
        self._match, self._place = self._near()
        if self._index is None:
            self._index = FrozenText(np.asarray(self._text, dtype=np.int32))
        far = self._index.lookup(self._recent)
        if far is not None and far.length > self._match:
            self._match, self._place = far.length, far.position
        if not self._match:
            self._place = self._base

    def _near(self) -> tuple[int, int]:
        """(length of the match, place behind it) around the base; (0, 0) without a match."""
        text, recent = self._text, self._recent
        newest = recent[-1]
        best, best_rank = (0, 0), (0, 0)
        first = max(0, self._base - _NEAR_BEFORE)
        near = text[first:self._base + _NEAR_AFTER]
        at = first - 1
        for _ in range(near.count(newest)):
            at = first + near.index(newest, at + 1 - first)
            length = 1
            while length < len(recent) and length <= at and text[at - length] == recent[-1 - length]:
                length += 1
            rank = length, -abs(at + 1 - self._base)
            if rank > best_rank:
                best, best_rank = (length, at + 1), rank
        return best
