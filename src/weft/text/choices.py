r"""Conversion of the token events of one sequence to pieces of text for the client.

    TokenEvent --tokens--> IncrementalDetokenizer --text--> StopStrings --safe text--> Piece
                  \--logprobs, ids-----------------(wait for their text)------------/

    window   [ a  b  c  d | e  f ]
               shown        pending       text(window) minus the shown text, while it does not end in U+FFFD

A piece is sent when it has text, or when the sequence ends. Tokens without text yet (half a character, the possible
start of a stop string) wait, with their logprobs. So clients never get an empty delta and lose no token. The token that
ends an answer counts as generated; its text shows only if the request sets ``include_stop_str_in_output``. Stop strings
count only after ``min_tokens`` tokens.

A token of a byte-level vocabulary is bytes, not characters: "é" may arrive as two tokens, and decoding only the first
gives U+FFFD. A token's text can also depend on its neighbour. So a short window of ids is decoded, and the added
characters are emitted. When the window gets long, it is cut where the last emitted piece began. The work per token is
then one decode of a few ids, whatever the length of the answer. Bytes that stay undecodable for ``HELD_TOKENS_MAX``
tokens are emitted as they are (law L11). The pieces joined are the text of all ids decoded at once. A decoder with
``joins_bytes`` gets the ids of one push together, unless some of their bytes are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from weft.errors import EngineUnavailableError, RequestError
from weft.request import FinishReason, LostTokens, SamplingParams, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer


class StopStrings:
    """A stream of text, cut at the first of several stop strings. The first stop string is the one whose *end* comes
    first; if several end together, the longest. ``include``: whether the stop string stays in the text. After a match
    ``stopped`` is the stop string, and further text is dropped.

    There is one KMP automaton per stop string. The state is the length of the longest suffix of the text that is a
    prefix of the stop string: exactly the text to hold back. So the work per character is constant, and the result does
    not depend on how the text was cut into pieces.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "stopped")

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """Build the automatons. Raise ValueError for an empty stop string (``SamplingParams.check`` refuses it
        earlier)."""
        # Longest first, so that the first match found is the longest of those that end together.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        if any(not stop for stop in self._stops):
            raise ValueError("a stop string is empty")
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add new text of the answer, and return the text (of this and earlier pieces) that is now safe to show."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        first_new = len(self._held)
        for index in range(first_new, len(pending)):
            matched = self._advance(pending[index])
            if matched is not None:
                self.stopped, self._held = matched, ""
                end = index + 1
                return pending[:end] if self._include else pending[: end - len(matched)]
        safe = len(pending) - max(self._states)
        self._held = pending[safe:]
        return pending[:safe]

    def skip(self, text: str) -> str:
        """Return ``text``, in which no stop string counts."""
        return text

    def flush(self) -> str:
        """End the answer, and return the text that was held back for a stop string that never came."""
        pending, self._held = self._held, ""
        return pending

    @property
    def held_chars(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def _advance(self, char: str) -> str | None:
        for which, stop in enumerate(self._stops):
            state = self._states[which]
            failure = self._failures[which]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            self._states[which] = state
            if state == len(stop):
                return stop
        return None


class Stops(Protocol):
    """Interface to the stop strings of one answer, as ``StopStrings``."""

    @property
    def stopped(self) -> str | None: ...

    def push(self, text: str) -> str: ...

    def skip(self, text: str) -> str: ...

    def flush(self) -> str: ...


def stop_strings(sampling: SamplingParams) -> StopStrings:
    """Return the stop strings of a request, which count in all of the answer's text."""
    return StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)


@lru_cache(maxsize=256)
def _failure_table(stop: str) -> Sequence[int]:
    """Return KMP's table: for each prefix of ``stop``, the length of its longest proper prefix that is also its
    suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table


def held_characters(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return position and text of the first of ``markers`` in ``text``; if several begin there, the longest."""
    best: tuple[int, str] | None = None
    for marker in markers:
        position = text.find(marker)
        if position >= 0 and (
            best is None or position < best[0] or (position == best[0] and len(marker) > len(best[1]))
        ):
            best = position, marker
    return best


