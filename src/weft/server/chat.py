"""POST /v1/chat/completions: messages in, an assistant message out.

Parse -> chat template -> tokens -> Generation -> one JSON object, or a stream: a first chunk per choice
with the role, then text, the last chunk of a choice with its ``finish_reason``, usage if asked, [DONE].

    Piece --AnswerReader (weft.text.dialect)--> reasoning | content | tool calls

Reasoning goes out under both names that clients look for, ``reasoning`` and ``reasoning_content``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType

from weft.engine.choices import Piece
from weft.errors import RequestError
from weft.request import LOGPROBS_MAX
from weft.server.generation import CompletionTokensDetails, Generation, Prompt, Usage
from weft.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, namer, prompt_logprobs
from weft.server.protocol import ChatBody, refuse_stream_fields, sampling_params
from weft.server.service import ServedModel, Service
from weft.server.sse import DONE, sse_line
from weft.server.structured import grammar_of
from weft.server.truncation import check_truncation, truncated
from weft.text.bad_words import banned_sequences
from weft.text.dialect import AnswerPlan, Heard
from weft.text.tools.reader import CallDelta


class Function(msgspec.Struct, kw_only=True):
    """``name`` is left out behind the first delta of a call. ``arguments``: JSON text, in a stream a part."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """``index`` is in streams only, where ``id`` and ``type`` are in the first delta of a call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


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

    def __init__(self, service: Service, model: ServedModel, body: ChatBody, prompt: Prompt,
                 plan: AnswerPlan) -> None:
        self._body = body
        self._model = model
        self._prompt = prompt
        self._id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self.name = service.name_of(model, body.model)
        self._namer = namer(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids), escape_bytes=False)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._top = body.top_logprobs or 0
        sampling = sampling_params(body, model.sampling_defaults, max_tokens=max_tokens,
                                   logprobs=self._top if body.logprobs else None, grammar=plan.grammar,
                                   banned=banned_sequences(body.bad_words, model.tokenizer))
        self.generation = Generation(service, model, [prompt], [sampling], priority=body.priority or 0,
                                     cache_salt=body.cache_salt or "",
                                     decoder=model.tokenizer.showing(plan.shown_ids), prompt_field="messages")
        self.generation.check_logprob_count(streamed=bool(body.stream), field="top_logprobs")
        self._with_reasoning = body.include_reasoning is not False
        self._readers = [plan.reader(eager=bool(body.stream)) for _ in self.generation.choices]

    async def answer(self) -> bytes:
        generation, body = self.generation, self._body
        choices = []
        for piece in await generation.whole():
            await asyncio.sleep(0)  # a choice with many logprobs takes long: others are served between two
            choices.append(ChatChoice(index=piece.index, message=self._message(piece),
                                      logprobs=self._logprobs(piece), finish_reason=self.reason(piece),
                                      stop_reason=piece.stop_reason,
                                      token_ids=piece.tokens if body.return_token_ids else UNSET))
        response = ChatCompletion(id=self._id, created=self._created_s, model=self.name, choices=choices,
                                  usage=self._usage())
        if body.return_token_ids:
            response.prompt_token_ids = self._prompt.tokens
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
            chunk = ChatChunk(id=self._id, created=self._created_s, model=self.name, choices=choices)
            if always or (with_usage and not choices):
                chunk.usage = self._usage()
            elif with_usage:
                chunk.usage = None
            if first and body.return_token_ids:
                chunk.prompt_token_ids = self._prompt.tokens
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

    def read(self, piece: Piece) -> Heard:
        """The reasoning, content and calls in a piece of an answer; each piece is read once, in order."""
        last = piece.finish_reason is not None
        heard = self._readers[piece.index].read(piece.text, piece.tokens, last=last)
        if not self._with_reasoning:
            heard.reasoning = ""
        return heard

    def reason(self, piece: Piece) -> str | None:
        """The field's ``finish_reason``, after the piece was read."""
        called = self._readers[piece.index].call_count > 0
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _message(self, piece: Piece) -> ChatAnswer:
        heard = self.read(piece)
        answer = ChatAnswer(content=heard.content)
        if heard.reasoning:
            answer.reasoning = answer.reasoning_content = heard.reasoning
        calls: dict[int, ToolCall] = {}
        for delta in heard.calls:
            call = calls.setdefault(delta.index, ToolCall(type="function", function=Function()))
            if delta.name is not None and delta.call_id is not None:
                call.id, call.function.name = delta.call_id, delta.name
            call.function.arguments += delta.arguments
        if calls:
            answer.tool_calls = list(calls.values())
            answer.content = heard.content or None
        return answer

    def _delta(self, piece: Piece) -> DeltaChoice | None:
        heard = self.read(piece)
        choice = DeltaChoice(index=piece.index, delta=Delta(), logprobs=self._logprobs(piece),
                             finish_reason=self.reason(piece))
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

    def _usage(self) -> Usage:
        reasoned = sum(reader.reasoning_tokens for reader in self._readers)
        details = CompletionTokensDetails(reasoning_tokens=reasoned)
        return msgspec.structs.replace(self.generation.usage(), completion_tokens_details=details)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._model.tokenizer, self._namer, self._top)


def _call_delta(delta: CallDelta) -> ToolCall:
    call = ToolCall(index=delta.index, function=Function(arguments=delta.arguments))
    if delta.name is not None and delta.call_id is not None:
        call.id, call.type, call.function.name = delta.call_id, "function", delta.name
    return call


async def prepare_chat(service: Service, body: ChatBody) -> ChatJob:
    """Raises RequestError, UnknownModelError, EngineUnavailableError."""
    refuse_stream_fields(body)
    check_truncation(body, is_chat=True)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
        raise RequestError(f"top_logprobs is {body.top_logprobs}; it must be at least 0 and at most "
                           f"{LOGPROBS_MAX}", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs with stream is not supported", param="prompt_logprobs",
                           code="unsupported_parameter")
    model = service.model_for(body.model)
    request, prompt = await model.write_chat(body)
    is_cut = body.truncate_prompt_tokens is not None
    if not is_cut:
        await model.check_text(prompt.text, param="messages")
    plan = request.plan(model.dialect, prompt.text, grammar_of(body))
    encoded = await model.encode_chat(prompt, add_special_tokens=bool(body.add_special_tokens),
                                      is_bounded=not is_cut)
    marks = encoded.marks + (body.cache_boundaries or [])
    whole = Prompt(encoded.tokens, prompt.text, encoded.boundaries, marks)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    cut = truncated(whole, body, context_tokens=model.info.max_model_len,
                    answer_tokens=max(body.min_tokens or 0, 1) if max_tokens is None else max_tokens)
    return ChatJob(service, model, body, cut, plan)
