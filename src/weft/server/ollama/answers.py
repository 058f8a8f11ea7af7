"""Ollama's API over the turn that all dialects share: /api/chat, /api/generate, and the lists of models.

    OllamaChatBody     --conversation--> ChatTurn --prepare_turn--> PreparedTurn \\
    OllamaGenerateBody ----------------> the same, with one message                >-- OllamaJob --> lines
    raw                ----------------> RawTurn: the prompt as it is             /

A stream is one JSON object a line. The last one has ``done``, the reason and the counts. A call of a tool is
sent when it is complete. Times are nanoseconds. The load time is 0, as the model is loaded before the server
answers.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec

from weft.errors import RequestError, WeftError
from weft.server.errors import bug
from weft.server.generation import ChatTurn, Generation, PreparedTurn, Prompt, prepare_turn
from weft.server.ollama.protocol import (
    UNSERVED_IN_OLLAMA,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    error_line,
    max_tokens,
    read_options,
    sampling_fields,
    served_name,
)
from weft.server.protocol import grammar_of, sampling_params
from weft.server.service import ServedModel, Service
from weft.server.sse import Way
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.choices import Piece
from weft.text.dialect import AnswerBlock, BlockEvent, arguments_of
from weft.text.pictures import PicturePart
from weft.text.tokenizer import banned_sequences

_EFFORTS = ("low", "medium", "high")
_REASONS = {"length": "length"}
"""Ollama has "stop" for every other end, calls included."""
_NEVER = "2318-04-04T00:00:00Z"
"""``expires_at``: the model stays in memory."""
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


class OllamaJob:
    """``chat``: the answer is a message, else text."""

    def __init__(self, turn: PreparedTurn | RawTurn, *, chat: bool, shows_thinking: bool) -> None:
        self._turn = turn
        self._chat = chat
        self._shows_thinking = shows_thinking
        self.generation = turn.generation

    async def answer(self) -> bytes:
        [piece] = await self.generation.whole()
        parts = list(self._parts(self._turn.read(piece)))
        said: dict[str, Any] = {"content": "".join(part.get("content", "") for part in parts)}
        if thinking := "".join(part.get("thinking", "") for part in parts):
            said["thinking"] = thinking
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            said["tool_calls"] = calls
        return _encoder.encode({**self._said(said), **self._end(piece)})

    async def lines(self) -> AsyncGenerator[bytes, None]:
        try:
            async for pieces in self.generation.pieces():
                out = []
                for piece in pieces:
                    parts = self._parts(self._turn.read(piece))
                    out += [{**self._said(part), "done": False} for part in parts]
                    if piece.finish_reason is not None:
                        out.append({**self._said({"content": ""}), **self._end(piece)})
                if out:
                    yield b"".join(_encoder.encode(line) + b"\n" for line in out)
        except Exception as error:
            failure = error if isinstance(error, WeftError) else bug(error)
            yield error_line(failure) + b"\n"
            if failure is not error:
                raise

    def _parts(self, events: Iterable[BlockEvent]) -> Iterable[dict[str, Any]]:
        """What each event adds to a message."""
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
        return {"done": True, "done_reason": _REASONS.get(self._turn.finish_reason(piece) or "", "stop"),
                "total_duration": _ns(ended_s - times.arrived_s), "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": _ns(first_s - began_s),
                "eval_count": usage.completion_tokens, "eval_duration": _ns(ended_s - first_s)}


async def prepare_ollama_chat(service: Service, body: OllamaChatBody) -> OllamaJob:
    """Raises what ``prepare_turn`` raises, and RequestError for a prompt beyond ``num_ctx``."""
    messages = [_message(at, message) for at, message in enumerate(body.messages)]
    return await _job(service, body, messages, tools=body.tools, chat=True)


async def prepare_ollama_generate(service: Service, body: OllamaGenerateBody) -> OllamaJob:
    """As ``prepare_ollama_chat``."""
    if body.raw:
        return await _raw(service, body)
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    asked = _message(0, OllamaMessage(role="user", content=body.prompt, images=body.images))
    return await _job(service, body, [*system, asked], chat=False)


OLLAMA_CHAT = Way(OllamaChatBody, UNSERVED_IN_OLLAMA, prepare_ollama_chat)
OLLAMA_GENERATE = Way(OllamaGenerateBody, UNSERVED_IN_OLLAMA, prepare_ollama_generate)


async def _job(service: Service, body: OllamaBody, messages: list[ChatMessage], *, chat: bool,
               tools: list[Any] | None = None) -> OllamaJob:
    options = read_options(body.options)
    model = service.model_for(served_name(body.model))
    think, effort = _think(body, model)
    turn = await prepare_turn(service, ChatTurn(
        conversation=ConversationFields(
            messages=messages, tools=tools, reasoning_effort=effort,
            variables=None if think is None else {"enable_thinking": think}),
        fields=sampling_fields(body, options, model=served_name(body.model)), max_tokens=max_tokens(options),
        prompt_field="messages" if chat else "prompt"))
    _check_context(turn.prompt, options)
    return OllamaJob(turn, chat=chat, shows_thinking=think is not False)


async def _raw(service: Service, body: OllamaGenerateBody) -> OllamaJob:
    options = read_options(body.options)
    model = service.model_for(served_name(body.model))
    if body.system:
        raise RequestError("system goes into the chat template, which raw leaves out", param="system")
    if body.images:
        raise RequestError("images go into the chat template, which raw leaves out", param="images")
    await model.check_text(body.prompt, param="prompt")
    prompt = Prompt(await model.encode(body.prompt, add_special_tokens=True), body.prompt)
    _check_context(prompt, options)
    fields = sampling_fields(body, options, model=served_name(body.model))
    sampling = sampling_params(fields, model.sampling_defaults, max_tokens=max_tokens(options),
                               grammar=grammar_of(fields), n=None, logprobs=None, prompt_logprobs=None,
                               banned=banned_sequences(None, model.tokenizer))
    generation = Generation(service, model, [prompt], [sampling], priority=0,
                            cache_salt=body.cache_salt or "")
    return OllamaJob(RawTurn(model, service.name_of(model, fields.model), generation), chat=False,
                     shows_thinking=False)


def loaded_answer(service: Service, body: OllamaChatBody | OllamaGenerateBody) -> dict[str, Any] | None:
    """The answer to a request without messages or prompt, by which clients load or unload a model; None for
    any other request."""
    if body.messages if isinstance(body, OllamaChatBody) else body.prompt:
        return None
    model = service.model_for(served_name(body.model))
    said = ({"message": {"role": "assistant", "content": ""}} if isinstance(body, OllamaChatBody)
            else {"response": ""})
    name = service.name_of(model, served_name(body.model))
    return {"model": name, "created_at": _moment(time.time()), **said, "done": True,
            "done_reason": "unload" if body.keep_alive in (0, "0", "0s") else "load"}


def _think(body: OllamaBody, model: ServedModel) -> tuple[bool | None, str | None]:
    """(whether the model reasons first, None for the template's default; the effort)."""
    if isinstance(body.think, str) and body.think not in _EFFORTS:
        raise RequestError(f"think is {body.think[:50]!r}; it is true, false, {', '.join(_EFFORTS)}",
                           param="think")
    if body.think and model.dialect.reasoning is None:
        raise RequestError(f"{model.name} does not support thinking: its chat template has no reasoning",
                           param="think", code="unsupported_parameter")
    if isinstance(body.think, str):
        return True, body.think
    return body.think, None


def _check_context(prompt: Prompt, options: OllamaOptions) -> None:
    if options.num_ctx is not None and len(prompt.tokens) >= options.num_ctx:
        raise RequestError(f"the prompt has {len(prompt.tokens)} tokens and options.num_ctx is "
                           f"{options.num_ctx}; this server drops no part of a prompt: raise num_ctx or "
                           "leave it out",
                           param="options.num_ctx", code="context_length_exceeded")


def _message(at: int, given: OllamaMessage) -> ChatMessage:
    message = ChatMessage(role=given.role, content=given.content)
    if given.images:
        message.content = [PicturePart(f"data:;base64,{data}", f"messages[{at}].images[{number}]")
                           for number, data in enumerate(given.images)]
        message.content += [{"type": "text", "text": given.content}] if given.content else []
    if given.tool_calls:
        message.tool_calls = [_given_call(f"messages[{at}].tool_calls[{number}]", call, number)
                              for number, call in enumerate(given.tool_calls)]
    if given.thinking:
        message.reasoning_content = given.thinking
    if given.role == "tool":
        message.name = given.tool_name
        message.tool_call_id = given.tool_call_id
    return message


def _given_call(place: str, call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.function.name is missing", param=place)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": str(call.get("id") or f"call_{number}"), "type": "function",
            "function": {"name": function["name"], "arguments": text}}


def _call(block: AnswerBlock) -> dict[str, Any]:
    return {"id": block.call_id, "function": {"name": block.name, "arguments": arguments_of(block.text)}}


def model_card(model: ServedModel, name: str) -> dict[str, Any]:
    """As /api/tags lists it. ``digest``: of what decides the model's tokens."""
    info = model.info
    decisive = [sorted(info.identity.items()), model.adapter]
    return {"name": name, "model": name, "modified_at": _moment(model.created_s), "size": info.weights_bytes,
            "digest": hashlib.sha256(_encoder.encode(decisive)).hexdigest(),
            "details": _details(model)}


def running_card(model: ServedModel, name: str) -> dict[str, Any]:
    """As /api/ps lists it."""
    in_vram = model.info.weights_bytes if model.info.device.startswith("cuda") else 0
    return {**model_card(model, name), "expires_at": _NEVER, "size_vram": in_vram,
            "context_length": model.info.sizes.max_model_len}


def show_answer(model: ServedModel) -> dict[str, Any]:
    info, defaults = model.info, model.sampling_defaults
    capabilities = ["completion"] if info.generates else ["rerank" if info.score_labels else "embedding"]
    capabilities += ["tools"] * model.dialect.template_takes_tools
    capabilities += ["vision"] * (model.pictures is not None)
    capabilities += ["thinking"] * (model.dialect.reasoning is not None)
    adapter = "" if model.adapter is None else f"\nADAPTER {model.adapter.name}"
    return {"modelfile": f"FROM {info.name}{adapter}", "details": _details(model),
            "capabilities": capabilities,
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": "", "modified_at": _moment(model.created_s),
            "model_info": {"general.architecture": info.family,
                           f"{info.family}.context_length": info.sizes.max_model_len,
                           f"{info.family}.vocab_size": info.vocab_size}}


def _details(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {"parent_model": info.name if model.adapter else "",
            "format": "gguf" if info.directory.endswith(".gguf") else "safetensors",
            "family": info.family, "families": [info.family], "parameter_size": "",
            "quantization_level": info.dtype}


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
