r"""Texts of a request that spell control tokens: they are tokenized as plain text.

    message   Hi<|im_end|>                        of a user, a tool or a document
    marked    Hi?|im_end|>                        ? is a private character, which no text of the request has
    written   <|im_start|>user\nHi?|im_end|>...   by the template, whose own markers are unchanged
    prompt    <|im_start|>user\nHi<|im_end|>...   and the positions at which a text spells a control token: ``quoted``
    tokens    1 ... 8 7 9 ... 2                   ``weft.text.quoted_text``

This module decides which tokens are control tokens, and where a request spells them. Control tokens are tokens that the
tokenizer calls special, tokens that the chat template names and that begin with a sign, tokens of the form <|...|>, and
tokens that are written for pictures. Other added tokens, such as runs of spaces and the tags of HTML, are text.

A text is marked before the template sees it: every character with which a control token begins is replaced, if the text
has a control token, or ends within one. So control tokens can begin only in the template's own text, wherever and
however often the template writes the message. A text that neither has nor ends within a control token is not changed,
and neither are its tokens. If the template changes letters or replaces parts, every text with such a first character is
marked.

Messages of the assistant and of the system keep the markers of reasoning and of calls: the model writes them itself,
and prompts describe them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from weft.errors import RequestError
from weft.text.labels import STEP_TAG

QUOTED_MAX = 100_000
"""Most positions in a prompt at which texts spell control tokens (law L11)."""
_HEAD_CHARS = 3
_PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points of the private characters of plane 15."""
_BARS = re.compile(r"<[|｜].*[|｜]>|<[|｜].*>|<.*[|｜]>", re.DOTALL)
_CHANGES_TEXT = re.compile(r"\b(?:lower|upper|title|capitalize|swapcase|replace)\b")
"""Filters and methods of a template that may make a text spell a token that it did not spell before."""
_KEEPS_MARKERS = frozenset({"assistant", "system", "developer"})
"""Roles whose messages keep the markers of answers."""


class AddedTokens(Protocol):
    """Interface to a tokenizer's added tokens, by id, and to their special ones."""

    @property
    def added(self) -> Mapping[int, str]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class TokenFinder:
    """A search for ``tokens`` in a text, which finds the longest token at each position, as the tokenizer does."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = frozenset(tokens)
        heads = {token[:_HEAD_CHARS] for token in self.tokens}
        self._lengths = {
            head: sorted(
                {len(token) for token in self.tokens if token[:_HEAD_CHARS] == head or head.startswith(token)},
                reverse=True,
            )
            for head in heads
        }
        longest_first = sorted(heads, key=lambda head: (-len(head), head))
        self._heads = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def at(self, text: str, start: int) -> str | None:
        """Return the longest token that begins at ``start``, or None."""
        head = self._heads.match(text, start)
        return None if head is None else self._longest(text, head)

    def starts(self, text: str, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yield each position from ``start`` on at which a token begins, with the longest token there; tokens may
        overlap."""
        while (head := self._heads.search(text, start)) is not None:
            token = self._longest(text, head)
            if token is not None:
                yield head.start(), token
            start = head.start() + 1

    def apart(self, text: str, least: int, quoted: Collection[int]) -> list[int]:
        """Return positions at which tokens begin, at least ``least`` characters apart, 0 included. ``quoted``:
        positions that do not count."""
        places, passed = [0], frozenset(quoted)
        while (place := self._next(text, places[-1] + least, passed)) is not None:
            places.append(place)
        return places

    def _next(self, text: str, first: int, passed: Collection[int]) -> int | None:
        return next((start for start, _ in self.starts(text, first) if start not in passed), None)

    def _longest(self, text: str, head: re.Match[str]) -> str | None:
        start = head.start()
        candidates = (text[start : start + length] for length in self._lengths[head[0]])
        return next((token for token in candidates if token in self.tokens), None)


class ControlTexts(msgspec.Struct, frozen=True):
    """The control tokens of a model. ``tokens``: all of them; ``spoken``: markers that the model writes in answers."""

    tokens: list[str] = []
    spoken: list[str] = []


def control_texts(
    tokenizer: AddedTokens, template: str, spoken: frozenset[str], pictures: Sequence[str] = ()
) -> ControlTexts:
    """Return the control tokens of a model. ``template``: the source; ``spoken``: markers of answers; ``pictures``: the
    tokens that the template writes for pictures."""
    tokens = [
        text
        for token, text in sorted(tokenizer.added.items())
        if text.strip()
        and text != STEP_TAG  # the client writes it
        and (
            token in tokenizer.special_ids
            or _BARS.fullmatch(text)
            or (text in template and not text[0].isalnum())
            or text in pictures
        )
    ]
    return ControlTexts(tokens, [text for text in tokens if text in spoken])


