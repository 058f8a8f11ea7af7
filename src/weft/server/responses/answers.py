"""A response, as one object or as its events.

    response.created  response.in_progress                       before the first token
      items (``OutputWriter``)
    response.completed | response.incomplete | response.failed

Every event has a ``sequence_number``, from 0 without a gap. The last one carries the complete response, with its usage.
A response that is to be kept is stored before the last event or the answer is sent: the id works as soon as a client
knows that the response is complete. If it cannot be stored, the answer says ``store: false``.

A failure after the beginning of a stream is ``response.failed``; before it, an HTTP error.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.errors import WeftError
from weft.request import SamplingParams
from weft.server.chat_turn import PreparedTurn
from weft.server.generation import InputDetails, OutputDetails, ResponseUsage
from weft.server.logprobs import ChatTokenLogprob, chat_logprobs, namer
from weft.server.responses.items import Item, ReasoningOptions, ResponsesBody, item_id
from weft.server.responses.turns import RawAnswer, format_of, namespaces_of
from weft.server.sse import StreamedJob, named_event
from weft.text.choices import Piece
from weft.text.dialect import AnswerBlock, BlockEvent, BlockKind

_encoder = msgspec.json.Encoder()
Keep = Callable[[str, bytes, RawAnswer], Awaitable[bool]]
"""A function that stores a response by its id, and returns whether that worked."""
_ERROR_CODES = {429: "rate_limit_exceeded"}

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _Names:
    """Names for a kind of block: the item, the events, the field with the text, and the part that has that field."""

    item: str
    events: str
    field: str
    part: str | None = None


_NAMES: dict[BlockKind, _Names] = {
    "reasoning": _Names("reasoning", "response.reasoning_text", "text", "reasoning_text"),
    "text": _Names("message", "response.output_text", "text", "output_text"),
    "call": _Names("function_call", "response.function_call_arguments", "arguments"),
    "custom_call": _Names("custom_tool_call", "response.custom_tool_call_input", "input"),
}


class OutputWriter:
    """The blocks of ``weft.text.dialect`` as items, and their events. An answer without blocks is an empty
    message.

    While text is held back because it may become a marker, its logprobs wait. When content follows, the last logprobs
    that cover the content belong to it; earlier ones belonged to a marker.

    ``items``: the output so far; complete items have their text. ``namespaces``: as in ``namespaces_of``."""

    def __init__(self, response_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[Item] = []
        self._namespaces = namespaces
        self._response_id = response_id
        self._place: Item = {}
        """Fields that locate the current block in its events."""
        self._logprobs: list[ChatTokenLogprob] = []
        self._undecided: list[ChatTokenLogprob] = []

    def write(self, events: Iterable[BlockEvent], logprobs: list[ChatTokenLogprob]) -> Iterator[Item]:
        """Yield the events of one piece of the answer, without their ``sequence_number``."""
        self._undecided += logprobs
        for event in events:
            block, names = event.block, _NAMES[event.block.kind]
            if event.phase == "start":
                yield from self._start(block)
            elif event.phase == "stop":
                yield from self._stop(block)
            else:
                decided, self._undecided = self._undecided, []
                written: Item = {"type": f"{names.events}.delta", **self._place, "delta": event.delta}
                if block.kind == "text":
                    written["logprobs"] = _covering(decided, event.delta)
                    self._logprobs += written["logprobs"]
                yield written

    def empty_message(self, *, is_cut: bool) -> Iterator[Item]:
        """Yield the output of an answer without blocks."""
        block = AnswerBlock("text", 0, is_complete=not is_cut)
        yield from self._start(block)
        yield from self._stop(block)

    def _start(self, block: AnswerBlock) -> Iterator[Item]:
        self._logprobs = []
        item = self._item(block, "in_progress")
        self.items.append(item)
        self._place = {"item_id": item["id"], "output_index": block.index}
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if _NAMES[block.kind].part:
            self._place["content_index"] = 0
            yield {"type": "response.content_part.added", **self._place, "part": _part(block, "", [])}

    def _stop(self, block: AnswerBlock) -> Iterator[Item]:
        names, place, logprobs = _NAMES[block.kind], self._place, self._logprobs
        self.items[-1] = item = self._item(block, "completed" if block.is_complete else "incomplete")
        name = {"name": item["name"]} if block.kind == "call" else {}
        yield {
            "type": f"{names.events}.done",
            **place,
            **name,
            names.field: block.text,
            **({"logprobs": logprobs} if block.kind == "text" else {}),
        }
        if names.part:
            yield {"type": "response.content_part.done", **place, "part": _part(block, block.text, logprobs)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _item(self, block: AnswerBlock, status: Status) -> Item:
        names, text = _NAMES[block.kind], "" if status == "in_progress" else block.text
        item: Item = {
            "type": names.item,
            "id": item_id(names.item, self._response_id, "o", block.index),
            "status": status,
        }
        if block.is_call:
            namespace, name = self._namespaces.get(block.name, ("", block.name))
            inside = {"namespace": namespace} if namespace else {}
            return {**item, "call_id": block.call_id, "name": name, **inside, names.field: text}
        content = [] if status == "in_progress" else [_part(block, text, self._logprobs)]
        return {**item, **({"role": "assistant"} if block.kind == "text" else {"summary": []}), "content": content}


def _part(block: AnswerBlock, text: str, logprobs: list[ChatTokenLogprob]) -> Item:
    of_text = {"annotations": [], "logprobs": logprobs} if block.kind == "text" else {}
    return {"type": _NAMES[block.kind].part, "text": text, **of_text}


def _covering(logprobs: list[ChatTokenLogprob], text: str) -> list[ChatTokenLogprob]:
    """Return the last of ``logprobs`` whose tokens have at least the bytes of ``text``."""
    missing, first = len(text.encode(errors="replace")), len(logprobs)
    while missing > 0 and first > 0:
        first -= 1
        missing -= len(logprobs[first].bytes)
    return logprobs[first:]


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response. Fields of the request are returned as they were used. ``output``: reasoning, messages and calls."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


def _response(
    body: ResponsesBody, response_id: str, model: str, sampling: SamplingParams, *, stored: bool
) -> ResponseObject:
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        background=bool(body.background),
        status="queued" if body.background else "in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or ReasoningOptions(),
        safety_identifier=body.safety_identifier,
        store=stored,
        temperature=sampling.temperature,
        text={"format": format_of(body)},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


async def overflow_lines(body: ResponsesBody, response_id: str, error: WeftError) -> AsyncGenerator[bytes, None]:
    """Yield the stream of a response whose prompt is too long. OpenAI answers in this way, and clients that compact
    their conversation look for the code only in this event."""
    response = _response(body, response_id, body.model or "", SamplingParams(), stored=False)
    for number, kind in enumerate(("response.created", "response.failed")):
        if kind == "response.failed":
            response.status, response.error = "failed", {"code": str(error.code), "message": error.message}
        yield named_event(kind, _encoder.encode({"type": kind, "sequence_number": number, "response": response}))


class ResponsesJob(StreamedJob):
    """One request to /v1/responses, prepared: ``generation`` is ready to start. ``keep`` is None for
    a response that is not to be stored."""

    def __init__(self, turn: PreparedTurn, body: ResponsesBody, response_id: str, *, keep: Keep | None = None) -> None:
        self.generation = turn.generation
        self._turn = turn
        self._keep = keep
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._output = OutputWriter(response_id, namespaces_of(body.tools))
        self._sequence_number = 0
        self._is_cut = False
        tokenizer = turn.model.renderer.tokenizer
        self._namer = namer(tokenizer, as_ids=False, escape_bytes=False)
        sampling = self.generation.samplings[0]
        self._top = sampling.logprobs
        self.response = _response(body, response_id, turn.name, sampling, stored=keep is not None)

    async def answer(self) -> bytes:
        if self._top is None:
            pieces = await self.generation.whole()
        else:  # the order of the pieces decides which logprobs belong to the message
            pieces = [piece async for some in self.generation.pieces() for piece in some]
        for piece in pieces:
            for _ in self._events(piece):
                pass  # only the items are used
        return await self._complete()

    def begin(self) -> bytes:
        return self._response_line("response.created") + self._response_line(f"response.{self.response.status}")

    def part(self, pieces: list[Piece]) -> bytes:
        lines = []
        if self.response.status == "queued":
            self.response.status = "in_progress"
            lines.append(self._response_line("response.in_progress"))
        lines += [self._line(event) for piece in pieces for event in self._events(piece)]
        return b"".join(lines)

    async def end(self) -> bytes:
        await self._complete()
        return self._response_line(f"response.{self.response.status}")

    def failed(self, error: WeftError) -> bytes:
        self.response.status = "failed"
        self.response.output = self._output.items
        self.response.error = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        return self._response_line("response.failed")

    # ------------------------------------------------------------------ in the background

    @property
    def response_id(self) -> str:
        return self.response.id

    @property
    def status(self) -> str:
        return self.response.status

    def body_so_far(self) -> bytes:
        """Return the response as it is now, without its output, which is added at the end."""
        return _encoder.encode(self.response)

    def cancelled(self) -> None:
        self.response.status, self.response.incomplete_details = "cancelled", None

    def _events(self, piece: Piece) -> Iterator[Item]:
        self._tokens += piece.tokens
        self._texts.append(piece.text)
        self._is_cut = piece.finish_reason == "length"
        yield from self._output.write(self._turn.read(piece), self._logprobs(piece))
        if piece.finish_reason is not None and not self._output.items:
            yield from self._output.empty_message(is_cut=self._is_cut)

    async def _complete(self) -> bytes:
        """Return the response as JSON, stored if it is to be."""
        response, usage = self.response, self._turn.usage()
        response.output = self._output.items
        response.status = "incomplete" if self._is_cut else "completed"
        if self._is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.completed_at = int(time.time()) if response.status == "completed" else None
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self._turn.reasoning_tokens()),
            total_tokens=usage.total_tokens,
        )
        body = _encoder.encode(response)
        if self._keep is None or await self._keep(response.id, body, RawAnswer(self._tokens, "".join(self._texts))):
            return body
        response.store = False
        return _encoder.encode(response)

    def _logprobs(self, piece: Piece) -> list[ChatTokenLogprob]:
        if self._top is None:
            return []
        tokenizer = self._turn.model.renderer.tokenizer
        shown = [entry for entry in piece.logprobs if entry.token not in tokenizer.special_ids]
        return chat_logprobs(shown, tokenizer, self._namer, self._top).content

    def _response_line(self, kind: str) -> bytes:
        return self._line({"type": kind, "response": self.response})

    def _line(self, event: Item) -> bytes:
        kind, number = event["type"], self._sequence_number
        self._sequence_number += 1
        return named_event(kind, _encoder.encode({"type": kind, "sequence_number": number, **event}))
