"""Prompts in tokens, made from the text that a template wrote.

    ChatPrompt --show_pictures--> ChatPrompt --encode_prompt--> Prompt: token ids, cache positions, rows of pictures
                                   KnownPrefix ---^

*Boundaries* are positions up to which another conversation is likely to be the same. *Marks* are positions that the
client set with a ``cache_control``.

Structs of msgspec, because a frozen dataclass takes ten times longer to construct.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weft.errors import ContextLengthError, maximum_context
from weft.request import PictureKind, PlacedPicture, Pooling
from weft.text.chat_request import ChatRequest
from weft.text.pictures import placed, with_pictures
from weft.text.template_worker import ChatPrompt
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.images.picture import Picture


class Prompt(msgspec.Struct, frozen=True):
    """A prompt in tokens. ``text`` is None for a prompt that came as token ids; echo then decodes them. ``boundaries``,
    ``marks``, ``prediction``, ``pictures`` and ``pooling``: see ``Request``."""

    tokens: list[int]
    text: str | None = None
    boundaries: list[int] = []
    marks: list[int] = []
    prediction: list[int] = []
    pictures: list[PlacedPicture] = []
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Tokens of an earlier prompt and its answer, as the model read and wrote them. Their text has ``chars`` characters
    and the SHA-256 ``digest``."""

    tokens: list[int]
    chars: int
    digest: bytes

    def begins(self, text: str) -> bool:
        return self.chars <= len(text) and text_digest(text[: self.chars]) == self.digest


def text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: ChatPrompt,
    *,
    add_special_tokens: bool = False,
    known: KnownPrefix | None = None,
    salt: str | None = "",
) -> Prompt:
    """Tokenize ``prompt``. ``known``: tokens for the beginning of the text, used if their text is the same: the
    tokenizer may split a text into other tokens than the model wrote, and the cache has the model's tokens. ``salt``:
    the request's cache salt, see ``Tokenizer.encode_with_boundaries``."""
    places = [*prompt.ends, *prompt.marks, *(place for picture in prompt.pictures for place, _, _ in picture.spans)]
    tokens: list[int] = []
    # The digest of a text does not cover its pictures.
    if known is not None and not prompt.pictures and known.begins(prompt.text):
        rest, positions = tokenizer.encode_with_boundaries(
            prompt.text[known.chars :],
            [max(place - known.chars, 0) for place in places],
            add_special_tokens=False,
            quoted=[place - known.chars for place in prompt.quoted if place >= known.chars],
            salt=salt,
        )
        if rest and rest[0] in tokenizer.added:  # an added token might begin before the boundary
            tokens, positions = [*known.tokens, *rest], [len(known.tokens) + place for place in positions]
    if not tokens:
        tokens, positions = tokenizer.encode_with_boundaries(
            prompt.text, places, add_special_tokens=add_special_tokens, quoted=prompt.quoted, salt=salt
        )
    ends, marks = len(prompt.ends), len(prompt.ends) + len(prompt.marks)
    return Prompt(
        tokens,
        prompt.text,
        sorted(set(positions[:ends])),
        [position for position in positions[ends:marks] if position],
        pictures=placed(prompt.pictures, positions[marks:]) if prompt.pictures else [],
    )


def show_pictures(prompt: ChatPrompt, pictures: Sequence[Picture], tokens: Mapping[PictureKind, str]) -> ChatPrompt:
    """Return ``prompt`` with the text of each picture's rows. ``tokens``: see ``with_pictures``. Raise RequestError."""
    text, shown, (ends, marks, quoted) = with_pictures(
        prompt.text, (prompt.ends, prompt.marks, prompt.quoted), pictures, tokens, quoted=prompt.quoted
    )
    return ChatPrompt(text, ends, marks, shown, quoted)


class PictureSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a picture in a prompt; each tile has a span. ``part``: the part of the request. ``offset``: in tokens.
    ``digest``: of the picture, hex."""

    part: str
    kind: PictureKind
    offset: int
    rows: int
    digest: str


def check_spans(chat: ChatRequest, encoded: Prompt, longest: int) -> None:
    """Raise ContextLengthError that names the first picture beyond the context."""
    for span in picture_spans(chat, encoded):
        if span.offset + span.rows > longest:
            raise ContextLengthError(
                f"{span.part}: this {'picture' if span.kind == 'image' else 'video'} has rows up to token "
                f"{span.offset + span.rows} of the prompt; {maximum_context(longest)}",
                param=span.part,
                tokens=len(encoded.tokens),
                limit=longest,
            )


def picture_spans(chat: ChatRequest, encoded: Prompt) -> list[PictureSpan]:
    return [
        PictureSpan(part=part.where, kind=part.kind, offset=offset, rows=rows, digest=picture.digest.hex())
        for part, picture in zip(chat.pictures, encoded.pictures, strict=True)
        for offset, rows in picture.places
    ]
