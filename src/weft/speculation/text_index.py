"""Index of a text that finds earlier occurrences of its last tokens in microseconds.

    text      a b c d e f g h i ... a b c d e f g h | ?
                              '-> next             ^ the context ends here

    number    hash of the tokens before a position | the position        43 bits, 21 bits

``lookup(context)`` returns the occurrence with the longest match of the last tokens of ``context``; among equal ones
the newest. Two keys index a position: a hash of the 3 tokens before it, and one of the 8 tokens before it. Tokens are
compared backwards, so the length of a match is the true one. A hash is never trusted without comparing tokens (law
L10).

``FrozenText`` is complete: two sorted arrays of such numbers, 20 bytes a token, built by numpy (4 ms for 100,000
tokens). ``GrowingText`` takes tokens at its end and holds dictionaries, about 250 bytes a token. A lookup reads the
tokens that came since the last one, so a text that is not searched costs a copy of its tokens. ``TextIndex`` is one
growing text and a few frozen ones. Those of similar size are merged, so a lookup visits few: each has more than twice
the tokens of the next. At its bound in tokens the oldest text goes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

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
FROZEN_BYTES_PER_TOKEN = 20
GROWING_BYTES_PER_TOKEN = 250
_CANDIDATES_MAX = 8
_SEPARATOR = np.array([PAD], np.int32)
_FACTOR = 0x9E3779B97F4A7C15
_POSITION_BITS = 21
_POSITIONS = 1 << _POSITION_BITS
FROZEN_TOKENS_MAX = _POSITIONS - 1
_HASH_MASK = (1 << 64) - _POSITIONS
_POWERS = [pow(_FACTOR, power, 1 << 64) for power in range(LONG_MATCH, 0, -1)]
_POWER_SUM = sum(_POWERS)
_BULK = 6
"""Most tokens that are read one by one; more are read at once."""


class Occurrence(NamedTuple):
    """``text`` has the last ``length`` tokens of the context before index ``position``."""

    text: FrozenText | GrowingText
    position: int
    length: int

    def continuation(self, count: int) -> tuple[int, ...]:
        return self.text.continuation(self.position, count)


class Context:
    """The last tokens of a text, with the hashes by which frozen texts are searched. A hash is the sum of
    ``(tokens[-i] + 1) * FACTOR ** i``, without its lower bits. The long one is computed on demand."""

    __slots__ = ("_long", "short", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.short = self._long = PAD
        if len(tokens) >= MATCH_MIN:
            self.short = (
                (tokens[-3] + 1) * _POWERS[-3] + (tokens[-2] + 1) * _POWERS[-2] + (tokens[-1] + 1) * _POWERS[-1]
            ) & _HASH_MASK

    @property
    def long(self) -> int:
        """Return the key of a context of LONG_MATCH tokens or more."""
        if self._long == PAD:
            self._long = (sum(map(mul, self.tokens[-LONG_MATCH:], _POWERS)) + _POWER_SUM) & _HASH_MASK
        return self._long


def _sorted_numbers(tokens: npt.NDArray[np.int32]) -> tuple[array[int], array[int]]:
    """Return two sorted arrays of the numbers of all positions that have a next token, by ``MATCH_MIN`` tokens and by
    ``LONG_MATCH``. Polynomials of 2, 4 and 8 tokens are made from those of half the length.
    """
    factor, square, fourth = (np.uint64(_POWERS[-power]) for power in (1, 2, 4))
    ones = (tokens[:-1].astype(np.int64) + 1).view(np.uint64) * factor
    two = ones[:-1] * factor + ones[1:]
    three = two[:-1] * factor + ones[2:]
    if ones.size < LONG_MATCH:
        return _with_positions(three, MATCH_MIN), array("Q")
    four = two[:-2] * square + two[2:]
    eight = four[:-4] * fourth + four[4:]
    return _with_positions(three, MATCH_MIN), _with_positions(eight, LONG_MATCH)


def _with_positions(hashes: npt.NDArray[np.uint64], length: int) -> array[int]:
    hashes &= np.uint64(_HASH_MASK)
    hashes += np.arange(length, length + hashes.size, dtype=np.uint64)
    hashes.sort()
    return array("Q", hashes.tobytes())


def _common_end(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """Return how many tokens before ``end`` equal the last tokens of ``context``."""
    length, most = 0, min(end, len(context))
    while length < most and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


class FrozenText:
    """A complete text. PAD separates parts that do not follow each other; it matches nothing."""

    __slots__ = ("_long", "_short", "tokens")

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        assert tokens.size <= FROZEN_TOKENS_MAX
        self.tokens = array("i", np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
        self._short, self._long = _sorted_numbers(tokens) if tokens.size > MATCH_MIN else (array("Q"), array("Q"))

    @property
    def size_bytes(self) -> int:
        return FROZEN_BYTES_PER_TOKEN * len(self.tokens)

    def lookup(self, context: Context) -> Occurrence | None:
        short, numbers = context.short, self._short
        first = bisect_left(numbers, short)
        if first == len(numbers) or numbers[first] >= short + _POSITIONS or short == PAD:
            return None
        if len(context.tokens) >= LONG_MATCH and self._long:
            index = bisect_left(self._long, context.long)
            best = self._longest(self._long, index, context.tokens, context.long, LONG_MATCH)
            if best is not None:
                return best
        return self._longest(numbers, first, context.tokens, short, MATCH_MIN)

    def _longest(
        self, numbers: array[int], first: int, context: Sequence[int], key: int, least: int
    ) -> Occurrence | None:
        """Return the newest occurrence of ``key`` among the numbers from index ``first`` on."""
        end_key = key + _POSITIONS
        if first == len(numbers) or numbers[first] >= end_key:
            return None
        last = bisect_left(numbers, end_key, first, min(first + _CANDIDATES_MAX, len(numbers)))
        if last - first == _CANDIDATES_MAX:
            last = bisect_left(numbers, end_key, last)
        best, most = 0, least - 1
        for index in range(last - 1, max(first, last - _CANDIDATES_MAX) - 1, -1):
            end = numbers[index] - key
            length = _common_end(self.tokens, end, context)
            if length > most:
                best, most = end, length
        return Occurrence(self, best, most) if best else None

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        tokens = tuple(self.tokens[position : position + count])
        return tokens[: tokens.index(PAD)] if PAD in tokens else tokens


class GrowingText:
    """A text that grows at its end. ``first``: the tokens before it, so that matches reach back."""

    __slots__ = ("_ends_by_long", "_ends_by_short", "_read", "tokens")

    def __init__(self, first: Sequence[int] = ()) -> None:
        self.tokens: list[int] = list(first)
        self._read = len(self.tokens)
        """Number of positions that are indexed. Those in ``first`` are in the index of another text."""
        self._ends_by_short: dict[int, int] = {}
        self._ends_by_long: dict[int, int] = {}

    @property
    def size_bytes(self) -> int:
        return GROWING_BYTES_PER_TOKEN * len(self.tokens)

    def lookup(self, context: Context) -> Occurrence | None:
        if self._read < len(self.tokens):
            self._read_all()
        tokens = context.tokens
        end = self._ends_by_short.get(hash(tuple(tokens[-MATCH_MIN:])))
        if end is None or len(tokens) < MATCH_MIN:
            return None
        if len(tokens) >= LONG_MATCH:
            far = self._ends_by_long.get(hash(tuple(tokens[-LONG_MATCH:])))
            if far is not None:
                length = _common_end(self.tokens, far, tokens)
                if length >= LONG_MATCH:
                    return Occurrence(self, far, length)
        length = _common_end(self.tokens, end, tokens)
        return Occurrence(self, end, length) if length >= MATCH_MIN else None

    def _read_all(self) -> None:
        """Index the positions whose next token has come, so that lookups find them."""
        tokens, end = self.tokens, len(self.tokens)
        first, self._read = self._read, end
        if end - first > _BULK:
            self._index_all(self._ends_by_short, first, MATCH_MIN)
            self._index_all(self._ends_by_long, first, LONG_MATCH)
            return
        for position in range(max(first, MATCH_MIN), end):
            self._ends_by_short[hash((tokens[position - 3], tokens[position - 2], tokens[position - 1]))] = position
            if position >= LONG_MATCH:
                self._ends_by_long[hash(tuple(tokens[position - LONG_MATCH : position]))] = position

    def _index_all(self, ends: dict[int, int], first: int, length: int) -> None:
        tokens, end, first = self.tokens, len(self.tokens), max(first, length)
        if first >= end:
            return
        before = zip(*(tokens[first - back : end - back] for back in range(length, 0, -1)), strict=True)
        ends.update(zip(map(hash, before), range(first, end), strict=True))

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """Return the ``count`` tokens from ``position`` on. A continuation that reaches the end of the text repeats
        from its first token: a text that repeats goes on repeating.
        """
        tokens = tuple(self.tokens[position : position + count])
        if PAD in tokens:
            return tokens[: tokens.index(PAD)]
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
        """Add a long text at once, frozen; later tokens follow it. The index must have no growing text yet, or
        ``tokens`` is that text.
        """
        tokens = tokens[-self._tokens_max :]
        self._growing = GrowingText(tokens[-CONTEXT_TOKENS:].tolist())
        while self._frozen and len(self._frozen[-1].tokens) <= 2 * tokens.size:
            older = np.frombuffer(self._frozen[-1].tokens, np.int32)
            if older.size + tokens.size > self._tokens_max // 4:
                break
            self._drop(-1)
            tokens = np.concatenate([older, _SEPARATOR, tokens])
        self._frozen.append(FrozenText(tokens))
        self._frozen_tokens += tokens.size
        while self.token_count > self._tokens_max and len(self._frozen) > 1:
            self._drop(0)

    def _drop(self, index: int) -> None:
        self._frozen_tokens -= len(self._frozen.pop(index).tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        growing = self._growing
        growing.tokens += tokens
        if len(growing.tokens) >= min(GROWING_TOKENS_MAX, max(self._tokens_max // 2, 2 * CONTEXT_TOKENS)):
            self.freeze(np.asarray(growing.tokens, dtype=np.int32))

    def end(self) -> Context:
        """Return the last CONTEXT_TOKENS tokens, or all."""
        return Context(self._growing.tokens[-CONTEXT_TOKENS:])

    def lookup(self, context: Context) -> Occurrence | None:
        """Return the longest match; of equal ones the newest text's."""
        best = self._growing.lookup(context)
        if not self._frozen or (best is not None and best.length >= CONTEXT_TOKENS):
            return best
        for text in reversed(self._frozen):
            other = text.lookup(context)
            if other is not None and (best is None or other.length > best.length):
                best = other
        return best
