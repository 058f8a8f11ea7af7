"""A long text that is tokenized in parts has the ids of the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.text import text_parts as module
from weft.text.text_parts import TextParts, alternatives, text_parts

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST, ENDINGS = r"[^\r\n\p{L}\p{N}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{FIRST}?{UPPER}*{LOWER}+{ENDINGS}?|{FIRST}?{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    rf"{ENDINGS}|{FIRST}?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
"""Of cl100k, GPT-2, o200k and Llama."""
PIECES = [
    "the",
    "cat",
    "Ω",
    "é",
    "e\u0301",
    "🏔",
    "don't",
    "123",
    "1234567",
    "  ",
    "\n",
    "\n\n  ",
    "\t",
    " ",
    ".",
    "...",
    "<|end|>",
    "a b",
    "x",
    "</s>",
    "\u200b",
    "()",
    "def f():\n    return",
]


def trained(pattern: str, **more: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = more.get("normalizer")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = Path(__file__).read_text() + "the cat and don't 123 1234 def return"
    tokenizer.train_from_iterator([text], trainer)
    if more.get("special"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|end|> $A </s>", special_tokens=[("<|end|>", 0), ("</s>", 1)]
        )
    return tokenizer


def drawn(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(PIECES) + draw.choice(("", " ", " ", " the")) for _ in range(count))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("more", [{}, {"special": True}, {"normalizer": normalizers.NFC()}])
def test_parts_have_the_ids_of_the_whole(pattern: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARS", 200)
    tokenizer = trained(pattern, **more)
    parts = text_parts(tokenizer)
    assert parts is not None
    for seed in range(40):
        text = drawn(seed, 400)
        for special in (False, True):
            whole = tokenizer.encode(text, add_special_tokens=special).ids
            assert parts.encode(text, add_special_tokens=special) == whole, seed


def test_where_the_regex_joins_words_or_a_token_has_spaces_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARS", 200)
    joining = trained(r" ?\p{L}+ ?\p{L}+|\s+|[^\s\p{L}]+")
    assert text_parts(joining) is None
    texts, control = [drawn(seed, 400) for seed in range(20)], TextParts(joining, [], [])
    assert any(control.encode(text, add_special_tokens=False) != joining.encode(text).ids for text in texts)
    for token in (tokenizers.AddedToken("a b"), tokenizers.AddedToken("<x>", rstrip=True)):
        tokenizer = trained(PATTERNS[0])
        tokenizer.add_tokens([token])
        assert text_parts(tokenizer) is None


def test_alternatives_stand_between_bars_outside_of_brackets() -> None:
    assert alternatives(r"(?i:a|b)|[|)]+\||c") == [r"(?i:a|b)", r"[|)]+\|", "c"]


def test_a_text_without_spaces_is_not_cut_and_other_tokenizers_have_no_parts() -> None:
    tokenizer = trained(PATTERNS[0])
    parts = text_parts(tokenizer)
    assert parts is not None
    text = "1" * 200_000
    assert parts.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    looking_behind = trained(r"(?<=a)b|\p{L}+|\s+")
    prefixed = trained(PATTERNS[1])
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    metaspace = trained(PATTERNS[1])
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    unsplit = trained(PATTERNS[1])
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert [text_parts(one) for one in (looking_behind, prefixed, metaspace, unsplit)] == [None] * 4
