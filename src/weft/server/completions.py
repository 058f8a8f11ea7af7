"""POST /v1/completions: text or token ids in, text out.

body -> parsed -> prompts as tokens -> Generation -> one JSON object, or one SSE chunk per step and choice ``echo`` puts
the prompt before the text and, with ``logprobs``, the prompt's logprobs before the answer's; a stream sends both in its
first chunk.
"""

from __future__ import annotations

import asyncio
import time
from secrets import token_hex

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import RequestError
from weft.objects.conversations import continued_prompts
from weft.request import SamplingParams
from weft.server.generation import Generation, Usage, check_count
from weft.server.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, namer, prompt_logprobs
from weft.server.protocol import (
    COMPLETION_TOKENS_DEFAULT,
    UNSERVED_IN_COMPLETIONS,
    CompletionBody,
    Streaming,
    grammar_of,
    prompts_of,
    refuse_stream_fields,
    sampling_params,
    stream_usage,
)
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.continuing import session_of
from weft.server.sse import DONE, StreamedJob, Way, sse_line
from weft.server.truncation import fitted, tokens_after_cut
from weft.text.choices import Choice, Piece
from weft.text.prompt import Prompt
from weft.text.tokenizer import banned_sequences


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A complete answer or a chunk of a stream, which have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


_encoder = msgspec.json.Encoder()


class CompletionJob(StreamedJob):
    """One request to /v1/completions, prepared: ``generation`` is ready to start."""

    def __init__(self, service: Service, model: ServedModel, body: CompletionBody, prompts: list[Prompt]) -> None:
        self._body = body
        self._grammar = grammar_of(body, model.renderer.tokenizer.added_id)
        self._banned = banned_sequences(body.bad_words, model.renderer.tokenizer)
        self._model = model
        self._id = f"cmpl-{body.request_id or token_hex(16)}"
        self._created_s = int(time.time())
        self._name = model.name_for(body.model)
        self._echo = bool(body.echo)
        as_ids = bool(body.return_tokens_as_token_ids)
        self._namer = namer(model.renderer.tokenizer, as_ids=as_ids, escape_bytes=True)
        self.generation = Generation(
            service,
            model,
            prompts,
            [self._sampling(prompt) for prompt in prompts],
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            id_slot=body.id_slot,
            stream=Streaming(bool(body.stream), body.stream_interval),
        )
        self._shown_chars = [0] * len(self.generation.choices)
        self._started = [False] * len(self.generation.choices)
        self._last_usage, self._every_usage = stream_usage(body)
        self._no_usage = None if self._last_usage else UNSET

    async def answer(self) -> bytes:
        generation = self.generation
        pieces = await generation.whole()
        choices: list[CompletionChoice] = []
        for piece in pieces:
            if choices:  # encoding many logprobs takes long: let other requests run between two choices
                await asyncio.sleep(0)
            choices.append(self._choice(piece, first=True))
        return _encoder.encode(self._response(choices, generation.usage()))

    def part(self, pieces: list[Piece]) -> bytes:
        lines = []
        for piece in pieces:
            choice = self._choice(piece, first=not self._started[piece.index])
            self._started[piece.index] = True
            usage = self.generation.usage() if self._every_usage else self._no_usage
            lines.append(sse_line(_encoder.encode(self._response([choice], usage))))
        return b"".join(lines)

    async def end(self) -> bytes:
        if not self._last_usage:
            return DONE
        return sse_line(_encoder.encode(self._response([], self.generation.usage()))) + DONE

    def _sampling(self, prompt: Prompt) -> SamplingParams:
        body, info = self._body, self._model.info
        max_tokens = body.max_tokens
        if max_tokens is None:
            # The default is cut to the context; a prompt that leaves no room is refused by the engine.
            max_tokens = max(min(default_tokens(self._model), info.sizes.max_model_len - len(prompt.tokens)), 1)
            max_tokens = max(max_tokens, body.min_tokens or 0)
        sampling = sampling_params(
            body,
            self._model.sampling_defaults,
            max_tokens=max_tokens,
            grammar=self._grammar,
            n=body.n,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            banned=self._banned,
        )
        if self._echo and body.logprobs is not None:
            wanted = max(body.logprobs, body.prompt_logprobs or 0)
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=wanted)
        return sampling

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created_s, model=self._name, choices=choices, usage=usage)

    def _choice(self, piece: Piece, *, first: bool) -> CompletionChoice:
        """Return the choice of a piece. ``first``: nothing of this choice was sent before, so the prompt's part goes
        with it."""
        body = self._body
        prompt = self.generation.prompt_of(piece.index)
        source = self.generation.choices[piece.index]
        shown = CompletionChoice(
            index=piece.index, text=piece.text, finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
        )
        with_prompt = first and self._echo
        if with_prompt:
            shown.text = self._prompt_text(prompt) + piece.text
        if body.logprobs is not None:
            shown.logprobs = self._logprobs(piece, source, prompt if with_prompt else None)
        if body.return_token_ids:
            shown.token_ids = piece.tokens
            if first:
                shown.prompt_token_ids = prompt.tokens
        if body.prompt_logprobs is not None and first:
            shown.prompt_logprobs = prompt_logprobs(source.prompt_logprobs, self._namer, body.prompt_logprobs)
        self._shown_chars[piece.index] += len(shown.text)
        return shown

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._model.renderer.tokenizer.decode(prompt.tokens, skip_special_tokens=False)

    def _logprobs(self, piece: Piece, source: Choice, prompt: Prompt | None) -> CompletionLogprobs:
        assert self._body.logprobs is not None
        tokens, entries = list(piece.tokens), list(piece.logprobs)
        if prompt is not None:
            tokens = [*prompt.tokens, *tokens]
            return completion_logprobs(
                [*source.prompt_logprobs, *entries],
                tokens,
                self._model.renderer.tokenizer,
                self._namer,
                self._body.logprobs,
                text_offset=0,
            )
        return completion_logprobs(
            entries,
            tokens,
            self._model.renderer.tokenizer,
            self._namer,
            self._body.logprobs,
            text_offset=self._shown_chars[piece.index],
        )


