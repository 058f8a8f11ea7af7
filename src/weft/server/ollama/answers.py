"""Ollama's API over the turn that all dialects share: /api/chat, /api/generate, and the lists of models.

    OllamaChatBody     --conversation--> ChatTurn --prepare_turn--> PreparedTurn \\
    OllamaGenerateBody ----------------> the same, with one message                >-- OllamaJob --> lines
    raw                ----------------> RawTurn: the prompt as it is             /

A stream has one JSON object per line. The last one has ``done``, the reason and the counts. A tool call is sent when it
is complete, with a number by which clients tell the calls of a stream apart. Times are nanoseconds.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from weft.default_sampling import OLLAMA_SAMPLING
from weft.errors import ConfigError, RequestError, WeftError
from weft.info import ModelInfo
from weft.server.chat_turn import ChatTurn, PreparedTurn, prepare_turn
from weft.server.generation import Generation
from weft.server.models import HostedModel, KeepAlive, ListedModel
from weft.server.ollama.protocol import (
    UNSERVED_IN_OLLAMA,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    error_line,
    max_tokens,
    read_options,
    sampling_fields,
    served_name,
)
from weft.server.presets import SAMPLING_NAMES, Preset
from weft.server.protocol import Streaming, grammar_of, sampling_params
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sse import StreamedJob, Way
from weft.server.truncation import fitted
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.choices import Piece
from weft.text.current_request import note_ignored
from weft.text.dialect import AnswerBlock, BlockEvent, arguments_of
from weft.text.pictures import PicturePart
from weft.text.prompt import Prompt
from weft.text.tokenizer import banned_sequences
from weft.units import parse_duration

_EFFORTS = {"low": 1024, "medium": 4096, "high": 16384}
"""Most tokens of the reasoning at each level of ``think``, for templates that do not read the level."""
_REASONS = {"length": "length"}
"""Ollama's reasons by weft's reasons; every other end, tool calls included, is "stop"."""
_NEVER = "2318-04-04T00:00:00Z"
"""Value of ``expires_at`` for a model that stays in memory."""
_encoder = msgspec.json.Encoder()


class RawTurn:
    """A prompt without a template, with the methods of ``PreparedTurn`` that a job uses."""

    def __init__(self, model: ServedModel, name: str, generation: Generation) -> None:
        self.model, self.name, self.generation = model, name, generation
        self._block = AnswerBlock("text", 0)

    def read(self, piece: Piece) -> list[BlockEvent]:
        return [BlockEvent("delta", self._block, piece.text)] if piece.text else []

    def finish_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason


class OllamaJob(StreamedJob):
    """One request to Ollama's API. ``chat``: the answer is a message, else text. ``prompt``: its tokens, then the
    answer's, are the ``context`` of the last line."""

    def __init__(
        self, turn: PreparedTurn | RawTurn, *, chat: bool, shows_thinking: bool, prompt: Prompt | None = None
    ) -> None:
        self._turn = turn
        self._chat = chat
        self._shows_thinking = shows_thinking
        self._context = None if prompt is None else list(prompt.tokens)
        self.generation = turn.generation

    async def answer(self) -> bytes:
        [piece] = await self.generation.whole()
        self._goes_on(piece)
        parts = list(self._parts(self._turn.read(piece)))
        said: dict[str, Any] = {"content": "".join(part.get("content", "") for part in parts)}
        if thinking := "".join(part.get("thinking", "") for part in parts):
            said["thinking"] = thinking
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            said["tool_calls"] = calls
        return _encoder.encode({**self._said(said), **self._end(piece)})

    def part(self, pieces: list[Piece]) -> bytes:
        lines: list[dict[str, Any]] = []
        for piece in pieces:
            self._goes_on(piece)
            parts = self._parts(self._turn.read(piece))
            lines += [{**self._said(part), "done": False} for part in parts]
            if piece.finish_reason is not None:
                lines.append({**self._said({"content": ""}), **self._end(piece)})
        return b"".join(_encoder.encode(line) + b"\n" for line in lines)

    def failed(self, error: WeftError) -> bytes:
        return error_line(error) + b"\n"

    def _goes_on(self, piece: Piece) -> None:
        if self._context is not None:
            self._context += piece.tokens

    def _parts(self, events: Iterable[BlockEvent]) -> Iterable[dict[str, Any]]:
        """Yield the fields that each event adds to a message."""
        for event in events:
            if event.block.is_call:
                if event.phase == "stop":
                    yield {"content": "", "tool_calls": [_call(event.block)]}
            elif event.phase == "delta" and event.block.kind == "text":
                yield {"content": event.delta}
            elif event.phase == "delta" and self._shows_thinking:
                yield {"content": "", "thinking": event.delta}

    def _said(self, part: dict[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._turn.name, "created_at": _moment(time.time())}
        if self._chat:
            return {**line, "message": {"role": "assistant", **part}}
        line["response"] = part["content"]
        return {**line, "thinking": part["thinking"]} if "thinking" in part else line

    def _end(self, piece: Piece) -> dict[str, Any]:
        usage, times = self.generation.usage(), self.generation.outcome(stream=False)
        ended_s = max(times.last_s, times.arrived_s)
        first_s = ended_s if times.first_s is None else times.first_s
        began_s = times.arrived_s if times.began_s is None else times.began_s
        context = {} if self._context is None else {"context": self._context}
        return {
            "done": True,
            "done_reason": _REASONS.get(self._turn.finish_reason(piece) or "", "stop"),
            **context,
            "total_duration": _ns(ended_s - times.arrived_s),
            "load_duration": _ns(self.generation.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - began_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(ended_s - first_s),
        }


async def prepare_ollama_chat(service: Service, body: OllamaChatBody) -> OllamaJob:
    """Prepare a request. Raise as ``prepare_turn``, and RequestError for a prompt beyond ``num_ctx``."""
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    return await _job(service, body, messages, tools=body.tools, chat=True)


async def prepare_ollama_generate(service: Service, body: OllamaGenerateBody) -> OllamaJob:
    """Prepare a request, as ``prepare_ollama_chat`` does."""
    if body.raw:
        return await _raw(service, body)
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    if body.images and body.context:
        raise RequestError(
            "images together with context are not served; send the conversation to /api/chat", param="images"
        )
    question = _message(0, OllamaMessage(role="user", content=body.prompt, images=body.images))
    return await _job(service, body, [*system, question], chat=False, before=body.context)


OLLAMA_CHAT = Way(OllamaChatBody, UNSERVED_IN_OLLAMA, prepare_ollama_chat)
OLLAMA_GENERATE = Way(OllamaGenerateBody, UNSERVED_IN_OLLAMA, prepare_ollama_generate)


async def _job(
    service: Service,
    body: OllamaBody,
    messages: list[ChatMessage],
    *,
    chat: bool,
    tools: list[Any] | None = None,
    before: list[int] | None = None,
) -> OllamaJob:
    options = read_options(body.options)
    model = await service.model_for(served_name(body.model))
    think, effort = _think(body, model)
    budget = None if effort is None or model.renderer.reads("reasoning_effort") else _EFFORTS[effort]
    turn = await prepare_turn(
        service,
        ChatTurn(
            conversation=ConversationFields(
                messages=messages,
                tools=tools,
                reasoning_effort=effort if budget is None else None,
                effort_field="think",
                thinking_token_budget=budget,
                budget_field="think",
                variables=None if think is None else {"enable_thinking": think},
            ),
            fields=sampling_fields(body, options, model=served_name(body.model)),
            max_tokens=max_tokens(options),
            prompt_field="messages" if chat else "prompt",
            answer_field="options.num_predict",
            context_max=options.num_ctx,
            before=before or [],
            own_sampling=OLLAMA_SAMPLING,
        ),
    )
    return OllamaJob(
        turn, chat=chat, shows_thinking=think is not False, prompt=None if chat or turn.prompt.pictures else turn.prompt
    )


async def _raw(service: Service, body: OllamaGenerateBody) -> OllamaJob:
    options = read_options(body.options)
    model = await service.model_for(served_name(body.model))
    if body.system:
        raise RequestError("system goes into the chat template, which raw leaves out", param="system")
    if body.images:
        raise RequestError("images go into the chat template, which raw leaves out", param="images")
    if body.context:
        raise RequestError("context continues a conversation, which raw does not read", param="context")
    await model.renderer.check_text(body.prompt, param="prompt")
    fields = sampling_fields(body, options, model=served_name(body.model))
    prompt = Prompt(await model.renderer.encode(body.prompt, add_special_tokens=True), body.prompt)
    prompt = fitted(prompt, fields, model, answer_tokens=1, num_ctx=options.num_ctx)
    sampling = sampling_params(
        fields,
        {**OLLAMA_SAMPLING, **model.sampling_defaults},
        max_tokens=max_tokens(options),
        grammar=grammar_of(fields, model.renderer.tokenizer.added_id),
        n=None,
        logprobs=None,
        prompt_logprobs=None,
        banned=banned_sequences(None, model.renderer.tokenizer),
    )
    generation = Generation(
        service,
        model,
        [prompt],
        [sampling],
        priority=0,
        cache_salt=body.cache_salt or "",
        answer_field="options.num_predict",
        stream=Streaming(bool(fields.stream), fields.stream_interval),
    )
    return OllamaJob(RawTurn(model, model.name_for(fields.model), generation), chat=False, shows_thinking=False)


def keep_alive_of(keep_alive: str | float | None, model: HostedModel) -> KeepAlive:
    """Return how long the model stays. Raise RequestError. If the model is never unloaded, the field is reported as
    ignored."""
    if keep_alive is None:
        return msgspec.UNSET
    try:
        seconds = parse_duration(keep_alive, flag="keep_alive")
    except ConfigError as error:
        raise RequestError(error.message, param="keep_alive") from None
    if model.stays:
        note_ignored("keep_alive")
        return msgspec.UNSET
    return seconds


async def loaded_answer(service: Service, body: OllamaChatBody | OllamaGenerateBody) -> dict[str, Any] | None:
    """Return the answer to a request without messages or prompt, with which clients load or unload a model; None for
    other requests."""
    if body.messages if isinstance(body, OllamaChatBody) else body.prompt:
        return None
    requested = served_name(body.model)
    name, model = service.own_name(requested), service.host_of(requested)
    stays_s = keep_alive_of(body.keep_alive, model)
    unloads = body.keep_alive is not None and parse_duration(body.keep_alive, flag="keep_alive") == 0
    if unloads:
        model.unload_soon()
    else:
        (await model.enter(stays_s)).end()
    said = {"message": {"role": "assistant", "content": ""}} if isinstance(body, OllamaChatBody) else {"response": ""}
    return {
        "model": name,
        "created_at": _moment(time.time()),
        **said,
        "done": True,
        "done_reason": "unload" if unloads else "load",
    }


def _think(body: OllamaBody, model: ServedModel) -> tuple[bool | None, str | None]:
    """Return whether the model reasons first (None: the template's default), and the effort."""
    if isinstance(body.think, str) and body.think not in _EFFORTS:
        raise RequestError(f"think is {body.think[:50]!r}; it is true, false, {', '.join(_EFFORTS)}", param="think")
    if body.think and model.renderer.dialect.reasoning is None:
        raise RequestError(
            f"{model.name} does not support thinking: its chat template has no reasoning",
            param="think",
            code="unsupported_parameter",
        )
    if isinstance(body.think, str):
        return True, body.think
    return body.think, None


def _message(index: int, turn: OllamaMessage) -> ChatMessage:
    message = ChatMessage(role=turn.role, content=turn.content)
    if turn.images:
        message.content = [
            PicturePart(f"data:;base64,{data}", f"messages[{index}].images[{number}]")
            for number, data in enumerate(turn.images)
        ]
        message.content += [{"type": "text", "text": turn.content}] if turn.content else []
    if turn.tool_calls:
        message.tool_calls = [
            _given_call(f"messages[{index}].tool_calls[{number}]", call, number)
            for number, call in enumerate(turn.tool_calls)
        ]
    if turn.thinking:
        message.reasoning_content = turn.thinking
    if turn.role == "tool":
        message.name = turn.tool_name
        message.tool_call_id = turn.tool_call_id
    return message


def _given_call(place: str, call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.function.name is missing", param=place)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {
        "id": str(call.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _call(block: AnswerBlock) -> dict[str, Any]:
    return {
        "id": block.call_id,
        "function": {"index": block.call_index, "name": block.name, "arguments": arguments_of(block.text)},
    }


def model_card(listed: ListedModel) -> dict[str, Any]:
    """Return the model as /api/tags lists it. ``digest``: of the settings that determine the output; known once the
    model was loaded."""
    info = listed.info
    decisive = [sorted(info.identity.items()) or info.directory, listed.adapter, listed.preset]
    return {
        "name": listed.name,
        "model": listed.name,
        "modified_at": _moment(listed.created_s),
        "size": info.weights_bytes,
        "digest": hashlib.sha256(_encoder.encode(decisive)).hexdigest(),
        "details": _details(info, listed.parent),
    }


def running_cards(service: Service) -> list[dict[str, Any]]:
    """Return the models in memory, and created names of these models, as /api/ps lists them. Raise
    EngineUnavailableError, PresetStoreError."""
    cards, now_s = [], time.monotonic()
    for listed in service.listed():
        model = service.models.find(listed.name if listed.preset is None else listed.preset.model)
        if model.fleet is not None and (listed.name == model.name or listed.preset is not None):
            expires_s = None if model.resident is None else model.resident.expires_s
            cards.append(_running_card(listed, None if expires_s is None else time.time() + expires_s - now_s))
    return cards


def _running_card(listed: ListedModel, expires_s: float | None) -> dict[str, Any]:
    info = listed.info
    in_vram = info.weights_bytes if info.device.startswith("cuda") else 0
    return {
        **model_card(listed),
        "size_vram": in_vram,
        "expires_at": _NEVER if expires_s is None else _moment(expires_s),
        "context_length": info.sizes.max_model_len,
    }


def show_answer(model: ServedModel) -> dict[str, Any]:
    info = model.info
    capabilities = (
        ["completion"]
        if info.generates
        else ["rerank" if info.score_labels or model.pooler.settings.late is not None else "embedding"]
    )
    capabilities += ["tools"] * model.renderer.dialect.template_takes_tools
    capabilities += ["vision"] * (model.renderer.pictures is not None)
    capabilities += ["thinking"] * (model.renderer.dialect.reasoning is not None)
    preset, adapter = model.preset, model.adapter
    parent = preset.model if preset is not None else info.name if adapter is not None else None
    lines = _parameter_lines(info.default_sampling, preset)
    return {
        "modelfile": _modelfile(model, lines),
        "details": _details(info, parent),
        "capabilities": capabilities,
        "parameters": "\n".join(lines),
        "template": "" if preset is None else preset.template,
        "modified_at": _moment(model.created_s if preset is None else preset.created_s),
        **_said_by(preset),
        "model_info": {
            "general.architecture": info.family,
            f"{info.family}.context_length": info.sizes.max_model_len,
            f"{info.family}.vocab_size": info.vocab_size,
        },
    }


def _parameter_lines(defaults: Mapping[str, Any], preset: Preset | None) -> list[str]:
    """Return parameters in Ollama's text form; each stop string has a line of its own."""
    theirs = {ours: name for name, ours in SAMPLING_NAMES.items()}
    chosen = {theirs.get(name, name): value for name, value in defaults.items()}
    chosen |= {} if preset is None else preset.parameters
    return [
        f"{name} {msgspec.json.encode(item).decode() if isinstance(item, str) else item}"
        for name, value in chosen.items()
        for item in (value if isinstance(value, list) else [value])
    ]


def _modelfile(model: ServedModel, parameters: list[str]) -> str:
    preset = model.preset
    if preset is None:
        adapter = "" if model.adapter is None else f"\nADAPTER {model.adapter.name}"
        return f"FROM {model.info.name}{adapter}"
    quoted = [("TEMPLATE", preset.template), ("SYSTEM", preset.system)]
    return "\n".join(
        [
            f"FROM {preset.model}",
            *(f'{word} """{text}"""' for word, text in quoted if text),
            *(f"PARAMETER {line}" for line in parameters),
            *(f"MESSAGE {message.role} {message.content}" for message in preset.messages),
        ]
    )


def _said_by(preset: Preset | None) -> dict[str, Any]:
    if preset is None:
        return {}
    said = {
        "system": preset.system,
        "license": "\n".join(preset.license),
        "messages": [{"role": message.role, "content": message.content} for message in preset.messages],
    }
    return {name: value for name, value in said.items() if value}


def _details(info: ModelInfo, parent: str | None) -> dict[str, Any]:
    return {
        "parent_model": parent or "",
        "format": "gguf" if info.directory.endswith(".gguf") else "safetensors",
        "family": info.family,
        "families": [info.family],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
