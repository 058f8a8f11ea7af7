"""Token ids of a text in which some added tokens are only spelled.

    text     <|im_start|>user\\nHi<|im_end|>...        quoted: the place of <|im_end|>
    marked   ?<|im_start|>user\\nHi<|im_end|>...       a noncharacter before each real added token
    twin     the same pieces, and ?<|im_start|>, ?<|im_end|>, ... as added tokens

This needs a second tokenizer, the *twin*. It shares normalizer, pre-tokenizer and model with the first tokenizer, so it
costs milliseconds and little memory; only the added tokens differ. The twin's ids of added tokens are above all ids of
the first tokenizer, and are mapped back. Runs of white space, and tokens that must be words (``single_word``), are
added unchanged.

The merges of a vocabulary may also produce a control token: if a text spells such a token, it is cut in two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import tokenizers

from weft.errors import RequestError
from weft.text.control_tokens import TokenFinder

MARKS = tuple(chr(plane + low) for plane in (0x10_0000, 0xF_0000, 0x1_0000) for low in (0xFFFE, 0xFFFF))
"""Noncharacters: the mark of a text is the first that the text does not contain."""
_SPACES = "▁"


class QuotedText:
    """The twin tokenizer for texts that spell added tokens. ``backend``: the first tokenizer; ``mark``: a character
    that the texts do not contain; ``letters``: the letters of bytes, if the pieces consist of these."""

    def __init__(
        self, backend: tokenizers.Tokenizer, finder: TokenFinder, mark: str, *, letters: Mapping[int, str] | None = None
    ) -> None:
        self.mark = mark
        self._letters = letters
        self._finder = finder
        self.twin = twin = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(twin, part, getattr(backend, part))
        added = backend.get_added_tokens_decoder()
        twin.add_tokens([tokenizers.AddedToken(f"{mark}{mark}{number}") for number in range(len(added))])
        self._ids: dict[int, int] = {}
        for index, token in sorted(added.items()):
            renamed = token.content in finder.tokens
            text = mark + token.content if renamed else token.content
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            twin.add_tokens(
                [
                    tokenizers.AddedToken(
                        text, normalized=token.normalized and not renamed, special=token.special, **flags
                    )
                ]
            )
            own_id = twin.token_to_id(text)
            assert own_id is not None
            self._ids[own_id] = index
        unknown = {getattr(backend.model, "unk_token", None), "<unk>", "[UNK]"}
        self._spellable = {
            index: token.content
            for index, token in added.items()
            if token.content in finder.tokens and token.content not in unknown
        }
        """Added tokens that the model's merges can produce, by id."""

    def marked(self, text: str, quoted: Collection[int]) -> tuple[str, list[int]]:
        """Return the text with marks, and the positions in ``text`` before which they were inserted."""
        places, position = [], 0
        for start, token in self._finder.starts(text):
            if start >= position and start not in quoted:
                places.append(start)
                position = start + len(token)
        parts = [text[first:last] for first, last in pairwise([0, *places, len(text)])]
        return self.mark.join(parts), places

    def read(self, encoding: tokenizers.Encoding) -> tuple[list[int], list[int] | None]:
        """Return the tokenizer's ids for the twin's ids, and for each token of ``encoding`` the number of ids before it
        (None if both have the same number of ids)."""
        ids: list[int] = encoding.ids
        if self._spellable.keys().isdisjoint(ids):
            return [self._ids.get(index, index) for index in ids], None
        out: list[int] = []
        counts = []
        for index, is_template in zip(ids, encoding.special_tokens_mask, strict=True):
            counts.append(len(out))
            if index in self._spellable and not is_template:  # added by the post-processor
                out += self._cut(self._spellable[index])
            else:
                out.append(self._ids.get(index, index))
        return out, [*counts, len(out)]

    def _cut(self, text: str) -> list[int]:
        """Return ids of at least two pieces that make up ``text``."""
        model: Any = self.twin.model
        parts = [part for part in (text[:1], text[1:]) if part]
        if self._letters:
            parts = ["".join(self._letters[byte] for byte in part.encode()) for part in parts]
        return [token.id for part in parts for token in model.tokenize(part)]


def moved(place: int, marks: Sequence[int]) -> int:
    """Return the position of ``place`` after a mark was inserted before each of ``marks``. The mark of a token belongs
    to the token."""
    return place + bisect_left(marks, place)


def quotable(added: Iterable[tokenizers.AddedToken]) -> TokenFinder:
    """Return a finder of the added tokens that a text can spell."""
    return TokenFinder(
        [token.content for token in added if token.content.strip().strip(_SPACES) and not token.single_word]
    )


def unused_mark(text: str) -> str:
    """Return a noncharacter that ``text`` does not contain. Raise RequestError if there is none."""
    mark = next((mark for mark in MARKS if mark not in text), None)
    if mark is None:
        raise RequestError("the text has noncharacters of Unicode, and spells control tokens of this model")
    return mark
