"""A long text that is tokenized in parts has the ids of the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.text import text_parts as module
from weft.text.text_parts import text_parts

PATTERNS = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]
PIECES = ["the", "cat", "Ω", "é", "e\u0301", "🏔", "don't", "123", "1234567", "  ", "\n", "\n\n  ", "\t", " ",
          ".", "...", "<|end|>", "a b", "x", "</s>", "\u200b", "()", "def f():\n    return"]


def trained(pattern: str, **more: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = more.get("normalizer")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|end|>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = Path(__file__).read_text() + "the cat and don't 123 1234 def return"
    tokenizer.train_from_iterator([text], trainer)
    if more.get("special"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|end|> $A </s>", special_tokens=[("<|end|>", 0), ("</s>", 1)])
    return tokenizer


def drawn(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(PIECES) + draw.choice(("", " ", " ", " the")) for _ in range(count))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("more", [{}, {"special": True}, {"normalizer": normalizers.NFC()}])
def test_parts_have_the_ids_of_the_whole(pattern: str, more: dict[str, Any],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_CHARS", 200)
    monkeypatch.setattr(module, "PART_MARGIN_CHARS", 64)
    tokenizer = trained(pattern, **more)
    parts = text_parts(tokenizer)
    assert parts is not None
    for seed in range(60):
        text = drawn(seed, 400)
        for special in (False, True):
            whole = tokenizer.encode(text, add_special_tokens=special).ids
            assert parts.encode(text, add_special_tokens=special) == whole, seed


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
