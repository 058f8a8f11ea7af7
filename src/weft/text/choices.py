"""One sequence on its way to the client: events of tokens in, pieces of text out.

    TokenEvent --tokens--> IncrementalDetokenizer --text--> StopStrings --safe text--> Piece
                  \\--logprobs, ids-----------------(wait for their text)------------/

A piece leaves when it has text, or when the sequence ends. Tokens without text yet (half a character, the
possible start of a stop string) wait with their logprobs for the next piece that has some. So clients never
see an empty delta and lose no token.

The token that ends an answer (eos, stop_token_ids) counts as generated and is in ``tokens`` and
``logprobs``. Its text shows only if the request sets ``include_stop_str_in_output``. Stop strings count only
after ``min_tokens`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.errors import EngineUnavailableError, RequestError
from weft.request import FinishReason, LostTokens, SamplingParams, TokenEvent, TokenLogprobs
from weft.text.detokenize import IncrementalDetokenizer, TextDecoder
from weft.text.stop_strings import StopStrings


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
