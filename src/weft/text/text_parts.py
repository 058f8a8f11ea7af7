"""Very long texts, tokenized part by part with the ids of the whole.

    text   |---- part 1 ----|-margin-|
                         cut^---- part 2 ----|-margin-|        cut: between "...x" and " y..."

The library tokenizes a text at once: its memory grows with the text (30 MB took 3 GB), and one list of all
ids is built while Python stands still. Parts keep both small.

A cut is right if tokens on either side do not depend on the other side. This holds for byte-level BPE whose
words come from a regex without look-behind: merges stay inside a word, and matching goes on from the end of
a match as if the text began there. So a part is encoded with a margin behind it, for the look-ahead of the
regex; the cut is an end of a word inside the part, before a space and a letter; the ids up to the cut count,
and the next part begins there. A tokenizer of another kind, and a text without spaces, are not cut.

Rejected: cutting at newlines (runs of whitespace are one word); comparing ids around a cut (that shows one
place, and proves none).
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

PART_CHARS = 1 << 16
PART_MARGIN_CHARS = 1 << 12
_SPACE = "Ġ"
"""A space in the alphabet of byte-level BPE."""
_SIGNS_OF_CONTEXT = ("(?<", "\\G", "\\A", "\\b", "\\B", "^")
"""Of a regex that looks at what stands before a match."""


class TextParts:
    """``before`` and ``behind``: the special tokens that the tokenizer adds to every text."""

    def __init__(self, backend: tokenizers.Tokenizer, before: list[int], behind: list[int]) -> None:
        self._backend = backend
        self._before = before
        self._behind = behind

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = list(self._before) if add_special_tokens else []
        start = 0
        while len(text) - start > PART_CHARS + PART_MARGIN_CHARS:
            part = text[start:start + PART_CHARS + PART_MARGIN_CHARS]
            [encoding] = self._backend.encode_batch([part], add_special_tokens=False)
            count, end = _cut(encoding, part)
            if not count:
                break
            ids += encoding.ids[:count]
            start += end
        [encoding] = self._backend.encode_batch_fast([text[start:]], add_special_tokens=False)
        ids += encoding.ids
        return ids + self._behind if add_special_tokens else ids


def _cut(encoding: Any, part: str) -> tuple[int, int]:
    """(tokens, characters) up to the last cut inside the part; (0, 0) where there is none."""
    offsets, words, tokens = encoding.offsets, encoding.word_ids, encoding.tokens
    for at in range(len(offsets) - 1, 0, -1):
        end = offsets[at - 1][1]
        if end > PART_CHARS:
            continue
        word_ends = None not in (words[at], words[at - 1]) and words[at] != words[at - 1]
        touches = end <= offsets[at][0] <= end + 1
        spaced = tokens[at].startswith(_SPACE) and _is_gap(part, end)
        if word_ends and touches and spaced:
            return at, end
    return 0, 0


def _is_gap(part: str, at: int) -> bool:
    around = part[at - 1] + part[at + 1]
    return part[at] == " " and around.isascii() and around.isalpha()


def text_parts(backend: tokenizers.Tokenizer) -> TextParts | None:
    """None for a tokenizer whose texts cannot be cut."""
    form = json.loads(backend.to_str())
    model, normalizer = form.get("model") or {}, form.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    if not _cuts_words(form.get("pre_tokenizer")):
        return None
    if any(len(token["content"]) >= PART_MARGIN_CHARS // 2 for token in form.get("added_tokens") or ()):
        return None
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(plain) + 1):
        if plain and whole[at:at + len(plain)] == plain:
            return TextParts(backend, whole[:at], whole[at + len(plain):])
    return None


def _cuts_words(form: Any) -> bool:
    """Whether it splits by a regex without look-behind, and does nothing else that sees beyond a word."""
    steps = form.get("pretokenizers", [form]) if isinstance(form, dict) else []
    splits = byte_level = False
    for step in steps:
        kind = step.get("type")
        if kind == "Split":
            pattern = step.get("pattern", {}).get("Regex")
            if pattern is None or step.get("behavior") not in ("Isolated", "Removed"):
                return False
            if any(sign in pattern.replace("[^", "") for sign in _SIGNS_OF_CONTEXT):
                return False
            splits = True
        elif kind == "ByteLevel":
            if step.get("add_prefix_space"):
                return False
            byte_level, splits = True, splits or bool(step.get("use_regex"))
        elif kind != "Digits":
            return False
    return splits and byte_level
