"""Where the last tokens of a text occurred before, in microseconds.

    text      a b c d e f g h i ... a b c d e f g h | ?
                              '-> next             ^ the context ends here

``lookup(context)`` returns the occurrence with the longest match of the last tokens of ``context``, of equals
the newest. Two keys index a position: a hash of the 3 tokens before it, and one of the 8 tokens before it. A
lookup tries the 8 first, compares the tokens backwards, and reports the true length of the match. A hash is
never trusted alone (law L10).

``FrozenText`` is a text that is complete: two sorted arrays, 28 bytes a token, built by numpy (20 ms for
100,000 tokens). ``GrowingText`` takes one token at a time and holds dictionaries, about 250 bytes a token.
``TextIndex`` is one growing text and a few frozen ones. Frozen texts of similar size are merged, so a lookup
visits few. It is bounded in tokens: at its bound the oldest text goes.

Rejected: a suffix automaton (two states and their dictionaries for each token: 600 bytes, and 0.3 s for a
prompt of 100,000 tokens on the thread that steps); a suffix array (five sorts instead of one, for matches
between 3 and 8 tokens that an 8-token key misses); chains of all occurrences (a space has thousands).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.units import PAD

MATCH_MIN = 3
"""Fewest tokens that count as a match."""
LONG_MATCH = 8
CONTEXT_TOKENS = 32
"""Most tokens that a lookup compares."""
GROWING_TOKENS_MAX = 8192
"""A growing text of this length is frozen."""
FROZEN_BYTES_PER_TOKEN = 28
GROWING_BYTES_PER_TOKEN = 250
_CANDIDATES_MAX = 8
_SEPARATOR = np.array([PAD], np.int32)
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Occurrence:
    """``text`` has the last ``length`` tokens of the context before index ``position``."""

    text: FrozenText | GrowingText
    position: int
    length: int

    def continuation(self, count: int) -> tuple[int, ...]:
        return self.text.continuation(self.position, count)


def _hash(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = (value + token + 1) * _FACTOR & _MASK
    return value


def _hashes(tokens: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """``_hash`` of the ``length`` tokens before each position from ``length`` on."""
    count = tokens.size - length + 1
    values = np.zeros(count, np.uint64)
    for offset in range(length):
        values = (values + tokens[offset:offset + count] + np.uint64(1)) * np.uint64(_FACTOR)
    return values


def _common_end(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """How many tokens before ``end`` equal the last tokens of ``context``."""
    length, most = 0, min(end, len(context))
    while length < most and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


@dataclass(frozen=True, slots=True)
class ContextKeys:
    """Hashes of the last tokens of a context, the same for every frozen text; None if it is too short."""

    long: int | None
    short: int | None

    @classmethod
    def of(cls, context: Sequence[int]) -> ContextKeys:
        return cls(_hash(context[-LONG_MATCH:]) if len(context) >= LONG_MATCH else None,
                   _hash(context[-MATCH_MIN:]) if len(context) >= MATCH_MIN else None)


class FrozenText:
    """A complete text. PAD separates parts that do not follow each other; it matches nothing."""

    __slots__ = ("_long", "_short", "tokens")

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self.tokens = array("i", np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
        wide = tokens.astype(np.int64).astype(np.uint64)
        self._short = _sorted(wide, MATCH_MIN)
        self._long = _sorted(wide, LONG_MATCH)

    @property
    def size_bytes(self) -> int:
        return FROZEN_BYTES_PER_TOKEN * len(self.tokens)

    def lookup(self, context: Sequence[int], keys: ContextKeys | None = None) -> Occurrence | None:
        """``keys``: those of ``context``, if they are known."""
        keys = keys or ContextKeys.of(context)
        if keys.long is not None:
            best = self._longest(*self._long, context, keys.long, LONG_MATCH)
            if best is not None:
                return best
        return None if keys.short is None else self._longest(*self._short, context, keys.short, MATCH_MIN)

    def _longest(self, keys: array[int], ends: array[int], context: Sequence[int], key: int,
                 least: int) -> Occurrence | None:
        first = bisect_left(keys, key)
        last = bisect_right(keys, key, first)
        best = None
        for at in range(last - 1, max(first, last - _CANDIDATES_MAX) - 1, -1):
            end = ends[at]
            length = _common_end(self.tokens, end, context)
            if length >= least and (best is None or length > best.length):
                best = Occurrence(self, end, length)
        return best

    def token_at(self, position: int) -> int:
        """PAD past the end."""
        return self.tokens[position] if position < len(self.tokens) else PAD

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        tokens = tuple(self.tokens[position:position + count])
        return tokens[:tokens.index(PAD)] if PAD in tokens else tokens


def _sorted(tokens: npt.NDArray[np.uint64], length: int) -> tuple[array[int], array[int]]:
    """Keys of all positions that have a next token, sorted, and the positions; equal keys by position."""
    if tokens.size <= length:
        return array("Q"), array("i")
    keys = _hashes(tokens[:-1], length)
    order = np.argsort(keys, kind="stable")
    return array("Q", keys[order].tobytes()), array("i", (order + length).astype(np.int32).tobytes())


class GrowingText:
    """A text that grows at its end. ``first``: the tokens before it, so that matches reach back."""

    __slots__ = ("_ends_by_long", "_ends_by_short", "tokens")

    def __init__(self, first: Sequence[int] = ()) -> None:
        self.tokens: list[int] = list(first)
        self._ends_by_short: dict[int, int] = {}
        self._ends_by_long: dict[int, int] = {}

    @property
    def size_bytes(self) -> int:
        return GROWING_BYTES_PER_TOKEN * len(self.tokens)

    def append(self, token: int) -> None:
        """The position before ``token`` has a next token now, so it can be found."""
        tokens = self.tokens
        end = len(tokens)
        if end >= MATCH_MIN:
            self._ends_by_short[hash((tokens[-3], tokens[-2], tokens[-1]))] = end
            if end >= LONG_MATCH:
                self._ends_by_long[hash(tuple(tokens[-LONG_MATCH:]))] = end
        tokens.append(token)

    def lookup(self, context: Sequence[int]) -> Occurrence | None:
        for ends, least in ((self._ends_by_long, LONG_MATCH), (self._ends_by_short, MATCH_MIN)):
            end = ends.get(hash(tuple(context[-least:]))) if len(context) >= least else None
            if end is not None:
                length = _common_end(self.tokens, end, context)
                if length >= least:
                    return Occurrence(self, end, length)
        return None

    def token_at(self, position: int) -> int:
        """PAD past the end."""
        return self.tokens[position] if position < len(self.tokens) else PAD

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """A continuation that reaches the end goes on with itself: a text that repeats goes on repeating."""
        tokens = tuple(self.tokens[position:position + count])
        if PAD in tokens:
            return tokens[:tokens.index(PAD)]
        if tokens and len(tokens) < count:
            tokens *= -(-count // len(tokens))
        return tokens[:count]


class TextIndex:
    """One growing text and the frozen texts before it, about ``tokens_max`` tokens in all (law L11)."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._frozen: list[FrozenText] = []
        self._growing = GrowingText()
        self._frozen_tokens = 0

    @property
    def token_count(self) -> int:
        return self._frozen_tokens + len(self._growing.tokens)

    @property
    def size_bytes(self) -> int:
        return self._growing.size_bytes + FROZEN_BYTES_PER_TOKEN * self._frozen_tokens

    def freeze(self, tokens: npt.NDArray[np.int32]) -> None:
        """A long text at once; later tokens follow it. The index has no growing text of its own yet, or
        ``tokens`` is that text."""
        tokens = tokens[-self._tokens_max:]
        self._growing = GrowingText(tokens[-CONTEXT_TOKENS:].tolist())
        while self._frozen and len(self._frozen[-1].tokens) <= tokens.size:
            older = np.frombuffer(self._frozen[-1].tokens, np.int32)
            if older.size + tokens.size > self._tokens_max // 4:
                break
            self._drop(-1)
            tokens = np.concatenate([older, _SEPARATOR, tokens])
        self._frozen.append(FrozenText(tokens))
        self._frozen_tokens += tokens.size
        while self.token_count > self._tokens_max and len(self._frozen) > 1:
            self._drop(0)

    def _drop(self, at: int) -> None:
        self._frozen_tokens -= len(self._frozen.pop(at).tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        growing = self._growing
        for token in tokens:
            growing.append(token)
        if len(growing.tokens) >= min(GROWING_TOKENS_MAX, max(self._tokens_max // 2, 2 * CONTEXT_TOKENS)):
            self.freeze(np.asarray(growing.tokens, dtype=np.int32))

    def lookup(self, context: Sequence[int]) -> Occurrence | None:
        """The longest match; of equals the newest text."""
        best = self._growing.lookup(context)
        if not self._frozen or (best is not None and best.length >= CONTEXT_TOKENS):
            return best
        keys = ContextKeys.of(context)
        for text in reversed(self._frozen):
            other = text.lookup(context, keys)
            if other is not None and (best is None or other.length > best.length):
                best = other
        return best
