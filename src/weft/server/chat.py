"""POST /v1/chat/completions: messages in, an assistant message out.

The answer is one JSON object, or a stream: a first chunk per choice with the role, then text, the last chunk
of a choice with its ``finish_reason``, usage if asked, [DONE].

    ChatBody --chat_turn--> ChatTurn --prepare_turn--> PreparedTurn --ChatJob--> chunks

Reasoning goes out under both names that clients look for, ``reasoning`` and ``reasoning_content``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import RequestError
from weft.request import LOGPROBS_MAX
from weft.server.generation import Usage
from weft.server.ids import random_id
from weft.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, namer, prompt_logprobs
from weft.server.protocol import ChatBody, refuse_stream_fields
from weft.server.service import Service
from weft.server.sse import DONE, sse_line
from weft.server.turn import AnswerCall, ChatTurn, PreparedTurn, calls_of, prepare_turn
from weft.text.chat_request import ConversationFields
from weft.text.choices import Piece
from weft.text.predicted import predicted_text
from weft.text.tools.call_deltas import CallDelta


class Function(msgspec.Struct, kw_only=True):
    """``name`` is left out behind the first delta of a call. ``arguments``: JSON text, in a stream a part."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomInput(msgspec.Struct, kw_only=True):
    """Of a custom tool. Streams have it whole, too."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """``index`` is in streams only, where ``id`` and ``type`` are in the first delta of a call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
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


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET

    @property
    def empty(self) -> bool:
        return self.content is UNSET and self.reasoning is UNSET and self.tool_calls is UNSET


class DeltaChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
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


class ChatJob:
    """One request to /v1/chat/completions, prepared: ``generation`` is ready to start."""

    def __init__(self, turn: PreparedTurn, body: ChatBody) -> None:
        self._body = body
        self._turn = turn
        self.generation = turn.generation
        self._id = f"chatcmpl-{body.request_id or random_id()}"
        self._created_s = int(time.time())
        self._namer = namer(turn.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids),
                            escape_bytes=False)
        self._top = body.top_logprobs or 0

    async def answer(self) -> bytes:
        generation, body = self.generation, self._body
        choices = []
        for piece in await generation.whole():
            await asyncio.sleep(0)  # a choice with many logprobs takes long: others are served between two
            message = self._message(piece)
            choices.append(ChatChoice(
                index=piece.index, message=message, logprobs=self._logprobs(piece),
                finish_reason=self._turn.finish_reason(piece), stop_reason=piece.stop_reason,
                token_ids=piece.tokens if body.return_token_ids else UNSET))
        response = ChatCompletion(id=self._id, created=self._created_s, model=self._turn.name,
                                  choices=choices, usage=self._turn.usage())
        if body.return_token_ids:
            response.prompt_token_ids = self._turn.prompt.tokens
        if body.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(generation.choices[0].prompt_logprobs, self._namer,
                                                       body.prompt_logprobs)
        return _encoder.encode(response)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        generation, body = self.generation, self._body
        options = body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)

        def line(choices: list[DeltaChoice], *, first: bool = False) -> bytes:
            chunk = ChatChunk(id=self._id, created=self._created_s, model=self._turn.name, choices=choices)
            if always or (with_usage and not choices):
                chunk.usage = self._turn.usage()
            elif with_usage:
                chunk.usage = None
            if first and body.return_token_ids:
                chunk.prompt_token_ids = self._turn.prompt.tokens
            return sse_line(_encoder.encode(chunk))

        try:
            roles = [DeltaChoice(index=choice.index, delta=Delta(role="assistant", content=""))
                     for choice in generation.choices]
            yield b"".join(line([role], first=role.index == 0) for role in roles)
            async for pieces in generation.pieces():
                # A piece whose text is held back (it may become a marker) says nothing yet.
                deltas = [delta for delta in map(self._delta, pieces) if delta is not None]
                if deltas:
                    yield b"".join(line([delta]) for delta in deltas)
            if with_usage:
                yield line([])
            yield DONE
        finally:
            generation.close()

    def _message(self, piece: Piece) -> ChatAnswer:
        heard = self._turn.read(piece)
        answer = ChatAnswer(content=heard.content)
        if heard.reasoning:
            answer.reasoning = answer.reasoning_content = heard.reasoning
        if heard.calls:
            answer.tool_calls = [_call(call) for call in calls_of(heard.calls)]
            answer.content = heard.content or None
        return answer

    def _delta(self, piece: Piece) -> DeltaChoice | None:
        heard = self._turn.read(piece)
        choice = DeltaChoice(index=piece.index, delta=Delta(), logprobs=self._logprobs(piece),
                             finish_reason=self._turn.finish_reason(piece))
        if heard.content:
            choice.delta.content = heard.content
        if heard.reasoning:
            choice.delta.reasoning = choice.delta.reasoning_content = heard.reasoning
        if heard.calls:
            choice.delta.tool_calls = [_call_delta(delta) for delta in heard.calls]
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        elif choice.delta.empty and choice.logprobs is None and not self._body.return_token_ids:
            return None
        if self._body.return_token_ids:
            choice.token_ids = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._turn.model.tokenizer, self._namer, self._top)


def _call(call: AnswerCall) -> ToolCall:
    if call.is_custom:
        return ToolCall(id=call.call_id, type="custom",
                        custom=CustomInput(name=call.name, input=call.arguments))
    return ToolCall(id=call.call_id, type="function",
                    function=Function(name=call.name, arguments=call.arguments))


def _call_delta(delta: CallDelta) -> ToolCall:
    if delta.name is None or delta.call_id is None:
        return ToolCall(index=delta.index, function=Function(arguments=delta.arguments))
    [call] = calls_of([delta])
    whole = _call(call)
    whole.index = delta.index
    return whole


async def prepare_chat(service: Service, body: ChatBody) -> ChatJob:
    """Raises RequestError, UnknownModelError, EngineUnavailableError."""
    return ChatJob(await prepare_turn(service, chat_turn(body)), body)


def chat_turn(body: ChatBody) -> ChatTurn:
    """Raises RequestError for fields that exclude each other."""
    refuse_stream_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
        raise RequestError(f"top_logprobs is {body.top_logprobs}; it must be at least 0 and at most "
                           f"{LOGPROBS_MAX}", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs with stream is not supported", param="prompt_logprobs",
                           code="unsupported_parameter")
    return ChatTurn(
        conversation=chat_conversation(body), fields=body, n=body.n,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs,
        add_special_tokens=bool(body.add_special_tokens), show_reasoning=body.include_reasoning is not False,
        prediction=predicted_text(body.prediction))


def chat_conversation(body: ChatBody) -> ConversationFields:
    """The fields of ``body`` that shape the prompt."""
    return ConversationFields(
        messages=body.messages, tools=body.tools, tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls, variables=body.chat_template_kwargs,
        documents=body.documents, reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message)
