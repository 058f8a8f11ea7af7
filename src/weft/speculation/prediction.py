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

import sys
from collections.abc import Sequence

import numpy as np

from weft.speculation.proposal import Proposal
from weft.speculation.text_index import CONTEXT_TOKENS, FROZEN_TOKENS_MAX, MATCH_MIN, Context, FrozenText

_NEAR_BEFORE = 32
_NEAR_AFTER = 96


class PredictionFollower:
    """``predicted``: tokens of the whole answer. ``answer``: tokens that the answer has already."""

    __slots__ = ("_base", "_data", "_index", "_match", "_place", "_recent", "_text")

    def __init__(self, predicted: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._text = tuple(predicted)
        self._data = np.asarray(self._text, dtype=np.int32).tobytes()
        self._index: FrozenText | None = None
        self._place = self._base = self._match = 0
        self._recent: list[int] = []
        self.extend(answer)

    def extend(self, tokens: Sequence[int]) -> None:
        text, recent, place, match = self._text, self._recent, self._place, self._match
        for token in tokens:
            recent.append(token)
            self._base += 1
            if place < len(text) and text[place] == token:
                place += 1
                match += 1
            else:
                match, place = self._rejoin()
            if match >= MATCH_MIN:
                self._base = place
        self._place, self._match = place, match
        del recent[:-CONTEXT_TOKENS]

    def propose(self, count: int) -> Proposal | None:
        tokens = self._text[self._place:self._place + count]
        return Proposal(tokens, self._match) if tokens else None

    def _rejoin(self) -> tuple[int, int]:
        """The newest token was not the predicted one: the new match and place."""
        match, place = self._near()
        if self._index is None:
            self._index = FrozenText(np.frombuffer(self._data, np.int32)[:FROZEN_TOKENS_MAX])
        far = self._index.lookup(Context(self._recent))
        if far is not None and far.length > match:
            match, place = far.length, far.position
        return match, place if match else self._base

    def _near(self) -> tuple[int, int]:
        """(length of the match, place behind it) around the base; (0, 0) without a match."""
        text, recent, data, base = self._text, self._recent, self._data, self._base
        newest, end = recent[-1].to_bytes(4, sys.byteorder, signed=True), 4 * (base + _NEAR_AFTER)
        best, best_rank = (0, 0), (0, 0)
        at = data.find(newest, 4 * max(0, base - _NEAR_BEFORE), end)
        while at >= 0:
            if not at % 4:
                place, length = at // 4, 1
                while length < len(recent) and place >= length and text[place - length] == recent[~length]:
                    length += 1
                rank = length, -abs(place + 1 - base)
                if rank > best_rank:
                    best, best_rank = (length, place + 1), rank
            at = data.find(newest, at + 1, end)
        return best
