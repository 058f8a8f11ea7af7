r"""Tokenization of very long texts in parts, with the same ids as for the complete text.

    text   |---- part 1 ----|---- part 2 ----|---- part 3 ...     each cut between "...x" and " y..."

The library tokenizes a text at once: its memory grows with the text (30 MB took 3 GB), and one list of all ids is built
while Python's other threads wait. Parts keep both small, and several are encoded together on all cores.

A cut is correct if the tokens on each side do not depend on the other side. In byte-level BPE, merges stay inside a
word, and a regex ends the words. No alternative of ``_ALTERNATIVES`` matches a letter and then a space: a space comes
first, or there is no letter. So the match with the letter ends before the space. ``\s+`` matches any space, so the
space begins the next match. No alternative looks at the text before it. A step that splits pieces further keeps the
cut.

An added token is cut out of the text before the regex runs. No added token may contain a space or absorb adjacent
spaces. A text without spaces is not cut, and neither is any text if the tokenizer is of another kind.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import tokenizers

PART_CHARS = 1 << 15
PARTS_TOGETHER = 4 * (os.cpu_count() or 1)
"""Parts that are given to the library at once."""
_SEARCHED_CHARS = 1 << 20
_CUT = re.compile(r"[A-Za-z] (?=[A-Za-z])")
_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_FIRST = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ALTERNATIVES = frozenset({
    *_ENDINGS.split("|"), f"(?i:{_ENDINGS})", "'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+", rf"{_FIRST}?\p{{L}}+", rf"{_FIRST}?+\p{{L}}+", rf"{_FIRST}?[\p{{L}}\p{{M}}]+",
    rf"{_FIRST}?{_UPPER}*{_LOWER}+(?i:{_ENDINGS})?", rf"{_FIRST}?{_UPPER}+{_LOWER}*(?i:{_ENDINGS})?",
    r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"})  # fmt: skip
_ANY_SPACE = r"\s+"


def cuts(text: str) -> list[int]:
    """Return the positions at which parts of ``text`` begin; each part has at least PART_CHARS characters."""
    places = [0]
    while (cut := next_cut(text, places[-1] + PART_CHARS)) is not None:
        places.append(cut)
    return places


def next_cut(text: str, start: int) -> int | None:
    """Return the first position from ``start`` on at which ``text`` may be cut. The search goes in steps, so that other
    threads can run: without a cut it takes a third of a second and holds the interpreter's lock."""
    for position in range(start, len(text), _SEARCHED_CHARS):
        if cut := _CUT.search(text, position, position + _SEARCHED_CHARS + 2):
            return cut.start() + 1
    return None


def ids_of(encoding: tokenizers.Encoding) -> list[int]:
    ids: list[int] = encoding.ids
    return ids


class TextParts:
    """A tokenizer that encodes in parts. ``before`` and ``behind``: the special tokens that the tokenizer adds to every
    text."""

    def __init__(self, backend: tokenizers.Tokenizer, before: list[int], behind: list[int]) -> None:
        self._backend = backend
        self._before = before
        self._behind = behind

    def of(self, backend: tokenizers.Tokenizer) -> TextParts:
        """Return this encoder for ``backend``, which differs only in its added tokens."""
        return TextParts(backend, self._before, self._behind)

    def encode(
        self, text: str, *, add_special_tokens: bool, read: Callable[[tokenizers.Encoding], list[int]] = ids_of
    ) -> list[int]:
        """Return the ids of ``text``. ``read``: returns the ids of a part."""
        spans = list(itertools.pairwise([*cuts(text), len(text)]))
        ids = list(self._before) if add_special_tokens else []
        for first in range(0, len(spans), PARTS_TOGETHER):
            parts = [text[begin:end] for begin, end in spans[first : first + PARTS_TOGETHER]]
            for encoding in self._backend.encode_batch_fast(parts, add_special_tokens=False):
                ids += read(encoding)
        return ids + self._behind if add_special_tokens else ids


def text_parts(backend: tokenizers.Tokenizer) -> TextParts | None:
    """Return an encoder in parts; None for a tokenizer whose texts cannot be cut."""
    form = json.loads(backend.to_str())
    model, normalizer = form.get("model") or {}, form.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix"):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    if not _cuts_words(form.get("pre_tokenizer") or {}):
        return None
    for token in form.get("added_tokens") or ():
        if " " in token["content"] or any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            return None
    return None if (frame := frame_of(backend)) is None else TextParts(backend, *frame)


Frame = tuple[list[int], list[int]]
"""Special tokens that a tokenizer adds before and after every text."""
NO_FRAME: Frame = ([], [])


def frame_of(backend: tokenizers.Tokenizer) -> Frame | None:
    """Return the frame of a tokenizer; None if the special tokens depend on the text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return None


def _cuts_words(form: dict[str, Any]) -> bool:
    """Return whether a step splits by known alternatives and no step looks beyond a word."""
    splits = byte_level = False
    for step in form.get("pretokenizers", [form]):
        kind = step.get("type")
        if kind == "Split":
            pattern = step.get("pattern", {}).get("Regex")
            if pattern is None or step.get("behavior") not in ("Isolated", "Removed"):
                return False
            parts = alternatives(pattern)
            if not _ALTERNATIVES.issuperset(parts):
                return False
            splits = splits or _ANY_SPACE in parts
        elif kind == "ByteLevel":
            if step.get("add_prefix_space"):
                return False
            byte_level, splits = True, splits or bool(step.get("use_regex"))  # GPT-2's regex, which is built in
        elif kind != "Digits":
            return False
    return splits and byte_level


def alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regex: its parts between bars that are outside of brackets."""
    parts, part, depth, in_class, position = [], "", 0, False, 0
    while position < len(pattern):
        char = pattern[position]
        step = pattern[position : position + 2] if char == "\\" else char
        if char == "|" and not depth and not in_class:
            parts.append(part)
            step, part = "|", ""
        else:
            part += step
            in_class = (in_class or char == "[") and char != "]"
            depth += 0 if in_class else (char == "(") - (char == ")")
        position += len(step)
    return [*parts, part]
