from collections.abc import Sequence
from random import Random

import pytest

from weft.text.choices import HALF, HELD_TOKENS_MAX, SHOWN_TOKENS_MAX, IncrementalDetokenizer

SPECIAL = 256
TEXT = "naïve café, 東京タワー, \U0001f468‍\U0001f469‍\U0001f467, ok? Ωμέγα."


class Bytes:
    """One token per byte, and one special token; counts what it is asked to decode."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        out, run = [], bytearray()
        for token in ids:
            if token == SPECIAL:
                out.append(run.decode("utf-8", "replace") + ("" if skip_special_tokens else "<s>"))
                run.clear()
            else:
                run.append(token)
        return "".join(out) + run.decode("utf-8", "replace")


class Spaced:
    """Words of a sentencepiece kind: a leading space each, dropped at the start of a text."""

    WORDS = ("▁the", "▁cat", "s", "▁sat")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.WORDS[token] for token in ids).replace("▁", " ").removeprefix(" ")


def pieces(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


def test_half_a_character_is_never_emitted() -> None:
    out = pieces(IncrementalDetokenizer(Bytes()), TEXT.encode())
    assert "".join(out) == TEXT
    assert all(HALF not in piece for piece in out)
    assert out[:5] == ["n", "a", "", "ï", "v"]


def test_the_pieces_joined_are_the_text_however_ids_arrive() -> None:
    random = Random(3)
    for _ in range(200):
        ids = list(TEXT.encode())
        for at in sorted(random.sample(range(len(ids)), 5), reverse=True):
            if random.random() < 0.5:
                ids.insert(at, SPECIAL)
            else:
                del ids[at]
        skip = random.random() < 0.5
        detokenizer = IncrementalDetokenizer(Bytes(), skip_special_tokens=skip)
        out, rest = "", ids
        while rest:
            cut = random.randrange(1, 6)
            out += detokenizer.push(rest[:cut])
            rest = rest[cut:]
        assert out + detokenizer.flush() == Bytes().decode(ids, skip)


def test_a_broken_last_character_comes_out_at_the_end_and_only_then() -> None:
    detokenizer = IncrementalDetokenizer(Bytes())
    assert detokenizer.push("ab€".encode()[:-1]) == "ab"
    assert detokenizer.flush() == HALF
    assert detokenizer.flush() == ""


def test_a_space_between_words_is_kept_and_that_before_the_first_is_the_decoders() -> None:
    assert pieces(IncrementalDetokenizer(Spaced()), [0, 1, 2, 3]) == ["the", " cat", "s", " sat", ""]


def test_the_end_of_the_prompt_decides_whether_the_answer_starts_with_a_space() -> None:
    assert pieces(IncrementalDetokenizer(Spaced(), context=[0]), [1, 2, 3]) == [" cat", "s", " sat", ""]


def test_a_prompt_that_ends_inside_a_character_loses_no_text() -> None:
    first, *rest = "é!".encode()
    assert "".join(pieces(IncrementalDetokenizer(Bytes(), context=[97, first]), rest)) == HALF + "!"


@pytest.mark.parametrize("ids", [[0x80] * 5000, [SPECIAL] * 5000, list(b"a") * 5000])
def test_work_per_token_is_bounded_whatever_comes(ids: list[int]) -> None:
    decoder = Bytes()
    out = "".join(pieces(IncrementalDetokenizer(decoder), ids))
    assert out == Bytes().decode(ids, True)
    assert decoder.longest <= HELD_TOKENS_MAX + SHOWN_TOKENS_MAX + 1


class Joined(Bytes):
    """As byte-level tokenizers: ids of one push may be decoded together."""

    joins_bytes = True
    lone = 0

    def lone_text(self, token: int, skip_special_tokens: bool) -> str:
        self.lone += 1
        return self.decode([token], skip_special_tokens)


def test_an_id_whose_bytes_are_characters_is_looked_up_alone() -> None:
    decoder, text = Joined(), "ab\u00e9c"
    detokenizer = IncrementalDetokenizer(decoder)
    assert [detokenizer.push([token]) for token in text.encode()] == ["a", "b", "", "\u00e9", "c"]
    assert decoder.longest == 2, "the two bytes of a character, and no window of earlier ids"
    assert decoder.lone == len(text.encode()) - 1, "not while bytes wait"


def test_ids_that_are_pushed_together_give_the_text_of_ids_one_by_one() -> None:
    random = Random(5)
    together_count = 0
    for _ in range(300):
        ids = list(TEXT.encode() * 2)
        for at in sorted(random.sample(range(len(ids)), random.choice((0, 0, 4))), reverse=True):
            if random.random() < 0.5:
                ids.insert(at, SPECIAL)
            else:
                del ids[at]
        context = ids[: random.randrange(12)]
        decoder = Joined()
        detokenizer = IncrementalDetokenizer(decoder, context=context)
        one_by_one = IncrementalDetokenizer(Bytes(), context=context)
        rest = ids[len(context) :]
        while rest:
            count = random.choice((1, 2, 7, 40, len(rest)))
            part, rest = rest[:count], rest[count:]
            text = detokenizer.push(part)
            assert text == "".join(one_by_one.push([token]) for token in part)
        assert detokenizer.flush() == one_by_one.flush()
        together_count += decoder.longest > SHOWN_TOKENS_MAX + HELD_TOKENS_MAX
    assert together_count > 100
