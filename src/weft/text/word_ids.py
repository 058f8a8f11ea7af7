r"""Ids of usual words, looked up: what a tokenizer's regex splits and its BPE merges, without the library.

    text of a part  --regex-->  words  --dict-->  ids
                                  |  a word that is not known
                                  '--> byte-level alphabet --> BPE model of the library --> ids

Nine tenths of the library's time for a text go into its regex and its lists of places (``benchmarks.
tokenize_rate``). BPE never looks beyond a word, so the ids of a word are those of the last time.

A part is looked up if both regex engines surely mean the same: printable ASCII, tabs and ends of lines. There
letters, digits, spaces and cases have one meaning, so ``\p{L}`` is A-Z and a-z. The regex has alternatives of
``weft.text.certain_words`` alone, and its words have to cover the part. A part with an added token, or with
other characters, goes to the library.

At most WORDS_MAX words of at most WORD_CHARS_MAX characters are known; then the dictionary begins anew (L11).

Rejected: parts of all Unicode (tables of letters differ by version, and ``re`` has none); the library's own
cache (it comes behind the regex, where little time goes).
"""

from __future__ import annotations

import itertools
import re
import string
from typing import Any

import tokenizers

WORDS_MAX = 1 << 17
WORD_CHARS_MAX = 64
_ASCII = string.printable.replace("\v", "").replace("\f", "").encode()
_BUILT_IN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regex of a ByteLevel step (GPT-2's)."""
_CLASSES = {r"\p{L}": "A-Za-z", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{N}": "0-9", r"\p{Lt}": "",
            r"\p{Lm}": "", r"\p{Lo}": "", r"\p{M}": ""}
_CLASS = re.compile(r"\\p\{\w+\}")


def _alphabet() -> dict[int, str]:
    """ASCII -> characters of byte-level BPE: those that cannot be seen are moved behind 255."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return {byte: chr(256 + place) for place, byte in enumerate(hidden) if byte < 128}


def ascii_pattern(pattern: str) -> str:
    """``pattern`` for texts of ASCII alone, in the language of ``re``."""
    out, in_class, at = "", False, 0
    while at < len(pattern):
        if named := _CLASS.match(pattern, at):
            chars = _CLASSES[named.group()]
            out += chars if in_class else f"[{chars}]"
            at = named.end()
            continue
        step = pattern[at:at + 2] if pattern[at] == "\\" else pattern[at]
        in_class = (in_class or step == "[") and step != "]"
        out += step
        at += len(step)
    return out


class WordIds:
    """Of a tokenizer of which ``cuts_certainly`` holds."""

    def __init__(self, backend: tokenizers.Tokenizer, pattern: str, added: list[str]) -> None:
        self._model = backend.model
        self._words = re.compile(ascii_pattern(pattern), re.ASCII)
        self._added: dict[str, list[str]] = {}
        for content in added:
            self._added.setdefault(content[:2], []).append(content)
        self._known: dict[str, list[int]] = {}
        self._alphabet = _alphabet()

    def look_up(self, part: str) -> list[int] | None:
        """The ids of ``part``, which begins and ends with a word. None where the library has to tokenize."""
        if not part.isascii() or part.encode("ascii").translate(None, _ASCII):
            return None
        if any(prefix in part and any(content in part for content in contents)
               for prefix, contents in self._added.items()):
            return None
        words: list[str] = self._words.findall(part)
        if sum(map(len, words)) != len(part):
            return None
        known = self._known
        try:
            return list(itertools.chain.from_iterable(map(known.__getitem__, words)))
        except KeyError:
            self._learn(set(words).difference(known))
            return [token for word in words for token in (known.get(word) or self._ids(word))]

    def _learn(self, words: set[str]) -> None:
        if len(self._known) + len(words) > WORDS_MAX:
            self._known.clear()
        self._known.update((word, self._ids(word)) for word in words if len(word) <= WORD_CHARS_MAX)

    def _ids(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word.translate(self._alphabet))]


def word_ids(backend: tokenizers.Tokenizer, form: dict[str, Any]) -> WordIds | None:
    """``form``: a tokenizer.json of which ``cuts_certainly`` holds. None for steps of another kind than one
    regex and the byte-level alphabet."""
    step = form["pre_tokenizer"]
    match step.get("pretokenizers", [step]):
        case [{"type": "ByteLevel", "use_regex": True}]:
            pattern = _BUILT_IN
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
              {"type": "ByteLevel", "use_regex": False}]:
            pass
        case _:
            return None
    return WordIds(backend, pattern, [token["content"] for token in form.get("added_tokens") or ()])
