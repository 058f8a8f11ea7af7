"""POST /v1/chat/completions: messages in, an assistant message out.

Parse -> chat template -> tokens -> Generation -> one JSON object, or a stream: a first chunk per choice
with the role, then text, the last chunk of a choice with its ``finish_reason``, usage if asked, [DONE].
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType

from weft.engine.choices import Piece
from weft.errors import RequestError
from weft.server.generation import Generation, Prompt, Usage
from weft.server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, namer, prompt_logprobs
from weft.server.protocol import ChatBody, refuse_stream_fields, sampling_params
from weft.server.service import ServedModel, Service
from weft.server.sse import DONE, sse_line


class ChatAnswer(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str


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

    def __init__(self, service: Service, model: ServedModel, body: ChatBody, prompt: Prompt) -> None:
        self._body = body
        self._model = model
        self._prompt = prompt
        self._id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created_s = int(time.time())
        self._name = service.name_of(model, body.model)
        self._namer = namer(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids), escape_bytes=False)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._top = body.top_logprobs or 0
        sampling = sampling_params(body, model.sampling_defaults, max_tokens=max_tokens,
                                   logprobs=self._top if body.logprobs else None)
        self.generation = Generation(service, model, [prompt], [sampling], priority=body.priority or 0,
                                     cache_salt=body.cache_salt or "")

    async def answer(self) -> bytes:
        generation, body = self.generation, self._body
        choices = []
        for piece in await generation.whole():
            choices.append(ChatChoice(index=piece.index, message=ChatAnswer(content=piece.text),
                                      logprobs=self._logprobs(piece), finish_reason=piece.finish_reason,
                                      stop_reason=piece.stop_reason,
                                      token_ids=piece.tokens if body.return_token_ids else UNSET))
        response = ChatCompletion(id=self._id, created=self._created_s, model=self._name, choices=choices,
                                  usage=generation.usage())
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
            chunk = ChatChunk(id=self._id, created=self._created_s, model=self._name, choices=choices)
            if always or (with_usage and not choices):
                chunk.usage = generation.usage()
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
                yield b"".join(line([self._delta(piece)]) for piece in pieces)
            if with_usage:
                yield line([])
            yield DONE
        finally:
            generation.close()

    def _delta(self, piece: Piece) -> DeltaChoice:
        choice = DeltaChoice(index=piece.index, delta=Delta(), logprobs=self._logprobs(piece),
                             finish_reason=piece.finish_reason)
        if piece.text:
            choice.delta.content = piece.text
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(piece.logprobs, self._model.tokenizer, self._namer, self._top)


async def prepare_chat(service: Service, body: ChatBody) -> ChatJob:
    """Raises RequestError, UnknownModelError, EngineUnavailableError."""
    refuse_stream_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs with stream is not supported", param="prompt_logprobs",
                           code="unsupported_parameter")
    model = service.model_for(body.model)
    text = model.prompt_text(body)
    tokens, boundaries = await model.encode_chat(body, text, add_special_tokens=bool(body.add_special_tokens))
    return ChatJob(service, model, body, Prompt(tokens, text, boundaries))
