"""The answer of /tokenize as JSON, in pieces where it is long.

    5,000,000 tokens --PIECE_TOKENS at a time, in a thread--> 1, 2, 3 ...  joined

The encoder holds the interpreter's lock for as long as its list is long, and texts of tokens take a
microsecond each. Pieces of a millisecond or two let the event loop serve others in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from weft.server.service import ServedModel

PIECE_TOKENS = 65_536


async def tokenize_answer(model: ServedModel, tokens: list[int], *, with_texts: bool) -> bytes:
    if len(tokens) <= PIECE_TOKENS:
        return _answer(model, tokens, with_texts)
    return await asyncio.to_thread(_answer, model, tokens, with_texts)


def _answer(model: ServedModel, tokens: list[int], with_texts: bool) -> bytes:
    def texts_of(part: Sequence[int]) -> list[str]:
        return [model.tokenizer.token_text(token) for token in part]

    texts = _listed(tokens, texts_of) if with_texts else b"null"
    return b"".join((b'{"count":%d,"max_model_len":%d,"tokens":' % (len(tokens), model.info.max_model_len),
                     _listed(tokens, list), b',"token_strs":', texts, b"}"))


def _listed(tokens: list[int], values_of: Callable[[Sequence[int]], Sequence[object]]) -> bytes:
    parts = [msgspec.json.encode(values_of(tokens[at:at + PIECE_TOKENS]))[1:-1]
             for at in range(0, len(tokens), PIECE_TOKENS)]
    return b"[" + b",".join(parts) + b"]"
