"""Token ids are those of the original tokenizer, as its vocabulary, its merges and its rules of words make them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.real.reference import Original
from tests.real.text import TEXT
from weft.models.hub import resolve_model
from weft.text.tokenizer import Tokenizer

TEXTS = [
    TEXT,
    "",
    " ",
    "In 1998 he carried 312 passengers; 3.14159, 1,000,000 and 0x1F4A9, 12:30, 2²=4, ½ cup, ٣ apples, Ⅷ.",
    "don't I'll we've they're it's he'd I'm DON'T 'tis",
    "def f(x):\n\treturn  x**2   # spaces\n\n\n    if x>=10: pass\r\n",
    "Größe, naïve, čeština, ελληνικά, русский, 漢字とかな, 한국어, العربية, हिन्दी, ไทย",
    "🏔️👩‍🔬🇨🇭 e\u0301 \u00a0nbsp \u200bzero \ufeffbom \x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|", "https://example.com/a?b=c&d=%20#e",
    "a" * 300, "ab " * 100, "1" * 50, "   leading and trailing   ", "\n\n \n\t \n",
]  # fmt: skip
ALPHABET = "aAzZ019 .,;'\"-_/\\\n\t(){}[]<>|éßжя漢한🏔²½"


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(resolve_model(str(model), text_only=True))


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_a_text_has_the_ids_of_the_original_tokenizer(original: Original, tokenizer: Tokenizer, number: int) -> None:
    found = tokenizer.encode(TEXTS[number], add_special_tokens=False)
    assert found == original.encode(TEXTS[number])
    assert tokenizer.decode(found, skip_special_tokens=False) == TEXTS[number]


def test_random_texts_have_the_ids_of_the_original_tokenizer(original: Original, tokenizer: Tokenizer) -> None:
    chosen = random.Random(7)
    for _ in range(300):
        text = "".join(chosen.choices(ALPHABET, k=chosen.randint(1, 60)))
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text), repr(text)


def test_digits_taken_together_would_be_noticed(original: Original) -> None:
    """The control: some tokens of the vocabulary have several digits, so such a reader makes other ids."""
    assert original.encode(TEXTS[3], digits_apart=False) != original.encode(TEXTS[3])


def test_each_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    found = tokenizer.encode("x31998", add_special_tokens=False)
    assert [tokenizer.token_text(token) for token in found] == ["x", "3", "1", "9", "9", "8"]
