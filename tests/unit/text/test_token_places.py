"""Places without offsets: the ids and counts of the library itself, or none at all."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from weft.text.token_places import HEADER_CHARS_MAX, TokenPlaces

PARTS = ("<s>", "</s>", "<t>", "he", "hehe", "\n", " ", "  ", "é", "🏔", "h", "e\n", "<", "s>", "user")


def backend_of(*added: AddedToken, normalizer: Any = None) -> tokenizers.Tokenizer:
    """Bytes, "he", "hehe", and a token over a line end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "he", "hehe", "ĊĊ"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)},
                                              merges=[("h", "e"), ("he", "he"), ("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(list(added))
    return backend


def expected(backend: tokenizers.Tokenizer, text: str, places: list[int]) -> tuple[list[int], list[int]]:
    encoding = backend.encode(text, add_special_tokens=False)
    ends = [end for _, end in encoding.offsets]
    return encoding.ids, [sum(end <= place for end in ends) for place in places]


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_ids_and_counts_are_those_of_the_offsets(normalizer: Any) -> None:
    backend = backend_of(AddedToken("<s>"), AddedToken("</s>"), AddedToken("<t>"),
                         normalizer=normalizer)
    places_of, draw = TokenPlaces(backend), Random(5)
    answered = 0
    for _ in range(400):
        parts = draw.choices(PARTS, k=draw.randint(1, 12))
        text = "".join(parts)
        ends = [sum(map(len, parts[:count])) for count in range(len(parts) + 1)]
        places = sorted(draw.sample(ends, min(3, len(ends))))
        encoded = places_of.encode(text, places)
        if encoded is None:
            continue
        answered += 1
        assert encoded == expected(backend, text, places), (text, places)
    assert answered > 200


def test_a_place_inside_a_token_is_left_to_the_offsets() -> None:
    places_of = TokenPlaces(backend_of(AddedToken("<s>")))
    assert places_of.encode("<s>hehe", [5]) is None
    assert places_of.encode("<s>hehe", [3, 7, 9]) == ([259, 257], [1, 2, 2])
    assert places_of.encode("<s>" + "h" * HEADER_CHARS_MAX, [HEADER_CHARS_MAX]) is not None
    assert places_of.encode("h" * 200, [HEADER_CHARS_MAX + 1]) is None


def test_a_token_that_takes_the_space_behind_it_leaves_all_to_the_offsets() -> None:
    places_of = TokenPlaces(backend_of(AddedToken("<s>"), AddedToken("<t>", rstrip=True)))
    assert places_of.encode("h" * 200 + "<s><t>  h", [206]) is None


@pytest.mark.parametrize("other", [AddedToken("<t>", lstrip=True), AddedToken("a<t>"),
                                   AddedToken("<t>", normalized=True), AddedToken("<t>", single_word=True)])
def test_a_token_that_may_begin_earlier_is_no_cut(other: AddedToken) -> None:
    backend = backend_of(other, AddedToken("<s>"))
    text = "a \n<t>h" + "h" * HEADER_CHARS_MAX
    place = text.index("<t>") + 4
    encoded = TokenPlaces(backend).encode(text, [place])
    assert encoded is None or encoded == expected(backend, text, [place])
    assert TokenPlaces(backend)._cut_before(text, text.index("<t>"), 0) == 0, "the beginning of the text"
