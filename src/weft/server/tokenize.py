"""Tokenizing for clients: how many characters at once, over all requests (law L11), and /tokenize's answer.

    with budget.spending(len(text)): tokenize in a thread

Tokenizing takes about a second of a core for each megabyte, and its threads share the cores with the engine.
A text that is larger than the whole budget is a 413; one that finds no room beside others is a 503. Short
texts, which are tokenized at once, are not counted.

``tokenize_answer`` encodes its lists in pieces of some milliseconds and serves others in between: the encoder
would hold the event loop for as long as a list is long. Rejected: a thread (its heap gives memory back late).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.errors import QueueFullError, RequestError

if TYPE_CHECKING:
    from weft.server.service import ServedModel


class TextTooLongError(RequestError):
    """The text is over limits.max_tokenize_chars."""

    status = 413


class TokenizeBudget:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    @contextlib.contextmanager
    def spending(self, count: int) -> Iterator[None]:
        """Raises TextTooLongError, QueueFullError."""
        if count > self._limit:
            raise TextTooLongError(f"the text has {count} characters; the limit is {self._limit} "
                                   "(limits.max_tokenize_chars)", param="prompt", code="text_too_long")
        if self._spent + count > self._limit:
            raise QueueFullError(f"{self._spent} characters of other requests are being tokenized, and this "
                                 f"text has {count}; the limit is {self._limit} "
                                 "(limits.max_tokenize_chars). Try "
                                 "again later", param="limits.max_tokenize_chars", code="queue_full")
        self._spent += count
        try:
            yield
        finally:
            self._spent -= count


PIECE_TOKENS = 4096


async def tokenize_answer(model: ServedModel, tokens: list[int], *, with_texts: bool) -> bytes:
    def texts_of(part: Sequence[int]) -> list[str]:
        return [model.tokenizer.token_text(token) for token in part]

    texts = await _listed(tokens, texts_of) if with_texts else b"null"
    return b"".join((b'{"count":%d,"max_model_len":%d,"tokens":' % (len(tokens), model.info.max_model_len),
                     await _listed(tokens, list), b',"token_strs":', texts, b"}"))


async def _listed(tokens: list[int], values_of: Callable[[Sequence[int]], Sequence[object]]) -> bytes:
    parts = []
    for at in range(0, len(tokens), PIECE_TOKENS):
        parts.append(msgspec.json.encode(values_of(tokens[at:at + PIECE_TOKENS]))[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"
