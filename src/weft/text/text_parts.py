"""Very long texts, tokenized part by part with the ids of the whole, on all cores.

    text   |---- part 1 ----|-margin-|
                         cut^---- part 2 ----|-margin-|        cut: between "...x" and " y..."
                                          cut^---- part 3 ...

The library tokenizes a text at once, on one core: its memory grows with the text (30 MB took 3 GB), and one
list of all ids is built while Python stands still. Parts keep both small, and several are encoded together.

A cut is right if tokens on either side do not depend on the other side. This holds for byte-level BPE whose
words come from a regex without look-behind: merges stay inside a word, and matching goes on from the end of
a match as if the text began there. So a cut is an end of a word, before a space and a letter.

*Guess and proof.* Cuts are guessed: a letter, a space, a letter. Each part is encoded from a guessed cut to
behind the next one; the margin is for the look-ahead of the regex. The first part begins where a word does.
If it shows the end of a word at the next cut, the second part begins where a word does, and so on. A guess
that a part does not confirm costs the parts behind it: the last end of a word in that part is the next cut.
A tokenizer of another kind, and a text without spaces, are not cut.

The proof needs the places of all tokens, which doubles the work of the library. The usual regexes need none:
they end a word at every guess (``weft.text.certain_words``). Then the words of plain pieces are looked up,
and the library gets the other pieces (``weft.text.word_ids``).

Rejected: cutting at newlines (runs of whitespace are one word); comparing ids around a cut (that shows one
place, and proves none).
"""

from __future__ import annotations

import itertools
import json
import os
import re
from typing import Any

import tokenizers

from weft.text.certain_words import cuts_certainly
from weft.text.word_ids import WordIds, word_ids

PART_CHARS = 1 << 15
PART_MARGIN_CHARS = 1 << 12
_PIECE_CHARS = 1 << 12
"""Of a part that is looked up: one unusual character sends no more than this to the library."""
_TOGETHER = 4 * (os.cpu_count() or 1)
"""Parts that the library gets at once."""
_GUESS = re.compile(r"[A-Za-z] (?=[A-Za-z])")
_GUESS_CHARS = 1 << 10
"""Before the largest end of a part, where a cut is looked for."""
_SPACE = "Ġ"
"""A space in the alphabet of byte-level BPE."""
_SIGNS_OF_CONTEXT = ("(?<", "\\G", "\\A", "\\b", "\\B", "^")
"""Of a regex that looks at what stands before a match."""


class TextParts:
    """``before`` and ``behind``: the special tokens that the tokenizer adds to every text. ``is_certain``: a
    guessed cut needs no proof. ``words``: of such a tokenizer, where they can be looked up."""

    def __init__(self, backend: tokenizers.Tokenizer, before: list[int], behind: list[int], *,
                 is_certain: bool, words: WordIds | None = None) -> None:
        self._backend = backend
        self._words = words
        self._is_certain = is_certain
        self._before = before
        self._behind = behind

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = list(self._before) if add_special_tokens else []
        start, is_cut = 0, True
        while is_cut and len(text) - start > PART_CHARS + PART_MARGIN_CHARS:
            cuts, guess_count = _guessed_cuts(text, start)
            if self._is_certain and guess_count:
                sure = [text[at:end] for at, end in itertools.pairwise(cuts[:guess_count + 1])]
                ids += self._sure_ids(sure)
                start = cuts[guess_count]
                continue
            spans = list(itertools.pairwise(cuts))
            parts = [text[at:end + PART_MARGIN_CHARS] for at, end in spans]
            encodings = self._backend.encode_batch(parts, add_special_tokens=False)
            for encoding, part, (at, end) in zip(encodings, parts, spans, strict=True):
                part_ids = encoding.ids
                count = self._tokens_before(encoding, part_ids, end - at)
                if not count:
                    count, chars = _cut(encoding, part)
                    start, is_cut = at + chars, bool(count)
                    ids += part_ids[:count]
                    break
                ids += part_ids[:count]
                start = end
        [encoding] = self._backend.encode_batch_fast([text[start:]], add_special_tokens=False)
        ids += encoding.ids
        return ids + self._behind if add_special_tokens else ids

    def _sure_ids(self, parts: list[str]) -> list[int]:
        """Of neighbouring parts that begin and end with words."""
        words, ids = self._words, list[int]()
        pieces = parts if words is None else [piece for part in parts for piece in _pieces(part)]
        looked_up = [None if words is None else words.look_up(piece) for piece in pieces]
        others = [piece for piece, own in zip(pieces, looked_up, strict=True) if own is None]
        encodings = iter(self._backend.encode_batch_fast(others, add_special_tokens=False))
        for own in looked_up:
            ids += next(encodings).ids if own is None else own
        return ids

    def _tokens_before(self, encoding: Any, ids: list[int], at: int) -> int:
        """How many tokens end at the cut before character ``at``, a space; 0 where no word ends."""
        count = encoding.char_to_token(at + 1)
        if not count or not str(self._backend.id_to_token(ids[count])).startswith(_SPACE):
            return 0
        words = encoding.token_to_word(count - 1), encoding.token_to_word(count)
        last = encoding.token_to_chars(count - 1)
        is_end = None not in words and words[0] != words[1] and last is not None and last[1] == at
        return count if is_end else 0


def _guessed_cuts(text: str, start: int) -> tuple[list[int], int]:
    """``start`` and the ends of the next parts, and how many of these are guesses: each before a space. An
    end without a guess is the last."""
    cuts, guess_count = [start], 0
    while len(cuts) <= _TOGETHER and len(text) - cuts[-1] > PART_CHARS + PART_MARGIN_CHARS:
        largest = cuts[-1] + PART_CHARS
        guesses = [guess.start() + 1 for guess in _GUESS.finditer(
            text, max(largest - _GUESS_CHARS, cuts[-1] + 1), largest + 2)]
        cuts.append(guesses[-1] if guesses else largest)
        if not guesses:
            break
        guess_count += 1
    return cuts, guess_count


def _pieces(part: str) -> list[str]:
    """``part``, cut where guesses are certain."""
    cuts = [0]
    while guess := _GUESS.search(part, cuts[-1] + _PIECE_CHARS):
        cuts.append(guess.start() + 1)
    return [part[at:end] for at, end in itertools.pairwise([*cuts, len(part)])]


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
    around = part[at - 1] + part[at + 1:at + 2]
    return len(around) == 2 and part[at] == " " and around.isascii() and around.isalpha()


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
            is_certain = cuts_certainly(form)
            return TextParts(backend, whole[:at], whole[at + len(plain):], is_certain=is_certain,
                             words=word_ids(backend, form) if is_certain else None)
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
