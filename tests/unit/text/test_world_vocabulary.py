"""RWKV's World vocabulary: the longest token wins at each place, and ids, bytes and texts go both ways."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from weft.engine.grammars import GrammarCompiler
from weft.errors import CheckpointError
from weft.text.grammars import json_grammar
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_file import END_OF_TEXT, tokenizer_path, tokenizer_text

FILE = "rwkv_vocab_v20230424.txt"


def vocabulary() -> dict[bytes, int]:
    """Every byte; words that begin alike; halves of characters; regular expressions' own marks."""
    dice = random.Random(7)
    words = [
        b"\n\n",
        b"the",
        b"then",
        b"thence",
        b"the ",
        b" the",
        b"  ",
        b" " * 128,
        b" " * 60,
        b"(?:",
        b".*",
        b"\\d",
        b"'",
        b'"',
        b"|",
        b"a|b",
        "é".encode(),
        "今天".encode(),
        "今天".encode()[:4],
        "🙂".encode()[1:],
    ]
    words += [bytes(dice.choices(b"abc \xe4\xbb\x8a", k=dice.randint(2, 6))) for _ in range(300)]
    tokens = [bytes([byte]) for byte in range(256)] + words
    return {token: index for index, token in enumerate(dict.fromkeys(tokens), 1)}


def line(token: bytes, index: int) -> str:
    try:
        return f"{index} {token.decode()!r} {len(token)}"
    except UnicodeDecodeError:
        return f"{index} {token!r} {len(token)}"


def write(directory: Path, lines: list[str]) -> Path:
    (directory / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def longest(text: str, tokens: dict[bytes, int], *, shortest: bool = False) -> list[int]:
    """By the definition: at each place the longest token."""
    left, ids = text.encode(), []
    while left:
        lengths = range(1, 129) if shortest else range(128, 0, -1)
        token = next(left[:length] for length in lengths if left[:length] in tokens)
        ids.append(tokens[token])
        left = left[len(token) :]
    return ids


def test_the_longest_token_wins_at_each_place(tmp_path: Path) -> None:
    tokens = vocabulary()
    tokenizer = Tokenizer.load(write(tmp_path, [line(*each) for each in tokens.items()]))
    dice = random.Random(11)
    texts = ["", "thence then the thesis\n\n\n", "今天今 é🙂 (?:.*|\\d)'\"", " " * 300, "a|b|c\x00\x7f"]
    texts += ["".join(dice.choices("abc th\n今天é🙂", k=40)) for _ in range(200)]
    for text in texts:
        assert tokenizer.encode(text) == longest(text, tokens)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert any(longest(text, tokens) != longest(text, tokens, shortest=True) for text in texts)
    assert all(tokenizer.token_bytes(index) == token for token, index in tokens.items())


def test_id_0_ends_a_text_and_is_one_token_in_prompts(tmp_path: Path) -> None:
    tokens = vocabulary()
    tokenizer = Tokenizer.load(write(tmp_path, [line(*each) for each in tokens.items()]))
    assert tokenizer.encode(f"{END_OF_TEXT}the") == [0, tokens[b"the"]]
    assert tokenizer.special_ids == {0}
    assert tokenizer.decode([tokens[b"the"], 0]) == "the"
    assert tokenizer.vocab_size == len(tokens) + 1


def test_grammars_follow_it_though_its_tokens_are_long(tmp_path: Path) -> None:
    tokens = vocabulary()
    path = tokenizer_path(write(tmp_path, [line(*each) for each in tokens.items()]))
    compiler = GrammarCompiler(lambda: tokenizer_text(path), (0,), len(tokens) + 1, None)
    matcher = compiler.compile(json_grammar({"const": "then"}, field="f")).matcher()
    wrong, right = tokens[b"the "], [tokens[b'"'], tokens[b"then"], tokens[b'"'], 0]
    assert matcher.consume_token(right[0])
    assert matcher.validate_tokens([wrong]) == 0
    assert matcher.validate_tokens(right[1:]) == 3


def test_a_tokenizer_json_goes_before_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, [])
    assert tokenizer_path(tmp_path).name == FILE
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_path(tmp_path).name == "tokenizer.json"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("12 'a' 2", r"line 257 is \"12 'a' 2\""),
        ("0 'ab' 2", "an id from 1"),
        ("300 __import__('os') 3", "line 257"),
        ("300 'a' 1", "a new text"),
        ("300 b'' 0", "line 257"),
        (f"300 {'x' * 257!r} 257", "at most 256"),
        ("300 ab 2", "line 257"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, bad: str, words: str) -> None:
    whole = [line(bytes([byte]), byte + 1) for byte in range(256)]
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.load(write(tmp_path, [*whole, bad]))


def test_a_vocabulary_without_a_byte_is_refused(tmp_path: Path) -> None:
    lines = [line(bytes([byte]), byte + 1) for byte in range(256) if byte != 0x41]
    with pytest.raises(CheckpointError, match="no token is the byte 0x41"):
        Tokenizer.load(write(tmp_path, lines))
