"""Words that are looked up have the ids that the library gives them."""

from __future__ import annotations

import json
import random
import string

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from tests.unit.text.test_text_parts import PATTERNS, drawn, trained
from weft.text import text_parts as parts_module
from weft.text import word_ids as module
from weft.text.certain_words import cuts_certainly
from weft.text.text_parts import text_parts
from weft.text.word_ids import WordIds, ascii_pattern, word_ids

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST, ENDINGS = r"[^\r\n\p{L}\p{N}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = (rf"{FIRST}?{UPPER}*{LOWER}+{ENDINGS}?|{FIRST}?{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA = rf"{ENDINGS}|{FIRST}?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CERTAIN = {"llama": LLAMA, "o200k": O200K, "cl100k": PATTERNS[0], "gpt2": ""}


def tokenizer_of(name: str) -> tokenizers.Tokenizer:
    tokenizer = trained(CERTAIN[name] or PATTERNS[1])
    if not CERTAIN[name]:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


def words_of(tokenizer: tokenizers.Tokenizer) -> WordIds:
    form = json.loads(tokenizer.to_str())
    assert cuts_certainly(form)
    words = word_ids(tokenizer, form)
    assert words is not None
    return words


def plain(seed: int, count: int) -> str:
    """Printable ASCII, rich in what the regexes treat apart; it ends with a letter."""
    draw = random.Random(seed)
    chars = string.printable.replace("\v", "").replace("\f", "") + "  \n''sStTdDlLvVeE    \r\n\t/"
    return "".join(draw.choices(chars, k=count)) + "x"


@pytest.mark.parametrize("name", CERTAIN)
def test_words_have_the_ids_of_the_library(name: str) -> None:
    tokenizer = tokenizer_of(name)
    words = words_of(tokenizer)
    for seed in range(60):
        text = plain(seed, 400)
        for _ in range(2):   # with words that are new, and with known ones
            assert words.look_up(text) == tokenizer.encode(text).ids, (seed, text)


@pytest.mark.parametrize("name", CERTAIN)
def test_a_long_text_has_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_CHARS", 200)
    monkeypatch.setattr(parts_module, "PART_MARGIN_CHARS", 64)
    monkeypatch.setattr(parts_module, "_PIECE_CHARS", 30)
    outcomes, look_up = set[bool](), WordIds.look_up

    def watched(words: WordIds, part: str) -> list[int] | None:
        ids = look_up(words, part)
        outcomes.add(ids is None)
        return ids

    monkeypatch.setattr(WordIds, "look_up", watched)
    tokenizer = tokenizer_of(name)
    parts = text_parts(tokenizer)
    assert parts is not None
    for seed in range(20):
        text = drawn(seed, 400)
        assert parts.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids, seed
    assert outcomes == {True, False}


@pytest.mark.parametrize("text", ["caf\u00e9", "a\x1cb", "a\vb", "\u017f", "\u2028", "a <|end|> b", "</s>"])
def test_what_may_mean_something_else_goes_to_the_library(text: str) -> None:
    assert words_of(tokenizer_of("llama")).look_up(text) is None


def test_an_added_token_as_words_has_other_ids() -> None:
    """The control of the look for added tokens."""
    tokenizer = tokenizer_of("llama")
    words = words_of(tokenizer)
    words._added.clear()
    assert words.look_up("a <|end|> b") != tokenizer.encode("a <|end|> b").ids


def test_known_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORDS_MAX", 50)
    tokenizer = tokenizer_of("llama")
    words = words_of(tokenizer)
    for seed in range(8):
        text = f"{'y' * 100} " + " ".join(f"w{seed}{chr(97 + number)}" for number in range(12))
        assert words.look_up(text) == tokenizer.encode(text).ids
        assert len(words._known) <= 50
        assert max(map(len, words._known)) <= module.WORD_CHARS_MAX


def test_classes_of_letters_become_ascii() -> None:
    pattern = ascii_pattern(r"[^\r\n\p{L}\p{N}]?\p{L}+|[\p{Lu}\p{M}]*\s")
    assert pattern == r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[A-Z]*\s"


def test_other_steps_are_not_looked_up() -> None:
    tokenizer = trained(LLAMA)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), tokenizer.pre_tokenizer])
    assert word_ids(tokenizer, json.loads(tokenizer.to_str())) is None
