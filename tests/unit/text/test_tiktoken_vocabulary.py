"""A vocabulary of tiktoken, as Kimi's checkpoints have it: ids by tiktoken's rule, written down here again."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from tests.unit.text.test_gguf_vocabulary import CORPUS, KIMI_K2, trained
from weft.errors import CheckpointError
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_file import byte_of_character

CUT = pre_tokenizers.Split(tokenizers.Regex(KIMI_K2), "isolated")


def vocabulary() -> list[bytes]:
    """Return tokens of which some have parts of two words: a text that is cut otherwise has other ids."""
    byte_of, inner = byte_of_character(), trained((r"\n",), False)
    letters = [inner.id_to_token(index) for index in range(inner.get_vocab_size())]
    return [bytes(byte_of[letter] for letter in token) for token in letters if not token.startswith("<|")]


def written(folder: Path, tokens: list[bytes], **config: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    first = len(tokens)
    named = {str(first): {"content": "[BOS]", "special": True}, str(first + 4): {"content": "<call>", "special": False}}
    kind = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | config))
    return folder


def ids_of(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Return the ids of a piece: the neighbours whose bytes have the lowest rank are joined, again and again."""
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while known := [left + right for left, right in pairwise(parts) if left + right in ranks]:
        best = min(known, key=ranks.__getitem__)
        place = next(place for place, (left, right) in enumerate(pairwise(parts)) if left + right == best)
        parts[place : place + 2] = [best]
    return [ranks[part] for part in parts]


def test_ids_are_those_of_the_lowest_ranks(tmp_path: Path) -> None:
    tokens = vocabulary()
    ours, ranks = Tokenizer.load(written(tmp_path, tokens)), {token: rank for rank, token in enumerate(tokens)}
    texts = [part for text in CORPUS if "<|" not in text for part in (text, text[::-1], text[1:] + text[:1])]
    for text in texts:
        expected = [index for piece, _ in CUT.pre_tokenize_str(text) for index in ids_of(piece.encode(), ranks)]
        assert ours.encode(text) == expected, text
        assert ours.decode(expected, False) == text
    assert max(len(ours.encode(text)) for text in texts) > 10, "the vocabulary has more than whole texts"


def test_added_tokens_have_their_ids_and_the_others_are_reserved(tmp_path: Path) -> None:
    tokens = vocabulary()
    ours, first = Tokenizer.load(written(tmp_path, tokens)), len(tokens)
    assert ours.encode(f"a[BOS]<call><|reserved_token_{first + 1}|>")[1:] == [first, first + 4, first + 1]
    assert ours.special_ids == {*range(first, first + 256)} - {first + 4}
    assert (ours.vocab_size, ours.special_tokens) == (first + 256, {"bos_token": "[BOS]"})


@pytest.mark.parametrize(
    ("tokens", "config", "reason"),
    [
        (vocabulary(), {"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is 'QWenTokenizer'"),
        (vocabulary(), {"added_tokens_decoder": {"7": {"content": "x"}}}, r"'x' is token 7; it must be from"),
        ([b"a", b"b", b"a"], {}, "line 3 is 'YQ== 2'; a line is the bytes of a new token in base64 and"),
        ([bytes([byte]) for byte in range(255)], {}, "no token is the byte 0xff"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_cannot_be_read_is_one_line(
    tokens: list[bytes], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        Tokenizer.load(written(tmp_path, tokens, **config))
    assert not re.search(r"\n", str(caught.value))