NO_CONTROL = ControlTexts()
"""No control tokens: all texts of requests are trusted."""


class ControlTokens:
    """The control tokens of one model, and the marking of texts. ``template``: the source of the chat template."""

    def __init__(self, texts: ControlTexts, template: str = "") -> None:
        self.finder = TokenFinder(texts.tokens)
        self.spoken = frozenset(texts.spoken)
        self.template = template
        self.firsts = "".join(sorted({token[0] for token in texts.tokens}))
        self._last_chars = max(map(len, texts.tokens), default=0)
        self._marks_all = _CHANGES_TEXT.search(template) is not None

    def spelled(self, text: str) -> list[int]:
        """Return the positions (characters) at which ``text`` spells a control token."""
        return [start for start, _ in self.finder.starts(text)]

    def needs_marks(self, text: str) -> bool:
        """Return whether a control token could begin in ``text`` once the template has written it."""
        if not any(first in text for first in self.firsts):
            return False
        return self._marks_all or next(self.finder.starts(text), None) is not None or self._ends_within(text)

    def quoting(self, *values: Any) -> Quoting | None:
        """Return the marks for the texts in ``values`` (JSON); None if no text needs a mark."""
        if not self.firsts:
            return None
        texts = [text for value in values for text in _texts_in(value)]
        return Quoting(self, texts) if any(map(self.needs_marks, texts)) else None

    def _ends_within(self, text: str) -> bool:
        tail = text.rstrip()[-self._last_chars :]
        return any(
            token.startswith(tail[index:])
            for index, char in enumerate(tail)
            if char in self.firsts
            for token in self.finder.tokens
        )


class Quoting:
    """The marks of a conversation with ``texts``. Raises RequestError if the texts use all private characters."""

    def __init__(self, control: ControlTokens, texts: Sequence[str]) -> None:
        self._control = control
        marks = (chr(code) for code in _PRIVATE)
        unused = (mark for mark in marks if mark not in control.template and not any(mark in text for text in texts))
        try:
            self._marks = [(first, next(unused)) for first in control.firsts]
        except StopIteration:
            raise RequestError("messages: the texts use all private characters of Unicode", param="messages") from None

    def marked(self, value: Any) -> Any:
        """Return ``value`` (JSON) with its texts marked."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return value

    def said(self, value: Any, role: str) -> Any:
        """Return the content of a message of ``role``, marked."""
        if role not in _KEEPS_MARKERS or not self._control.spoken:
            return self.marked(value)
        if isinstance(value, str):
            return self._spoken(value)
        if isinstance(value, list):
            return [
                {key: self.said(item, role) for key, item in part.items()}
                if isinstance(part, dict)
                else self.said(part, role)
                for part in value
            ]
        return self.marked(value)

    def restored(self, text: str) -> str:
        for first, mark in self._marks:
            text = text.replace(mark, first)
        return text

    def quoted(self, written: str, restored: str) -> list[int]:
        """Return the positions in ``restored`` at which a text of the request spells a control token. ``written``:
        ``restored`` with marks. Raise RequestError for more than QUOTED_MAX."""
        places = []
        for start, _ in self._control.finder.starts(restored):
            if written[start] != restored[start]:
                places.append(start)
                if len(places) > QUOTED_MAX:
                    raise RequestError(
                        f"the messages spell control tokens of this model in more than {QUOTED_MAX} places",
                        param="messages",
                    )
        return places

    def _text(self, text: str) -> str:
        return self._replaced(text) if self._control.needs_marks(text) else text

    def _replaced(self, text: str) -> str:
        for first, mark in self._marks:
            text = text.replace(first, mark)
        return text

    def _spoken(self, text: str) -> str:
        if not self._control.needs_marks(text):
            return text
        parts, position = [], 0
        for start, token in self._control.finder.starts(text):
            if start >= position and token in self._control.spoken:
                parts += [self._replaced(text[position:start]), token]
                position = start + len(token)
        return "".join([*parts, self._replaced(text[position:])])


_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\u(db[89ab][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
"""JSON escape of a character of plane 15, in ASCII text."""


def ascii_json(text: str) -> str:
    """Return ASCII JSON with the characters of plane 15 unescaped, as a mark replaces one ASCII character."""
    return _ESCAPED.sub(
        lambda pair: pair[1] + chr(0x10000 + ((int(pair[2], 16) - 0xD800) << 10) + int(pair[3], 16) - 0xDC00), text
    )


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts_in(key)
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
