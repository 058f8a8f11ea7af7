"""Lookups agree with a search of the whole text, in every form of index, and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.speculation.texts import prose
from weft.speculation import text_index
from weft.speculation.text_index import (
    CONTEXT_TOKENS,
    LONG_MATCH,
    MATCH_MIN,
    Context,
    FrozenText,
    GrowingText,
    TextIndex,
)
from weft.units import PAD

_texts = st.lists(st.integers(0, 2), min_size=0, max_size=60)


def longest_match(text: list[int], context: list[int]) -> int:
    """Of all places that have a next token, the most tokens of ``context`` before one."""
    best = 0
    for end in range(len(text)):
        length = 0
        while length < min(end, len(context)) and text[end - 1 - length] == context[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def growing(text: list[int]) -> GrowingText:
    index = GrowingText()
    index.tokens += text
    return index


def asked_often(text: list[int]) -> GrowingText:
    """The same, read a few tokens at a time."""
    index = GrowingText()
    for at in range(0, len(text), 2):
        index.tokens += text[at : at + 2]
        index.lookup(Context(text[:at]))
    return index


@settings(max_examples=60, deadline=None)
@given(_texts, _texts)
def test_an_occurrence_is_real_and_none_is_missed(text: list[int], context: list[int]) -> None:
    longest = longest_match(text, context)
    for index in (growing(text), asked_often(text), FrozenText(np.asarray(text, dtype=np.int32))):
        place = index.lookup(Context(context))
        assert (place is None) == (longest < MATCH_MIN)
        if place is not None:
            before = text[: place.position]
            assert before[len(before) - place.length :] == context[len(context) - place.length :]
            assert place.length >= (LONG_MATCH if longest >= LONG_MATCH else MATCH_MIN)
            assert place.continuation(1) == (text[place.position],)


def test_the_longest_match_wins_over_a_newer_one() -> None:
    old, new = prose(1, 40), prose(2, 40)
    text = old + new[:30] + old[10:13] + new[30:]
    for index in (growing(text), FrozenText(np.asarray(text, dtype=np.int32))):
        place = index.lookup(Context(old[:13]))
        assert place is not None
        assert (place.position, place.length) == (13, 13)


def test_a_repetition_at_the_end_goes_on() -> None:
    index = growing([7, 8, 9, 1, 2, 3, 1, 2, 3])
    place = index.lookup(Context([1, 2, 3]))
    assert place is not None
    assert place.continuation(7) == (1, 2, 3, 1, 2, 3, 1)


def test_nothing_is_drafted_across_two_answers() -> None:
    first, second = prose(3, 20), prose(4, 20)
    index = FrozenText(np.asarray([*first, PAD, *second], dtype=np.int32))
    place = index.lookup(Context(first[:18]))
    assert place is not None
    assert place.continuation(10) == tuple(first[18:])
    at_the_end = index.lookup(Context(first[-10:]))
    assert at_the_end is None or at_the_end.continuation(5) == ()


def test_equal_hashes_of_other_tokens_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "_HASH_MASK", 0)
    text, other = prose(5, 100), list(range(6000, 6012))
    assert Context(text).short == Context(other).short == Context(text).long == 0
    assert FrozenText(np.asarray(text, dtype=np.int32)).lookup(Context(other)) is None


def test_an_index_is_bounded_and_remembers_the_newest_text() -> None:
    index = TextIndex(4096)
    texts = [prose(seed, 1000) for seed in range(30)]
    for text in texts:
        index.extend([PAD, *text])
        assert index.token_count <= 6200
    found = [index.lookup(Context(text[:CONTEXT_TOKENS])) for text in texts]
    assert found[-1] is not None
    assert found[-1].continuation(3) == tuple(texts[-1][CONTEXT_TOKENS : CONTEXT_TOKENS + 3])
    assert found[0] is None


def test_few_texts_are_searched_however_much_was_added() -> None:
    index = TextIndex(1 << 18)
    for seed in range(25):
        index.extend([PAD, *prose(seed, 10_000)])
    assert len(index._frozen) <= 8
    for seed in (2, 24):
        place = index.lookup(Context(prose(seed, 10_000)[500 : 500 + CONTEXT_TOKENS]))
        assert place is not None
        assert place.length == CONTEXT_TOKENS
