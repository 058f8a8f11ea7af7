"""A vocabulary of tiktoken as the content of a tokenizer.json. Kimi's checkpoints have no other.

    tiktoken.model          IGhlbGxv 24748              bytes in base64, rank
    tokenizer_config.json   "163586": {"content": "<|im_end|>"}    added tokens; the rest of 256 are reserved
    text                    cut by ``KIMI``; in a piece, the pair whose bytes have the lowest rank is joined first

The ``tokenizers`` library joins by a list of pairs. Here the list has every pair of tokens whose bytes are a token,
ordered by the rank of that token: so the pair with the lowest rank is joined first there too.

Source: the package ``tiktoken`` for the format and the order; the tokenizer of the releases (tokenization_kimi.py) for
the expression and the reserved tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.added_tokens import read_next_to, with_flags
from weft.errors import CheckpointError
from weft.files import read_json
from weft.pre_tokenizers import BYTE_LEVEL, PRE_TOKENIZERS

TIKTOKEN_FILE = "tiktoken.model"
TOKENIZER_CLASS = "TikTokenTokenizer"
RESERVED = 256
"""Tokens after the vocabulary, named or not."""


def tiktoken_content(path: Path, text: str, letters: Mapping[int, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json. ``path``: of the vocabulary, next to its tokenizer_config.json; ``text``:
    its lines; ``letters``: the letter of each byte. Raise CheckpointError."""
    config_path = path.parent / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    if config.get("tokenizer_class") != TOKENIZER_CLASS:
        raise CheckpointError(
            f"{config_path}: tokenizer_class is {config.get('tokenizer_class')!r}; of checkpoints without a "
            f"tokenizer.json weft reads those of Kimi, {TOKENIZER_CLASS!r}",
            param="model",
        )
    ranks = _ranks(path, text)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(path.parent, len(ranks)),
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS["kimi-k2"].content(),
        "post_processor": None,
        "decoder": BYTE_LEVEL | {"use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {"".join(map(letters.__getitem__, token)): rank for token, rank in ranks.items()},
            "merges": [["".join(map(letters.__getitem__, part)) for part in pair] for pair in _pairs(ranks)],
        },
    }


def _ranks(path: Path, text: str) -> dict[bytes, int]:
    """Return the rank of each token, which is its id. Raise CheckpointError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        token, _, rank = line.partition(" ")
        try:
            decoded = base64.b64decode(token, validate=True)
        except binascii.Error:
            decoded = b""
        if not decoded or decoded in ranks or rank.strip() != str(len(ranks)):
            raise CheckpointError(
                f"{path}: line {number} is {line[:60]!r}; a line is the bytes of a new token in base64 and its rank, "
                f"here {len(ranks)}",
                param="model",
            )
        ranks[decoded] = len(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(
            f"{path}: no token is the byte {missing[0]:#04x}, so some texts have no tokens", param="model"
        )
    return ranks


def _pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that make one, by its rank."""
    pairs = []
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def _added(directory: Path, first: int) -> list[dict[str, Any]]:
    """Return the added tokens from id ``first`` on. Raise CheckpointError."""
    beside = read_next_to(directory)
    for index, entry in beside.stated.items():
        if not first <= index < first + RESERVED:
            raise CheckpointError(
                f"{directory / beside.source}: {entry['content']!r} is token {index}; it must be from {first} to "
                f"{first + RESERVED - 1}",
                param="model",
            )
    return [
        {"id": index} | (beside.stated.get(index) or with_flags(f"<|reserved_token_{index}|>", special=True))
        for index in range(first, first + RESERVED)
    ]
