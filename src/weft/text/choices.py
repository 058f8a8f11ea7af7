r"""One sequence on its way to the client: events of tokens in, pieces of text out.

    TokenEvent --tokens--> IncrementalDetokenizer --text--> StopStrings --safe text--> Piece
                  \--logprobs, ids-----------------(wait for their text)------------/

    window   [ a  b  c  d | e  f ]
               shown        pending       text(window) minus what is shown, while it does not end in U+FFFD

A piece leaves when it has text, or when the sequence ends. Tokens without text yet (half a character, the
possible start of a stop string) wait with their logprobs. So clients never see an empty delta and lose no
token. The token that ends an answer counts as generated; its text shows only if the request sets
``include_stop_str_in_output``. Stop strings count only after ``min_tokens`` tokens.

A token of a byte-level vocabulary is bytes, not characters: "é" may arrive as two tokens, and decoding the
first alone gives U+FFFD. And a token's text can depend on its neighbour. So a short window of ids is decoded,
and what it adds is emitted. When the window is long, it is cut where the last emitted piece began. So the
work per token is one decode of a few ids, whatever the length of the answer. What stays undecodable for
``HELD_TOKENS_MAX`` tokens is let go as it is (law L11). The pieces joined are the text of all ids decoded at
once. A decoder that says so (``joins_bytes``) gets the ids of one push together, unless some of their bytes
are broken.

Rejected: ``tokenizers.decoders.DecodeStream`` (0.5 us for a token instead of 1.6). It never lets broken bytes
go: 2,000 of them give no text and take quadratic time. It has no flush, and it cannot leave chosen special
tokens in the text (``ShowingDecoder``). Rejected too: decoding the whole answer at each token (quadratic);
mapping tokens to bytes here (it would need to know every decoder of a ``tokenizer.json``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.errors import EngineUnavailableError, RequestError
from weft.request import FinishReason, LostTokens, SamplingParams, TokenEvent, TokenLogprobs
from weft.text.stop_strings import StopStrings

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


@dataclass(slots=True)
class Piece:
    """What one choice gained. ``finish_reason`` is set on the last piece of a choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Choice:
    """``index`` is the choice's place in the response; ``prompt_tokens`` the prompt it continues."""

    def __init__(self, index: int, decoder: TextDecoder, sampling: SamplingParams,
                 prompt_tokens: Sequence[int]) -> None:
        self.index = index
        self.finished = False
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.lost_tokens = LostTokens()
        self.recomputed_tokens = 0
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._sampling = sampling
        self._text = IncrementalDetokenizer(decoder, skip_special_tokens=sampling.skip_special_tokens,
                                            context=prompt_tokens)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self._waiting = Piece(index)

    @property
    def stopped_by_text(self) -> bool:
        """The text met a stop string: the caller cancels the sequence in the engine."""
        return self._stops.stopped is not None

    def take(self, event: TokenEvent) -> Piece | None:
        """Raises EngineUnavailableError when the engine gave the sequence up, RequestError when its grammar
        did."""
        if self.finished:
            return None
        if event.finish_reason == "cancelled":
            raise EngineUnavailableError(event.error or "the request was cancelled by the server")
        if event.own_fault:
            grammar = self._sampling.grammar
            raise RequestError(event.error or "the answer failed", param=grammar.field if grammar else None,
                               code="invalid_grammar")
        if event.finish_reason == "error":
            raise EngineUnavailableError(event.error or "the engine failed")
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self.lost_tokens = event.lost or self.lost_tokens
        self.recomputed_tokens = event.recomputed_tokens
        self.accepted_drafts = max(self.accepted_drafts, event.accepted_drafts)
        self.rejected_drafts = max(self.rejected_drafts, event.rejected_drafts)
        if event.prompt_logprobs:
            self.prompt_logprobs.extend(event.prompt_logprobs)
        token_count = self._take_tokens(event)
        waiting = self._waiting
        waiting.tokens.extend(event.tokens[:token_count])
        if event.logprobs:
            waiting.logprobs.extend(event.logprobs[:token_count])
        if self.stopped_by_text:
            return self._finish("stop", self._stops.stopped)
        if event.finish_reason is not None:
            waiting.text += self._show(self._text.flush())
            if self.stopped_by_text:
                return self._finish("stop", self._stops.stopped)
            waiting.text += self._stops.flush()
            return self._finish(event.finish_reason, event.stop_reason)
        return self._release() if waiting.text else None

    def _take_tokens(self, event: TokenEvent) -> int:
        """Feeds the event's tokens one by one up to a stop string; how many belong to the answer."""
        last_is_hidden = event.finish_reason == "stop" and not self._sampling.include_stop_str_in_output
        if not self._sampling.stop:
            self.generated_tokens += len(event.tokens)
            self._waiting.text += self._text.push(event.tokens[:-1] if last_is_hidden else event.tokens)
            return len(event.tokens)
        for position, token in enumerate(event.tokens):
            self.generated_tokens += 1
            if last_is_hidden and position == len(event.tokens) - 1:
                continue
            self._waiting.text += self._show(self._text.push((token,)))
            if self.stopped_by_text:
                return position + 1
        return len(event.tokens)

    def _show(self, text: str) -> str:
        if not text or self.generated_tokens <= self._sampling.min_tokens:
            return text
        return self._stops.push(text)

    def _release(self) -> Piece:
        piece, self._waiting = self._waiting, Piece(self.index)
        return piece

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> Piece:
        self.finished = True
        piece = self._release()
        piece.finish_reason, piece.stop_reason = reason, stop_reason
        return piece
