"""Drafts from repetition: what followed the last tokens when they occurred before.

    SuffixFollower      prompt and answer of one sequence
    AnswerLibrary       answers of sequences that have ended, by salt

    prompt   ... def area(self): return self.width * self.height ...
    answer   ... def area(self): |                  -> return self.width * self.height

At least MATCH_MIN tokens must be equal. How much a match of a given length is worth is not decided here: the
chances are learned by length. While the place that was found goes on being right, the follower stays with it,
and the match grows past what a lookup compares. Another place must have a longer match to replace it.

The answers of a salt are searched by sequences of that salt alone (law L10): otherwise the speed of an answer
would tell a tenant what another tenant received. The library is bounded in bytes; the salt that was used
least recently goes first (law L11).

The prompt is indexed at the first lookup, not when the sequence begins: nothing is spent on a sequence that
never drafts. An answer that ends waits for a lookup of its salt too. While the drafter rests, with many
sequences at once, the newest UNREAD_TOKENS_MAX of them wait, and older ones are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.speculation.proposal import Proposal
from weft.speculation.text_index import (
    GROWING_BYTES_PER_TOKEN,
    LONG_MATCH,
    MATCH_MIN,
    Context,
    Occurrence,
    TextIndex,
)
from weft.units import PAD

LIBRARY_BYTES_MAX = 64 << 20
_SALT_TOKENS_MAX = 1 << 18
_SEQUENCE_TOKENS_MAX = 1 << 20
_ANSWER_TOKENS_MAX = 1 << 14
"""Of a longer answer, the library takes the end."""
_UNREAD_TOKENS_MAX = 1 << 14
"""Tokens of a salt that wait for a lookup. One lookup indexes them all, in about 1 ms."""


class _Answers:
    """Of one salt."""

    __slots__ = ("index", "unread", "unread_tokens")

    def __init__(self) -> None:
        self.index = TextIndex(_SALT_TOKENS_MAX)
        self.unread: deque[Sequence[int]] = deque()
        self.unread_tokens = 0
        """In ``unread``: answers that the index does not have yet."""

    @property
    def size_bytes(self) -> int:
        return self.index.size_bytes + GROWING_BYTES_PER_TOKEN * self.unread_tokens

    def add(self, answer: Sequence[int]) -> None:
        self.unread.append(answer)
        self.unread_tokens += len(answer) + 1
        while self.unread_tokens > _UNREAD_TOKENS_MAX and len(self.unread) > 1:
            self.unread_tokens -= len(self.unread.popleft()) + 1

    def read(self) -> TextIndex:
        for answer in self.unread:
            self.index.extend([PAD, *answer])
        self.unread.clear()
        self.unread_tokens = 0
        return self.index


class AnswerLibrary:
    """Answers that have ended. ``bytes_max`` bounds the indexes of all salts together."""

    def __init__(self, bytes_max: int = LIBRARY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._by_salt: OrderedDict[str, _Answers] = OrderedDict()
        self.size_bytes = 0

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """``answer`` does not change any more."""
        if len(answer) <= MATCH_MIN:
            return
        answers = self._by_salt.get(salt)
        if answers is None:
            answers = self._by_salt[salt] = _Answers()
        self._by_salt.move_to_end(salt)
        self.size_bytes -= answers.size_bytes
        answers.add(answer if len(answer) <= _ANSWER_TOKENS_MAX else answer[-_ANSWER_TOKENS_MAX:])
        self.size_bytes += answers.size_bytes
        self._drop_oldest()

    def lookup(self, salt: str, context: Context) -> Occurrence | None:
        answers = self._by_salt.get(salt)
        if answers is None:
            return None
        if answers.unread:
            self.size_bytes -= answers.size_bytes
            index = answers.read()
            self.size_bytes += index.size_bytes
            self._drop_oldest()
        return answers.index.lookup(context)

    def _drop_oldest(self) -> None:
        while self.size_bytes > self._bytes_max:
            self.size_bytes -= self._by_salt.popitem(last=False)[1].size_bytes


class SuffixFollower:
    """``prompt``: the tokens before the answer, int32; ``answer``: the tokens that it has already."""

    __slots__ = ("_index", "_library", "_match", "_occurrence", "_pending", "_place", "_prompt", "_salt")

    def __init__(self, library: AnswerLibrary, salt: str, prompt: npt.NDArray[np.int32],
                 answer: Sequence[int] = ()) -> None:
        self._library = library
        self._salt = salt
        self._prompt = prompt
        self._index: TextIndex | None = None
        self._pending = list(answer)
        self._occurrence: Occurrence | None = None
        self._place = 0
        self._match = 0

    def extend(self, tokens: Sequence[int]) -> None:
        if self._index is None:
            self._pending += tokens
        else:
            self._index.extend(tokens)
        if self._occurrence is None:
            return
        text, place = self._occurrence.text.tokens, self._place
        end = place + len(tokens)
        for token in tokens:
            if place < len(text) and text[place] == token:
                place += 1
            else:
                self._occurrence = None
                return
        self._place = end
        self._match += len(tokens)

    def propose(self, count: int) -> Proposal | None:
        if self._occurrence is None or self._match < LONG_MATCH:
            occurrence = self._lookup()
            if occurrence is not None and (self._occurrence is None or occurrence.length > self._match):
                self._occurrence, self._place = occurrence, occurrence.position
                self._match = occurrence.length
        if self._occurrence is None:
            return None
        tokens = self._occurrence.text.continuation(self._place, count)
        return Proposal(tokens, self._match) if tokens else None

    def _lookup(self) -> Occurrence | None:
        if self._index is None:
            self._index = TextIndex(_SEQUENCE_TOKENS_MAX)
            self._index.freeze(np.concatenate([self._prompt, np.asarray(self._pending, dtype=np.int32)]))
            self._prompt, self._pending = self._prompt[:0], []
        context = self._index.end()
        own = self._index.lookup(context)
        if own is not None and own.length >= LONG_MATCH:
            return own
        other = self._library.lookup(self._salt, context)
        return other if own is None or (other is not None and other.length > own.length) else own
