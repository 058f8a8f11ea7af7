"""Token ids to text, one step at a time, never half a character.

A token of a byte-level vocabulary is bytes, not characters: "é" may arrive as two tokens, and decoding
the first alone gives U+FFFD. And a token's text can depend on its neighbour (a leading space that is
dropped at the start of a text). So a short window of ids is decoded, and what it adds is emitted:

    window   [ a  b  c  d | e  f ]
               shown        pending       text(window) minus what is shown, while it does not end in U+FFFD

The shown part keeps the first pending token from looking like the start of a text. When the window is
long, it is cut where the last emitted piece began, a place where characters begin; so the work per token
is one decode of a few ids (and a second every few tokens), whatever the length of the answer.

Text that ends in U+FFFD is held: it may be a character in the making. What stays undecodable for
``HELD_TOKENS_MAX`` tokens (a model that emits broken bytes) is let go as it is, so the window is bounded
(law L11). For byte-level tokenizers the pieces joined are the text of all ids decoded at once. A decoder that
says so (``joins_bytes``) gets the ids of one push together, unless some of their bytes are broken.

Rejected: ``tokenizers.decoders.DecodeStream`` (0.5 us for a token instead of 1.6, and the same text where all
bytes are sound). It never lets broken bytes go: 2,000 of them give no text and take quadratic time (0.29 s,
law L11). It has no flush, so a broken last character is lost. It cannot leave chosen special tokens in the
text (``ShowingDecoder``).

Rejected too: decoding the whole answer at each token (quadratic); mapping tokens to bytes here (it would need
to know every kind of decoder that a ``tokenizer.json`` can describe).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

HALF = "\ufffd"
"""U+FFFD, what a decoder writes for bytes that are not (yet) a character."""

HELD_TOKENS_MAX = 16
"""A character has at most 4 bytes, hence at most 4 tokens; beyond this many the bytes are just broken."""

SHOWN_TOKENS_MAX = 8
"""The window is cut when more than this many of its tokens are shown."""


class TextDecoder(Protocol):
    """An attribute ``joins_bytes`` that is true says that the bytes of a text are those of its tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``, as the tokenizer decodes them together."""
        ...


class IncrementalDetokenizer:
    """One per sequence. ``context``: the prompt's last ids, so that an answer that continues a word is
    not decoded as the start of a text; only the last few are used, and they are never emitted."""

    __slots__ = ("_decoder", "_joins_bytes", "_piece_start", "_shown_chars", "_shown_tokens", "_skip",
                 "_window")

    def __init__(self, decoder: TextDecoder, *, skip_special_tokens: bool = True,
                 context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._joins_bytes = bool(getattr(decoder, "joins_bytes", False))
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._shown_tokens = 0
        self._shown_chars = 0
        self._piece_start = 0
        """Where in the window the last emitted piece began."""
        if context:
            self._restart(list(context[-SHOWN_TOKENS_MAX:]))

    def push(self, ids: Sequence[int]) -> str:
        """New ids -> the text they complete; empty while a character is in the making."""
        if len(ids) > 1 and self._joins_bytes:
            together = self._pushed_together(ids)
            if together is not None:
                return together
        out: list[str] = []
        for token in ids:
            self._window.append(token)
            text = self._decoder.decode(self._window, self._skip)
            broken = text.endswith(HALF)
            too_long = len(self._window) - self._shown_tokens > HELD_TOKENS_MAX
            if broken and not too_long:
                continue
            if len(text) > self._shown_chars:
                out.append(text[self._shown_chars:])
                self._show(text, broken)
            elif too_long:
                del self._window[self._shown_tokens:]  # special tokens that are skipped: never any text
        return "".join(out)

    def _pushed_together(self, ids: Sequence[int]) -> str | None:
        """None where a character is broken, or not complete."""
        window = [*self._window, *ids]
        text = self._decoder.decode(window, self._skip)[self._shown_chars:]
        if HALF in text:
            return None
        self._restart(window[-SHOWN_TOKENS_MAX:])
        return text

    def flush(self) -> str:
        """The answer is over: whatever is still held, a broken last character as U+FFFD."""
        if len(self._window) == self._shown_tokens:
            return ""
        text = self._decoder.decode(self._window, self._skip)
        piece = text[self._shown_chars:]
        self._show(text, broken=True)
        return piece

    def _show(self, text: str, broken: bool) -> None:
        if broken:
            self._restart([])  # what follows cannot be a continuation of this
            return
        self._piece_start = self._shown_tokens
        self._shown_tokens = len(self._window)
        self._shown_chars = len(text)
        if self._shown_tokens > SHOWN_TOKENS_MAX:
            self._restart(self._window[self._piece_start:])

    def _restart(self, window: list[int]) -> None:
        text = self._decoder.decode(window, self._skip) if window else ""
        if text.endswith(HALF):
            # A prompt that ends inside a character is no context: its text would change with the answer.
            window, text = [], ""
        self._window = window
        self._shown_tokens = len(window)
        self._shown_chars = len(text)
        self._piece_start = 0
