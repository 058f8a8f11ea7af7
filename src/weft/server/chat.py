"""POST /v1/chat/completions: messages in, an assistant message out.

The answer is one JSON object, or a stream: a first chunk per choice with the role, then text, a last chunk per choice
with its ``finish_reason``, usage if the request asks for it, [DONE].

    ChatBody --chat_turn--> ChatTurn --prepare_turn--> PreparedTurn --ChatJob--> chunks

Reasoning goes out under both names that clients look for, ``reasoning`` and ``reasoning_content``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from secrets import token_hex

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import RequestError
from weft.request import LOGPROBS_MAX
from weft.server.chat_turn import ChatTurn, PreparedTurn, prepare_turn
from weft.server.generation import Usage
from weft.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, namer, prompt_logprobs
from weft.server.protocol import UNSERVED_IN_CHAT, ChatBody, ChatReasoning, refuse_stream_fields, stream_usage
from weft.server.service import Service
from weft.server.sse import DONE, StreamedJob, Way, sse_line
from weft.server.truncation import TO_THE_CONTEXT
from weft.text.chat_request import ConversationFields, predicted_text
from weft.text.choices import Piece
from weft.text.current_request import note_ignored
from weft.text.dialect import AnswerBlock, BlockEvent, text_of
from weft.text.grammars import BUDGET_FIELD


class Function(msgspec.Struct, kw_only=True):
    """Name and arguments of a call. ``name`` is in the first delta of a call only. ``arguments``: JSON text, in a
    stream a part."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomInput(msgspec.Struct, kw_only=True):
    """Input of a custom tool. Streams, too, send all of it at once."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool. ``index`` is in streams only, where ``id`` and ``type`` are in the first delta of a call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A complete message, or the part of it in a chunk. In a chunk ``tool_calls`` has one entry, as clients read only
    the first."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class DeltaChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


class ChatJob(StreamedJob):
    """One request to /v1/chat/completions, prepared: ``generation`` is ready to start."""

    def __init__(self, turn: PreparedTurn, body: ChatBody) -> None:
        self._body = body
        self._turn = turn
        self.generation = turn.generation
        self._id = f"chatcmpl-{body.request_id or token_hex(16)}"
        self._created_s = int(time.time())
        self._namer = namer(
            turn.model.renderer.tokenizer, as_ids=bool(body.return_tokens_as_token_ids), escape_bytes=False
        )
        self._top = body.top_logprobs or 0
        self._last_usage, self._every_usage = stream_usage(body)

    async def answer(self) -> bytes:
        generation, body = self.generation, self._body
        choices: list[ChatChoice] = []
        for piece in await generation.whole():
            if choices:  # encoding many logprobs takes long: let other requests run between two choices
                await asyncio.sleep(0)
            message = self._message(piece)
            choices.append(
                ChatChoice(
                    index=piece.index,
                    message=message,
                    logprobs=self._logprobs(piece),
                    finish_reason=self._turn.finish_reason(piece),
                    stop_reason=piece.stop_reason,
                    token_ids=piece.tokens if body.return_token_ids else UNSET,
                )
            )
        response = ChatCompletion(
            id=self._id, created=self._created_s, model=self._turn.name, choices=choices, usage=self._turn.usage()
        )
        if body.return_token_ids:
            response.prompt_token_ids = self._turn.prompt.tokens
        if body.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(
                generation.choices[0].prompt_logprobs, self._namer, body.prompt_logprobs
            )
        return _encoder.encode(response)

    def begin(self) -> bytes:
        roles = [
            DeltaChoice(index=choice.index, delta=ChatAnswer(role="assistant", content=""))
            for choice in self.generation.choices
        ]
        return b"".join(self._line([role], first=role.index == 0) for role in roles)

    def part(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._line([choice]) for piece in pieces for choice in self._choices(piece))

    async def end(self) -> bytes:
        return self._line([]) + DONE if self._last_usage else DONE

    def _line(self, choices: list[DeltaChoice], *, first: bool = False) -> bytes:
        chunk = ChatChunk(id=self._id, created=self._created_s, model=self._turn.name, choices=choices)
        if self._every_usage or (self._last_usage and not choices):
            chunk.usage = self._turn.usage()
        elif self._last_usage:
            chunk.usage = None
        if first and self._body.return_token_ids:
            chunk.prompt_token_ids = self._turn.prompt.tokens
        return sse_line(_encoder.encode(chunk))

    def _message(self, piece: Piece) -> ChatAnswer:
        blocks = self._turn.read_whole(piece)
        answer = ChatAnswer(role="assistant", content=text_of(blocks, "text"))
        if reasoning := text_of(blocks, "reasoning"):
            answer.reasoning = answer.reasoning_content = reasoning
        if calls := [_call(block, block.text) for block in blocks if block.is_call]:
            answer.tool_calls, answer.content = calls, answer.content or None
        return answer

    def _choices(self, piece: Piece) -> list[DeltaChoice]:
        """Return the choices of a piece: none while its text is held back because it may be the start of a marker."""
        deltas = stream_deltas(self._turn.read(piece))
        choices = [DeltaChoice(index=piece.index, delta=delta) for delta in deltas or [ChatAnswer()]]
        choices[0].logprobs = self._logprobs(piece)
        if self._body.return_token_ids:
            choices[0].token_ids = piece.tokens
        if piece.finish_reason is not None:
            choices[-1].finish_reason = self._turn.finish_reason(piece)
            choices[-1].stop_reason = piece.stop_reason
        elif not deltas and choices[0].logprobs is None and not self._body.return_token_ids:
            return []
        return choices

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._turn.model.renderer.tokenizer, self._namer, self._top)


def _call(block: AnswerBlock, text: str) -> ToolCall:
    if block.kind == "custom_call":
        return ToolCall(id=block.call_id, type="custom", custom=CustomInput(name=block.name, input=text))
    return ToolCall(id=block.call_id, type="function", function=Function(name=block.name, arguments=text))


def stream_deltas(events: Iterable[BlockEvent]) -> list[ChatAnswer]:
    """Return the deltas of events. Each part of a call has a delta of its own, and the first one of a call has no
    arguments yet: clients read only the first entry of ``tool_calls``, and some add arguments to the entry that has the
    name."""
    deltas: list[ChatAnswer] = []
    for event in events:
        if event.phase == "delta" and not event.block.is_call:
            deltas = deltas or [ChatAnswer()]
            delta = deltas[-1]
            if event.block.kind == "text":
                delta.content = (delta.content or "") + event.delta
            else:
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + event.delta
        elif (call := _call_part(event)) is not None:
            if not deltas or deltas[-1].tool_calls is not UNSET:
                deltas.append(ChatAnswer())
            deltas[-1].tool_calls = [call]
    return deltas


def _call_part(event: BlockEvent) -> ToolCall | None:
    block, phase = event.block, event.phase
    if block.kind == "call" and phase == "delta":
        return ToolCall(index=block.call_index, function=Function(arguments=event.delta))
    if (block.kind, phase) in (("call", "start"), ("custom_call", "stop")):
        call = _call(block, "" if phase == "start" else block.text)
        call.index = block.call_index
        return call
    return None


async def prepare_chat(service: Service, body: ChatBody) -> ChatJob:
    """Prepare a request. Raise RequestError, UnknownModelError, EngineUnavailableError."""
    job = ChatJob(await prepare_turn(service, chat_turn(body)), body)
    if body.store:
        note_ignored("store")
    return job


CHAT = Way(ChatBody, UNSERVED_IN_CHAT, prepare_chat)


def chat_turn(body: ChatBody) -> ChatTurn:
    """Return the turn of ``body``. Raise RequestError for fields that exclude each other."""
    refuse_stream_fields(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}; it must be at least 0 and at most {LOGPROBS_MAX}",
            param="top_logprobs",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs with stream is not supported", param="prompt_logprobs", code="unsupported_parameter"
        )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatTurn(
        conversation=chat_conversation(body),
        fields=body,
        n=body.n,
        max_tokens=None if max_tokens == TO_THE_CONTEXT else max_tokens,
        answer_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        add_special_tokens=bool(body.add_special_tokens),
        show_reasoning=body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude),
        prediction=predicted_text(body.prediction),
    )


def _thinks(body: ChatBody) -> bool | None:
    """Return whether ``thinking`` asks for reasoning. MiniMax, GLM, Kimi and DeepSeek take it in their own APIs as
    ``{"type": "disabled"}``; any other form is reported as ignored."""
    kind = body.thinking.get("type") if isinstance(body.thinking, dict) else None
    if kind in ("enabled", "disabled"):
        return bool(kind == "enabled")
    if body.thinking is not None and kind not in ("adaptive", "auto"):
        note_ignored("thinking")
    return None


def chat_conversation(body: ChatBody) -> ConversationFields:
    """Return the fields of ``body`` that shape the prompt, and the reasoning. A top-level field overrides the same
    field in ``reasoning``."""
    reasoning = body.reasoning or ChatReasoning()
    variables, effort, budget = body.chat_template_kwargs, body.reasoning_effort, body.thinking_token_budget
    thinks = next((wish for wish in (reasoning.enabled, body.enable_thinking) if wish is not None), _thinks(body))
    if thinks is not None:
        variables = {"enable_thinking": thinks, **(variables or {})}
    return ConversationFields(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        variables=variables,
        documents=body.documents,
        reasoning_effort=reasoning.effort if effort is None else effort,
        effort_field="reasoning_effort" if reasoning.effort is None else "reasoning.effort",
        thinking_token_budget=reasoning.max_tokens if budget is None else budget,
        budget_field=BUDGET_FIELD if budget is not None else "reasoning.max_tokens",
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
