"""An answer as a Messages object, or as its events.

    message_start
      content_block_start  content_block_delta ...  content_block_stop     thinking | text | tool_use
    message_delta          stop_reason, usage
    message_stop

A block begins with the first piece of its kind and ends when another kind follows. ``message_start`` waits
for the first piece: only then does the server know how much of the prompt came from the cache.

Usage counts every prompt token once: ``cache_read_input_tokens`` came from the cache,
``cache_creation_input_tokens`` are computed tokens in front of the client's last ``cache_control``, and
``input_tokens`` are the rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from weft.errors import WeftError
from weft.server.anthropic.protocol import MessagesBody, error_json
from weft.server.anthropic.turns import cache_marked, messages_turn
from weft.server.errors import bug
from weft.server.ids import random_id
from weft.server.service import Service
from weft.server.turn import PreparedTurn, calls_of, prepare_turn
from weft.text.choices import Piece
from weft.text.dialect import Heard

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encoder = msgspec.json.Encoder()


class MessagesJob:
    """One request to /v1/messages, prepared: ``generation`` is ready to start."""

    def __init__(self, turn: PreparedTurn, body: MessagesBody) -> None:
        self._turn = turn
        self._marked = cache_marked(body)
        self._id = f"msg_{random_id()}"
        self.generation = turn.generation

    async def answer(self) -> bytes:
        [piece] = await self.generation.whole()
        heard = self._turn.read(piece)
        reason, sequence = self._stop(piece)
        return _encoder.encode({
            "id": self._id, "type": "message", "role": "assistant", "model": self._turn.name,
            "content": _blocks(heard), "stop_reason": reason, "stop_sequence": sequence,
            "usage": self._usage()})

    async def lines(self) -> AsyncGenerator[bytes, None]:
        blocks = _OpenBlock()
        started = False
        try:
            async for pieces in self.generation.pieces():
                events: list[dict[str, Any]] = []
                if not started:
                    started = True
                    events.append(self._start())
                for piece in pieces:
                    events += blocks.events_of(self._turn.read(piece))
                    if piece.finish_reason is not None:
                        events += blocks.end()
                        events += self._end(piece)
                yield b"".join(map(_line, events))
        except Exception as error:
            failure = error if isinstance(error, WeftError) else bug(error)
            yield b"event: error\ndata: " + error_json(failure) + b"\n\n"
            if failure is not error:
                raise
        finally:
            self.generation.close()

    def _start(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "id": self._id, "type": "message", "role": "assistant", "model": self._turn.name,
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0}}
        return {"type": "message_start", "message": message}

    def _end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        reason, sequence = self._stop(piece)
        yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
               "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stop(self, piece: Piece) -> tuple[str, str | None]:
        reason = self._turn.finish_reason(piece) or "stop"
        if reason == "stop" and isinstance(piece.stop_reason, str):
            return "stop_sequence", piece.stop_reason
        return _STOP_REASONS.get(reason, "end_turn"), None

    def _usage(self) -> dict[str, int]:
        usage, prompt = self.generation.usage(), self.generation.prompts[0]
        cached = usage.prompt_tokens_details.cached_tokens
        last_mark = max(prompt.marks, default=0) if self._marked else 0
        created = max(0, last_mark - cached)
        return {"input_tokens": usage.prompt_tokens - cached - created, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": created, "output_tokens": usage.completion_tokens}


class _OpenBlock:
    """The content block that is open in a stream: its index and kind; a tool call has its own number too."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: tuple[str, int] | None = None

    def events_of(self, heard: Heard) -> Iterator[dict[str, Any]]:
        if heard.reasoning:
            yield from self._begin(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": heard.reasoning})
        if heard.content:
            yield from self._begin(("text", 0), {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": heard.content})
        for call in heard.calls:
            if call.name is not None and call.call_id is not None:
                block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
                yield from self._begin(("tool_use", call.index), block)
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[dict[str, Any]]:
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
            self._kind = None

    def _begin(self, kind: tuple[str, int], block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self.end()
        self._index += 1
        self._kind = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _blocks(heard: Heard) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if heard.reasoning:
        blocks.append({"type": "thinking", "thinking": heard.reasoning, "signature": ""})
    if heard.content:
        blocks.append({"type": "text", "text": heard.content})
    return [*blocks, *({"type": "tool_use", "id": call.call_id, "name": call.name,
                        "input": _arguments(call.arguments)} for call in calls_of(heard.calls))]


def _arguments(text: str) -> Any:
    """The object that a call's arguments are; an answer that was cut may have half of one."""
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}


def _line(event: dict[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


async def prepare_messages(service: Service, body: MessagesBody) -> MessagesJob:
    """Raises what ``prepare_turn`` raises."""
    return MessagesJob(await prepare_turn(service, messages_turn(body)), body)
