"""An answer as a Messages object, or as its events: the blocks of ``weft.text.blocks`` renamed.

    message_start
      content_block_start  content_block_delta ...  content_block_stop     thinking | text | tool_use
    message_delta          stop_reason, usage
    message_stop

``message_start`` waits for the first piece: only then does the server know how much of the prompt came from
the cache.

Usage counts every prompt token once: ``cache_read_input_tokens`` came from the cache,
``cache_creation_input_tokens`` are computed tokens in front of the client's last ``cache_control``, and
``input_tokens`` are the rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from secrets import token_hex
from typing import Any

import msgspec

from weft.errors import WeftError
from weft.server.anthropic.protocol import MessagesBody, error_json
from weft.server.anthropic.turns import cache_marked, messages_turn, thinks
from weft.server.errors import bug
from weft.server.ignored_fields import note_ignored
from weft.server.service import Service
from weft.server.sse import named_event
from weft.server.turn import PreparedTurn, prepare_turn
from weft.text.blocks import AnswerBlock, BlockEvent
from weft.text.choices import Piece

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encoder = msgspec.json.Encoder()


class MessagesJob:
    """One request to /v1/messages, prepared: ``generation`` is ready to start."""

    def __init__(self, turn: PreparedTurn, body: MessagesBody) -> None:
        self._turn = turn
        self._marked = cache_marked(body)
        self._id = f"msg_{token_hex(16)}"
        self.generation = turn.generation

    async def answer(self) -> bytes:
        [piece] = await self.generation.whole()
        content = [_block(block, block.text) for block in self._turn.read_whole(piece)]
        return _encoder.encode({**self._message(content), **self._stop(piece), "usage": self._usage()})

    async def lines(self) -> AsyncGenerator[bytes, None]:
        started = False
        try:
            async for pieces in self.generation.pieces():
                events: list[dict[str, Any]] = []
                if not started:
                    message = {**self._message([]), "stop_reason": None, "stop_sequence": None,
                               "usage": {**self._usage(), "output_tokens": 0}}
                    events.append({"type": "message_start", "message": message})
                    started = True
                for piece in pieces:
                    events += map(_event, self._turn.read(piece))
                    if piece.finish_reason is not None:
                        events.append({"type": "message_delta", "delta": self._stop(piece),
                                       "usage": self._usage()})
                        events.append({"type": "message_stop"})
                yield b"".join(named_event(event["type"], _encoder.encode(event)) for event in events)
        except Exception as error:
            failure = error if isinstance(error, WeftError) else bug(error)
            yield named_event("error", error_json(failure))
            if failure is not error:
                raise

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._turn.name,
                "content": content}

    def _stop(self, piece: Piece) -> dict[str, str | None]:
        reason = self._turn.finish_reason(piece) or "stop"
        if reason == "stop" and isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage, prompt = self.generation.usage(), self.generation.prompts[0]
        cached = usage.prompt_tokens_details.cached_tokens
        last_mark = max(prompt.marks, default=0) if self._marked else 0
        created = max(0, last_mark - cached)
        return {"input_tokens": usage.prompt_tokens - cached - created, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": created, "output_tokens": usage.completion_tokens}


def _event(event: BlockEvent) -> dict[str, Any]:
    kind, index = event.block.kind, event.block.index
    if event.phase == "stop":
        return {"type": "content_block_stop", "index": index}
    if event.phase == "start":
        return {"type": "content_block_start", "index": index, "content_block": _block(event.block, "")}
    delta = ({"type": "thinking_delta", "thinking": event.delta} if kind == "reasoning"
             else {"type": "text_delta", "text": event.delta} if kind == "text"
             else {"type": "input_json_delta", "partial_json": event.delta})
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    """The object that a call's arguments are; an answer that was cut may have half of one."""
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}


async def prepare_messages(service: Service, body: MessagesBody) -> MessagesJob:
    """Raises what ``prepare_turn`` raises."""
    turn = await prepare_turn(service, messages_turn(body))
    if thinks(body.thinking) and turn.model.dialect.reasoning is None:
        note_ignored("thinking")
    return MessagesJob(turn, body)