def default_tokens(model: ServedModel) -> int:
    """Return the default of ``max_tokens``, for a request that names no length."""
    return int(model.sampling_defaults.get("max_tokens", COMPLETION_TOKENS_DEFAULT))


async def prepare_completion(service: Service, body: CompletionBody) -> CompletionJob:
    """Prepare a request. Raise RequestError, UnknownModelError, EngineUnavailableError."""
    refuse_stream_fields(body)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs with stream is not supported; echo with logprobs streams them",
            param="prompt_logprobs",
            code="unsupported_parameter",
        )
    model = await service.model_for(body.model)
    cut_to = tokens_after_cut(model, body, is_chat=False)
    prompts = []
    marks = body.cache_boundaries or []
    listed = prompts_of(body.prompt)
    check_count(len(listed), model.info.sizes.queue_max)  # before the work of tokenizing them
    for text_or_ids in listed:
        if isinstance(text_or_ids, str):
            add_special_tokens = body.add_special_tokens is not False and body.session is None
            if cut_to is None:
                await model.renderer.check_text(text_or_ids, param="prompt")
                text, places = text_or_ids, marks
            else:
                at_start = body.truncation_side == "right"
                text = await model.renderer.part_for_cut(text_or_ids, cut_to, at_start=at_start)
                places = marks if text is text_or_ids or at_start else []
            tokens = await model.renderer.encode(
                text, add_special_tokens=add_special_tokens, salt=body.cache_salt or ""
            )
            prompts.append(Prompt(tokens, text_or_ids, marks=places))
        else:
            model.check_ids(text_or_ids, param="prompt")
            prompts.append(Prompt(text_or_ids, marks=marks))
    if body.session is not None:
        prompts = continued_prompts(await session_of(service, body, body.session, model), prompts)
    answer_tokens = default_tokens(model) if body.max_tokens is None else body.max_tokens
    prompts = [fitted(prompt, body, model, answer_tokens=answer_tokens) for prompt in prompts]
    return CompletionJob(service, model, body, prompts)


COMPLETIONS = Way(CompletionBody, UNSERVED_IN_COMPLETIONS, prepare_completion)