def may_become(text: str, markers: Iterable[str]) -> bool:
    """Return whether more text could make ``text`` begin with one of ``markers``."""
    return any(marker.startswith(text) and marker != text for marker in markers)


HALF = "\ufffd"
"""U+FFFD, which decoders write for bytes that are not (yet) a character."""

HELD_TOKENS_MAX = 16
"""Most tokens that are held for a character: it has at most 4 bytes, hence at most 4 tokens; beyond 16 the bytes are
broken."""

SHOWN_TOKENS_MAX = 8
"""Most shown tokens in the window before it is cut."""


class TextDecoder(Protocol):
    """A decoder of ids. If it has an attribute ``joins_bytes`` that is true, the bytes of a text are the joined bytes
    of its tokens, and ``lone_text`` returns the text of a single one."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return text of ``ids``, as the tokenizer decodes them together."""


class ShowingDecoder:
    """A decoder that skips only ``hidden`` tokens of ``tokenizer``."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.joins_bytes = tokenizer.joins_bytes

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._hidden]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def lone_text(self, token: int, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens and token in self._hidden:
            return ""
        return self._tokenizer.lone_text(token, skip_special_tokens=False)


def showing(tokenizer: Tokenizer, ids: frozenset[int]) -> TextDecoder:
    """Return a decoder that leaves the special tokens ``ids`` in the text when it skips the others."""
    return ShowingDecoder(tokenizer, tokenizer.special_ids - ids) if ids else tokenizer


class IncrementalDetokenizer:
    """A detokenizer of one sequence. ``context``: the prompt's last ids, so that an answer that continues a word is not
    decoded as the start of a text; only the last few are used, and their text is never emitted. They are decoded
    together with the first new ids, so that preparing a request decodes nothing."""

    __slots__ = (
        "_context",
        "_decoder",
        "_joins_bytes",
        "_lone_text",
        "_piece_start",
        "_shown_chars",
        "_shown_tokens",
        "_skip",
        "_window",
    )

    def __init__(self, decoder: TextDecoder, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._joins_bytes = bool(getattr(decoder, "joins_bytes", False))
        self._lone_text: Callable[[int, bool], str] | None = getattr(decoder, "lone_text", None)
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._shown_tokens = 0
        self._shown_chars = 0
        self._piece_start = 0
        """Index in the window at which the last emitted piece began."""
        self._context = list(context[-SHOWN_TOKENS_MAX:])

    def push(self, ids: Sequence[int]) -> str:
        """Add new ids, and return the text that they complete; empty while a character is incomplete."""
        if self._context:
            self._restart(self._context)
            self._context = []
        if len(ids) > 1 and self._joins_bytes:
            together = self._pushed_together(ids)
            if together is not None:
                return together
        out: list[str] = []
        for token in ids:
            if self._joins_bytes and self._lone_text is not None and len(self._window) == self._shown_tokens:
                text = self._lone_text(token, self._skip)  # no bytes wait for those of this token
                if HALF not in text:
                    out.append(text)
                    if self._window:
                        self._restart([])
                    continue
            self._window.append(token)
            text = self._decoder.decode(self._window, self._skip)
            broken = text.endswith(HALF)
            too_long = len(self._window) - self._shown_tokens > HELD_TOKENS_MAX
            if broken and not too_long:
                continue
            if len(text) > self._shown_chars:
                out.append(text[self._shown_chars :])
                self._show(text, broken)
            elif too_long:
                del self._window[self._shown_tokens :]  # skipped special tokens have no text
        return "".join(out)

    def _pushed_together(self, ids: Sequence[int]) -> str | None:
        """Return the text of ``ids``, decoded from their bytes; None if a character is broken or incomplete."""
        window = [*self._window, *ids]
        text = self._decoder.decode(window, self._skip)[self._shown_chars :]
        if HALF in text:
            return None
        self._restart(window[-SHOWN_TOKENS_MAX:])
        return text

    def flush(self) -> str:
        """End the answer, and return the text that is still held back, a broken last character as U+FFFD."""
        if len(self._window) == self._shown_tokens:
            return ""
        text = self._decoder.decode(self._window, self._skip)
        piece = text[self._shown_chars :]
        self._show(text, broken=True)
        return piece

    def _show(self, text: str, broken: bool) -> None:
        if broken:
            self._restart([])  # the next tokens cannot continue this text
            return
        self._piece_start = self._shown_tokens
        self._shown_tokens = len(self._window)
        self._shown_chars = len(text)
        if self._shown_tokens > SHOWN_TOKENS_MAX:
            self._restart(self._window[self._piece_start :])

    def _restart(self, window: list[int]) -> None:
        text = self._decoder.decode(window, self._skip) if window else ""
        if text.endswith(HALF):
            # A prompt that ends inside a character gives no context: its text would change with the answer.
            window, text = [], ""
        self._window = window
        self._shown_tokens = len(window)
        self._shown_chars = len(text)
        self._piece_start = 0


@dataclass(slots=True)
class Piece:
    """New tokens and text of one choice. ``finish_reason`` is set on the last piece of a choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Choice:
    """One answer of a request. ``index`` is the choice's index in the response; ``prompt_tokens`` the prompt it
    continues. ``stops``: its stop strings, if they do not count in all of the text."""

    def __init__(
        self,
        index: int,
        decoder: TextDecoder,
        sampling: SamplingParams,
        prompt_tokens: Sequence[int],
        stops: Stops | None = None,
    ) -> None:
        self.index = index
        self.finished = False
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.lost_tokens = LostTokens()
        self.recomputed_tokens = 0
        self.weight_version = ""
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.pooled = b""
        """Result of ``Request.pooling``."""
        self._sampling = sampling
        self._text = IncrementalDetokenizer(
            decoder, skip_special_tokens=sampling.skip_special_tokens, context=prompt_tokens
        )
        self._stops: Stops = stop_strings(sampling) if stops is None else stops
        self._waiting = Piece(index)

    @property
    def stopped_by_text(self) -> bool:
        """Whether the text reached a stop string: the caller then cancels the sequence in the engine."""
        return self._stops.stopped is not None

    def take(self, event: TokenEvent) -> Piece | None:
        """Return the piece of an event, if any. Raise EngineUnavailableError if the engine gave up the sequence,
        RequestError if the grammar ended it."""
        if self.finished:
            return None
        if event.finish_reason == "cancelled":
            raise EngineUnavailableError(event.error or "the request was cancelled by the server")
        if event.own_fault:
            grammar = self._sampling.grammar
            raise RequestError(
                event.error or "the answer failed", param=grammar.field if grammar else None, code="invalid_grammar"
            )
        if event.finish_reason == "error":
            raise EngineUnavailableError(event.error or "the engine failed")
        if event.cached_tokens > self.cached_tokens:
            self.cached_tokens = event.cached_tokens
        self.lost_tokens = event.lost or self.lost_tokens
        self.recomputed_tokens = event.recomputed_tokens
        self.weight_version = event.weight_version
        if event.accepted_drafts or event.rejected_drafts:
            self.accepted_drafts = max(self.accepted_drafts, event.accepted_drafts)
            self.rejected_drafts = max(self.rejected_drafts, event.rejected_drafts)
        self.pooled = event.pooled or self.pooled
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
            if self.stopped_by_text:
                return self._finish("stop", self._stops.stopped)
            return self._finish(event.finish_reason, event.stop_reason)
        return self._release() if waiting.text else None

    def _take_tokens(self, event: TokenEvent) -> int:
        """Feed the event's tokens one by one up to a stop string; return how many belong to the answer."""
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
        if not text:
            return text
        return self._stops.skip(text) if self.generated_tokens <= self._sampling.min_tokens else self._stops.push(text)

    def _release(self) -> Piece:
        piece, self._waiting = self._waiting, Piece(self.index)
        return piece

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> Piece:
        self.finished = True
        piece = self._release()
        piece.finish_reason, piece.stop_reason = reason, stop_reason
        return piece
