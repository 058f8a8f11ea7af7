"""Sources of drafts without a model: repetition, the client's prediction of the answer, the grammar.

    suffix       prompt   ... def area(self): return self.width * self.height ...
                 answer   ... def area(self): |                  -> return self.width * self.height
    prediction   predicted   a b c d e f g h i j k
                 answer      a b c X Y f g             X, Y: an edit; the answer rejoins the prediction at f
    grammar      {"city": "    '-- free text --'   ", "unit": "
                 ^^^^^^^^^^                         ^^^^^^^^^^^^

**Suffix**: the tokens that followed an earlier occurrence of the last tokens, in the sequence or in answers of the same
salt. The follower stays with a place while its tokens are right; only a longer match elsewhere replaces the place.
Only sequences of a salt search the answers of that salt (law L10): otherwise the speed of an
answer would tell a tenant about the answers of another. The library is bounded in bytes (law L11). A prompt is indexed
at the first lookup: nothing is spent on a sequence that never drafts.

**Prediction** (OpenAI's field): one place in the predicted text. A right token moves it on. After a
difference the follower looks for the last tokens of the answer near the place of the difference; the longest match
wins, then the nearest. Until there is a match, each new token counts as a replacement of one predicted token. A
place found by a short match may be wrong, so the search stays around the *base*: where the last match of
MATCH_MIN tokens or more leads to.

**Grammar**: where only one continuation is possible, the matcher names the text. The text is certain, but not how it is
cut into tokens, so these drafts have a chance like all others. ``allowed`` also tells how many tokens of a draft the
grammar lets pass. The follower has its own matcher: the sampler's matchers belong to the device side, and lag by a
token when steps overlap.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.speculation.drafter import DraftGrammar, Proposal
from weft.speculation.text_index import (
    CONTEXT_TOKENS,
    FROZEN_TOKENS_MAX,
    GROWING_BYTES_PER_TOKEN,
    LONG_MATCH,
    MATCH_MIN,
    Context,
    FrozenText,
    Occurrence,
    TextIndex,
)
from weft.units import PAD

LIBRARY_BYTES_MAX = 64 << 20
SALT_TOKENS_MAX = 1 << 18
_SALT_TOKENS_MIN = 1 << 14
_ARENA_SHARE = 1 << 10
_SEQUENCE_TOKENS_MAX = 1 << 20
_ANSWER_TOKENS_MAX = 1 << 14
"""Most tokens of an answer that the library keeps; of a longer answer it keeps the end."""
_UNREAD_TOKENS_MAX = 1 << 14
"""Tokens of a salt that wait for a lookup. One lookup indexes them all, in about 1 ms."""


def salt_tokens(arena_bytes: int) -> int:
    """Return the most tokens of one salt's answers: one for each KiB of the arena. A small engine stays small."""
    return min(max(arena_bytes // _ARENA_SHARE, _SALT_TOKENS_MIN), SALT_TOKENS_MAX)


class _Answers:
    """Answers of one salt."""

    __slots__ = ("index", "unread", "unread_tokens")

    def __init__(self, tokens_max: int) -> None:
        self.index = TextIndex(tokens_max)
        self.unread: deque[Sequence[int]] = deque()
        self.unread_tokens = 0
        """Tokens in ``unread``, of answers that the index does not have yet."""

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
    """Answers that have ended. ``bytes_max`` bounds the indexes of all salts together, ``salt_tokens`` the
    tokens of one."""

    def __init__(self, bytes_max: int = LIBRARY_BYTES_MAX, salt_tokens: int = SALT_TOKENS_MAX) -> None:
        self._bytes_max = bytes_max
        self._salt_tokens = salt_tokens
        self._by_salt: OrderedDict[str, _Answers] = OrderedDict()
        self.size_bytes = 0

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """Add ``answer``, which does not change any more."""
        if len(answer) <= MATCH_MIN:
            return
        answers = self._by_salt.get(salt)
        if answers is None:
            answers = self._by_salt[salt] = _Answers(self._salt_tokens)
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

    def forget(self) -> None:
        """Drop all answers: after a change of weights they no longer predict anything."""
        self._by_salt.clear()
        self.size_bytes = 0

    def _drop_oldest(self) -> None:
        while self.size_bytes > self._bytes_max:
            self.size_bytes -= self._by_salt.popitem(last=False)[1].size_bytes


class SuffixFollower:
    """Follower by repetition. ``prompt``: the tokens before the answer, int32; ``answer``: the tokens that it has
    already.
    """

    __slots__ = ("_index", "_library", "_match", "_occurrence", "_pending", "_place", "_prompt", "_salt")

    def __init__(
        self, library: AnswerLibrary, salt: str, prompt: npt.NDArray[np.int32], answer: Sequence[int] = ()
    ) -> None:
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


_NEAR_BEFORE = 32
_NEAR_AFTER = 96


class PredictionFollower:
    """Follower of the client's guess. ``predicted``: tokens of the complete answer. ``answer``: tokens that the answer
    has already.
    """

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
        tokens = self._text[self._place : self._place + count]
        return Proposal(tokens, self._match) if tokens else None

    def _rejoin(self) -> tuple[int, int]:
        """Return the new match and place, once the newest token differs from the prediction."""
        match, place = self._near()
        if self._index is None:
            self._index = FrozenText(np.frombuffer(self._data, np.int32)[:FROZEN_TOKENS_MAX])
        far = self._index.lookup(Context(self._recent))
        if far is not None and far.length > match:
            match, place = far.length, far.position
        return match, place if match else self._base

    def _near(self) -> tuple[int, int]:
        """Return (length of the match, place after it) around the base; (0, 0) without a match."""
        text, recent, data, base = self._text, self._recent, self._data, self._base
        newest, end = recent[-1].to_bytes(4, sys.byteorder, signed=True), 4 * (base + _NEAR_AFTER)
        best, best_rank = (0, 0), (0, 0)
        offset = data.find(newest, 4 * max(0, base - _NEAR_BEFORE), end)
        while offset >= 0:
            if not offset % 4:
                place, length = offset // 4, 1
                while length < len(recent) and place >= length and text[place - length] == recent[~length]:
                    length += 1
                rank = length, -abs(place + 1 - base)
                if rank > best_rank:
                    best, best_rank = (length, place + 1), rank
            offset = data.find(newest, offset + 1, end)
        return best


_PENDING_TOKENS = 256
"""Tokens that a matcher reads in one step."""


class GrammarFollower:
    """Follower of a grammar. ``answer``: tokens that the answer has already."""

    __slots__ = ("_forced", "_grammar", "_match", "_matcher", "_pending")

    def __init__(self, grammar: DraftGrammar, answer: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._pending: list[int] = []
        self._forced: tuple[int, ...] | None = None
        self._match = 0
        self.extend(answer)

    def extend(self, tokens: Sequence[int]) -> None:
        if self._forced is not None:
            equal = 0
            for forced, token in zip(self._forced, tokens, strict=False):
                if forced != token:
                    break
                equal += 1
            self._match = self._match + equal if equal else 0
        self._pending += tokens
        self._forced = None

    def propose(self, count: int) -> Proposal | None:
        if self._forced is None:
            self._forced = tuple(self._grammar.forced_tokens(self._matcher)) if self._alive() else ()
        tokens = self._forced[:count]
        return Proposal(tokens, self._match) if tokens else None

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` may follow, from the first on."""
        return self._matcher.validate_tokens(list(tokens)) if self._alive() else 0

    def _alive(self) -> bool:
        """Return whether the matcher has seen all tokens, and the grammar goes on. Tokens that it missed are read in
        several steps.
        """
        if self._pending:
            pending, self._pending = self._pending[:_PENDING_TOKENS], self._pending[_PENDING_TOKENS:]
            if not self._matcher.is_error() and not self._matcher.is_stopped():
                self._matcher.consume_tokens(pending)
        return not self._pending and not self._matcher.is_error() and not self._matcher.is_stopped()
