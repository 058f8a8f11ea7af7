"""The tokenizer of a checkpoint as the text of a tokenizer.json: read from that file, or translated from a World
vocabulary, one of tiktoken (``tiktoken_vocabulary``) or one of PLaMo (``plamo_vocabulary``).

    rwkv_vocab_v20230424.txt    261 '\\n\\n' 2          id, a Python literal of text or bytes, its bytes
    a trie of the tokens        (?:a(?:b(?:c)?)?|d)    the longest match, as one regular expression
    text                        bytes as letters  ->  cut by the expression  ->  each piece is a token

RWKV checkpoints come with this vocabulary and Python code for it. The code's rule is short: at each position the
longest token wins. A trie as an expression gives the ``tokenizers`` library the same rule, so encoding, bytes of
tokens, offsets and grammars need no second implementation. Where a token ends inside a longer one, the rest is
optional, and a regular expression tries the rest first.

Id 0 ends a text and is in no line of the file. Further tokens that a tokenizer_config.json adds are not read: the
converter's ``eos_token`` "\\n\\n" would get an id of its own, and no model was trained with it.

Source: the tokenizer of the package ``rwkv`` (``rwkv_tokenizer.py``), for the format and the rule.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from weft.added_tokens import completed, read_next_to, with_flags
from weft.errors import CheckpointError
from weft.files import TOKENIZER_BYTES_MAX, parse_json, read_text
from weft.pre_tokenizers import split
from weft.text.plamo_vocabulary import PLAMO_FILE, plamo_content
from weft.text.tiktoken_vocabulary import TIKTOKEN_FILE, tiktoken_content

WORLD_FILES = "rwkv_vocab_*.txt"
END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"
_LINE = re.compile(r"(\d{1,9}) (b?(?:'.*'|\".*\")) (\d{1,9})")
Trie = dict[str, "Trie"]
_ENDS = ""
"""Key in a trie's node that marks the end of a token."""
_NESTED = 12
"""Depth up to which the expression nests a group for each letter. Regex libraries take about 64 groups; deeper ends of
tokens are written as a plain list, the longest first."""
TOKEN_BYTES_MAX = 256
"""Most bytes of a token; the longest token of the World vocabulary has 128."""


def tokenizer_path(directory: Path) -> Path:
    """Return the path of tokenizer.json, even if it is missing; of another vocabulary, if only that exists."""
    path = directory / "tokenizer.json"
    names = (WORLD_FILES, TIKTOKEN_FILE, PLAMO_FILE)
    others = [] if path.is_file() else [file for name in names for file in sorted(directory.glob(name))]
    return others[0] if others else path


def tokenizer_text(path: Path) -> str:
    """Return the text of a tokenizer.json, for a path of ``tokenizer_path``, with the tokens that the files next to it
    add. Raise CheckpointError."""
    text = read_text(path, bytes_max=TOKENIZER_BYTES_MAX)
    if path.suffix != ".json":
        config = path.parent / "tokenizer_config.json"
        return _translated(path, text, config.read_bytes() if config.is_file() else b"")
    whole = completed(parse_json(text, str(path)), read_next_to(path.parent), path)
    return text if whole is None else json.dumps(whole, ensure_ascii=False)


@lru_cache(maxsize=1)
def _translated(path: Path, text: str, config: bytes) -> str:
    """Return the translation of a vocabulary. It takes a second, and a start needs it for a digest too: the last one is
    kept. ``config``: the content of the file next to it, which a translation may read."""
    letters = {byte: letter for letter, byte in byte_of_character().items()}
    read = {TIKTOKEN_FILE: tiktoken_content, PLAMO_FILE: plamo_content}.get(path.name, _world)
    return json.dumps(read(path, text, letters), ensure_ascii=False)


def tokenizer_digest(path: Path) -> str:
    """Return a digest of the text that ``tokenizer_text`` returns. Raise CheckpointError."""
    return hashlib.sha256(tokenizer_text(path).encode()).hexdigest()


@cache
def byte_of_character() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): printable bytes map to themselves, and the n-th other byte to
    character 256 + n."""
    spans = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    table = {chr(byte): byte for first, last in spans for byte in range(ord(first), ord(last) + 1)}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def _world(path: Path, text: str, letters: dict[int, str]) -> dict[str, Any]:
    tokens = {"".join(letters[byte] for byte in token): index for token, index in _tokens(path, text).items()}
    missing = next((byte for byte, letter in sorted(letters.items()) if letter not in tokens), None)
    if missing is not None:
        raise CheckpointError(
            f"{path}: no token is the byte {missing:#04x}, so some texts have no tokens", param="model"
        )
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": 0} | with_flags(END_OF_TEXT, special=True)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [bytes_of, split(_longest(tokens))]},
        "post_processor": None,
        "decoder": bytes_of,
        "model": {"type": "WordLevel", "vocab": {END_OF_TEXT: 0} | tokens, "unk_token": END_OF_TEXT},
    }


def _tokens(path: Path, text: str) -> dict[bytes, int]:
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        matched = _LINE.fullmatch(line.rstrip("\r"))
        try:
            literal = ast.literal_eval(matched[2]) if matched else None
        except (SyntaxError, ValueError):
            literal = None
        token = literal.encode() if isinstance(literal, str) else literal
        if (
            not matched
            or not token
            or not 0 < len(token) == int(matched[3]) <= TOKEN_BYTES_MAX
            or token in tokens
            or int(matched[1]) == 0
        ):
            raise CheckpointError(
                f"{path}: line {number} is {line[:60]!r}; a line is an id from 1, a new "
                "text or bytes in quotes, and their length in bytes, at most "
                f"{TOKEN_BYTES_MAX}",
                param="model",
            )
        tokens[token] = int(matched[1])
    return tokens


def _longest(tokens: dict[str, int]) -> str:
    root: Trie = {}
    for token in tokens:
        node = root
        for letter in token:
            node = node.setdefault(letter, {})
        node[_ENDS] = {}
    return _expression(root)


def _expression(node: Trie, depth: int = 0) -> str:
    if depth < _NESTED:
        ways = [
            re.escape(letter) + _expression(behind, depth + 1) for letter, behind in node.items() if letter != _ENDS
        ]
    else:
        ways = [re.escape(end) for end in sorted(_ends_of(node), key=len, reverse=True) if end]
    if not ways:
        return ""
    behind = ways[0] if len(ways) == 1 and _ENDS not in node else f"(?:{'|'.join(ways)})"
    return f"{behind}?" if _ENDS in node else behind


def _ends_of(node: Trie) -> Iterator[str]:
    """Yield alternatives of the regex of the tokens below ``node``. The recursion is as deep as the longest token is
    long."""
    for letter, behind in node.items():
        yield from [_ENDS] if letter == _ENDS else (letter + end for end in _ends_of(behind))
