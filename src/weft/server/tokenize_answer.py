"""The answer of /tokenize as JSON, piece by piece.

    5,000,000 tokens --PIECE_TOKENS at a time, others are served in between--> 1, 2, 3 ...  joined

The encoder would hold the event loop for as long as its list is long, and the text of a token takes a
microsecond. A piece takes some milliseconds at most.

Rejected: a thread (its heap gives memory back late).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from weft.server.service import ServedModel

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
