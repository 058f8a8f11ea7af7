"""What earlier turns of a conversation bring to the next one, and what a response leaves for it.

    path of StoredResponse --read_history--> TurnHistory: items, and the tokens that the model knows
    response + answer's tokens --Keeper--> StoredResponse

*The next turn begins where the answer ended.* A model may write a text in other tokens than the tokenizer
makes of it. Text alone would then lose the cache at the first token that differs. So a response keeps the
tokens of its prompt and its answer, with the digest of their text. If the next prompt begins with this text,
these tokens stand for it (``KnownPrefix``), and the prefix cache continues from the state after the answer.
A template that writes an earlier answer differently (without its reasoning) gets ordinary tokens.

The last token of a complete answer ends the turn. It is left out: the template writes it again. An answer
whose tokens say more than its text (a stop string, a special token that is not shown) leaves no tokens.

Tokens are stored as a difference to the parent's: a conversation of n turns stores each token once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from weft.server.generation import Prompt
from weft.server.responses.items import Item
from weft.server.responses.store import StoredResponse
from weft.server.service import ServedModel
from weft.text.chat import common_length
from weft.text.chat_request import KnownPrefix, text_digest


class TurnHistory(msgspec.Struct, frozen=True):
    """``items`` of all earlier turns, input and output in order. ``tokens``: what the model knows of them."""

    items: list[Item] = []
    tokens: list[int] = []
    known: KnownPrefix | None = None


class _Answer(msgspec.Struct):
    """What a turn needs of a response object."""

    output: list[dict[str, Any]]


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


def read_history(path: Sequence[StoredResponse], vocabulary: bytes) -> TurnHistory:
    """``vocabulary``: the tokenizer's; tokens of another one are left out."""
    items: list[Item] = []
    tokens: list[int] = []
    for stored in path:
        items += _decode_items(stored.items)
        items += _decode_answer(stored.body).output
        if stored.vocabulary == vocabulary and stored.shared <= len(tokens):
            tokens = [*tokens[:stored.shared], *_unpacked(stored.tokens)]
        else:
            tokens = []
    last = path[-1]
    usable = bool(tokens) and last.vocabulary == vocabulary and bool(last.digest)
    return TurnHistory(items, tokens, KnownPrefix(tokens, last.chars, last.digest) if usable else None)


class RawAnswer(NamedTuple):
    """All tokens that were generated, and their text as it was read, markers too."""

    tokens: list[int]
    text: str


class Keeper(msgspec.Struct, frozen=True):
    """Makes the record of a response. ``items``: the request's own; ``before``: the parent's tokens."""

    model: ServedModel
    prompt: Prompt
    items: list[Item]
    before: list[int]

    def record(self, response_id: str, parent: str | None, body: bytes, answer: RawAnswer) -> StoredResponse:
        """``body``: the response as JSON."""
        tokenizer = self.model.tokenizer
        tokens = answer.tokens
        if tokens and tokens[-1] in tokenizer.special_ids:
            tokens = tokens[:-1]
        items = msgspec.json.encode(self.items)
        written = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
        if self.prompt.text is None or written != answer.text:
            return StoredResponse(response_id=response_id, parent=parent, body=body, items=items)
        tokens, text = [*self.prompt.tokens, *tokens], self.prompt.text + written
        shared = common_length(tokens, self.before) if self.before else 0
        return StoredResponse(
            response_id=response_id, parent=parent, body=body, items=items,
            vocabulary=self.model.vocabulary, shared=shared, tokens=_packed(tokens[shared:]),
            chars=len(text), digest=text_digest(text))


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _unpacked(raw: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)
