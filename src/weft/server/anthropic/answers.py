"""The Messages dialect: a body becomes a ``ChatTurn``, and an answer becomes a Messages object or its events.

    system                       -> a system message at the same position, before or between the turns
    user: tool_result            -> a tool message for each result, before the text that follows
    assistant: text, tool_use    -> an assistant message with tool calls; thinking -> its reasoning
    a final assistant message    -> the beginning of the answer (``continue_final_message``)
    blocks of tools that another server ran -> left out, and reported as ignored

    message_start, content_block_start ... delta ... stop, message_delta, message_stop

``message_start`` waits for the first piece: only then does the server know how many tokens came from the cache.
``cache_creation_input_tokens`` are computed tokens before the client's last ``cache_control``.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import Any

import msgspec

from weft.errors import RequestError, WeftError
from weft.server.anthropic.protocol import UNSERVED_IN_MESSAGES, CountTokensBody, MessagesBody, MessageTurn, error_json
from weft.server.chat_turn import ChatTurn, PreparedTurn, prepare_turn
from weft.server.service import Service
from weft.server.sse import StreamedJob, Way, named_event
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.choices import Piece
from weft.text.current_request import note_ignored
from weft.text.dialect import AnswerBlock, BlockEvent, arguments_of
from weft.text.pictures import PicturePart

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encoder = msgspec.json.Encoder()


class MessagesJob(StreamedJob):
    """One request to /v1/messages, prepared: ``generation`` is ready to start."""

    def __init__(self, turn: PreparedTurn, body: MessagesBody) -> None:
        self._turn = turn
        self._marked = cache_marked(body)
        self._id = f"msg_{token_hex(16)}"
        self.generation = turn.generation
        self._started = False

    async def answer(self) -> bytes:
        [piece] = await self.generation.whole()
        content = [_block(block, block.text) for block in self._turn.read_whole(piece)]
        return _encoder.encode({**self._message(content), **self._stop(piece), "usage": self._usage()})

    def part(self, pieces: list[Piece]) -> bytes:
        events: list[dict[str, Any]] = []
        if not self._started:  # the first event has counts that come with the first piece
            message = {
                **self._message([]),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**self._usage(), "output_tokens": 0},
            }
            events.append({"type": "message_start", "message": message})
            self._started = True
        for piece in pieces:
            events += map(_event, self._turn.read(piece))
            if piece.finish_reason is not None:
                events.append({"type": "message_delta", "delta": self._stop(piece), "usage": self._usage()})
                events.append({"type": "message_stop"})
        return b"".join(named_event(event["type"], _encoder.encode(event)) for event in events)

    def failed(self, error: WeftError) -> bytes:
        return named_event("error", error_json(error))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._turn.name, "content": content}

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
        return {
            "input_tokens": usage.prompt_tokens - cached - created,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": created,
            "output_tokens": usage.completion_tokens,
        }


def _event(event: BlockEvent) -> dict[str, Any]:
    kind, index = event.block.kind, event.block.index
    if event.phase == "stop":
        return {"type": "content_block_stop", "index": index}
    if event.phase == "start":
        return {"type": "content_block_start", "index": index, "content_block": _block(event.block, "")}
    delta = (
        {"type": "thinking_delta", "thinking": event.delta}
        if kind == "reasoning"
        else {"type": "text_delta", "text": event.delta}
        if kind == "text"
        else {"type": "input_json_delta", "partial_json": event.delta}
    )
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments_of(text)}


async def prepare_messages(service: Service, body: MessagesBody) -> MessagesJob:
    """Prepare a request. Raise as ``prepare_turn``."""
    turn = await prepare_turn(service, messages_turn(body))
    if thinks(body.thinking) and turn.model.renderer.dialect.reasoning is None:
        note_ignored("thinking")
    return MessagesJob(turn, body)


MESSAGES = Way(MessagesBody, UNSERVED_IN_MESSAGES, prepare_messages)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("disabled", "enabled", "adaptive")

Block = dict[str, Any]


def messages_turn(body: MessagesBody) -> ChatTurn:
    """Return the turn of ``body``. Raise RequestError that names the block or field."""
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    stop = body.stop if body.stop_sequences is None else list(body.stop_sequences)
    fields = msgspec.structs.replace(body, stop=stop, response_format=_response_format(body))
    return ChatTurn(
        conversation=conversation(body), fields=fields, max_tokens=body.max_tokens, show_reasoning=thinks(body.thinking)
    )


def conversation(body: CountTokensBody) -> ConversationFields:
    """Return the fields that shape the prompt. Raise RequestError."""
    messages = [*_system(body.system)]
    for position, turn in enumerate(body.messages):
        messages += _turn(f"messages.{position}", turn)
    if messages and body.cache_control is not None:
        messages[-1].cache_control = body.cache_control
    last = messages[-1] if messages else None
    continued = last is not None and last.role == "assistant" and not last.tool_calls and bool(last.content)
    choice, several = _choice(body.tool_choice)
    return ConversationFields(
        messages=messages,
        continue_final_message=continued or None,
        tools=[_tool(f"tools.{index}", tool) for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=several,
        variables={"enable_thinking": thinks(body.thinking)},
        reasoning_effort=_effort(body.output_config),
        effort_field="output_config.effort",
        thinking_token_budget=_budget(body.thinking),
        budget_field="thinking.budget_tokens",
    )


def _effort(config: dict[str, Any] | None) -> str | None:
    effort = (config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("output_config.effort: expected str", param="output_config.effort")
    return effort


def _budget(thinking: Block | None) -> int | None:
    """Return the most tokens of reasoning that the client allows. Raise RequestError."""
    budget = (thinking or {}).get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool)):
        raise RequestError("thinking.budget_tokens: expected int", param="thinking.budget_tokens")
    return budget


def cache_marked(body: CountTokensBody) -> bool:
    """Return whether the client set a ``cache_control`` anywhere."""
    lists = [body.system, body.tools, *(turn.content for turn in body.messages)]
    return body.cache_control is not None or any(
        "cache_control" in block for blocks in lists if isinstance(blocks, list) for block in blocks
    )


_BILLING = "x-anthropic-billing-header:"
"""Beginning of a line that Claude Code puts in front of its instructions. Anthropic's server reads it for its accounts.
It depends on the first question of a conversation, so if it were in the prompt, no two conversations would share a
cached prefix."""


def _system(system: str | list[Block] | None) -> list[ChatMessage]:
    if isinstance(system, str) and system.startswith(_BILLING):
        note_ignored("system.billing_header")
        system = system.partition("\n")[2].lstrip("\n")
    if not system:
        return []
    if isinstance(system, str):
        return [ChatMessage(role="system", content=system)]
    blocks = [_text(f"system.{index}", block) for index, block in enumerate(system)]
    remaining = [block for block in blocks if not block["text"].startswith(_BILLING)]
    if len(remaining) < len(blocks):
        note_ignored("system.billing_header")
    return [ChatMessage(role="system", content=remaining)] if remaining else []


def _turn(place: str, turn: MessageTurn) -> list[ChatMessage]:
    if turn.role not in ("user", "assistant", "system"):
        raise RequestError(f"{place}.role is {turn.role!r}; it is user, assistant or system", param=f"{place}.role")
    if turn.content is None or isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content or "")]
    blocks = [(f"{place}.content.{index}", block) for index, block in enumerate(turn.content) if not _is_hosted(block)]
    if turn.role == "assistant":
        return [_assistant(blocks)]
    if turn.role == "system":
        return [ChatMessage(role="system", content=[_text(where, block) for where, block in blocks])]
    return _user(blocks)


_HOSTED_BLOCKS = (
    "server_tool_use",
    "mcp_tool_use",
    "container_upload",
    "compaction",
    "fallback",
    "tool_addition",  # every tool of the request is offered from the beginning
    "tool_removal",
)


def _is_hosted(block: Block) -> bool:
    """Return whether ``block`` comes from another server or from a tool that it ran. Such a block is reported as
    ignored."""
    kind = block.get("type")
    if not isinstance(kind, str) or not (kind in _HOSTED_BLOCKS or kind.endswith("_tool_result")):
        return False
    note_ignored(f"messages.{kind}")
    return True


def _user(blocks: Sequence[tuple[str, Block]]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    texts: list[Block | PicturePart] = []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                messages.append(ChatMessage(role="user", content=texts))
                texts = []
            messages.append(_tool_result(place, block))
        else:
            texts += _shown(place, block)
    if texts or not messages:
        messages.append(ChatMessage(role="user", content=texts))
    return messages


def _tool_result(place: str, block: Block) -> ChatMessage:
    name, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(name, str):
        raise RequestError(f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
    shown: str | list[Any]
    if content is None or isinstance(content, str):
        shown = content or ""
    elif isinstance(content, list) and all(isinstance(entry, dict) for entry in content):
        shown = [
            part
            for index, entry in enumerate(content)
            for part in _shown(f"{place}.content.{index}", entry, of_tool=True)
        ]
        if all(isinstance(entry, dict) for entry in shown):
            shown = "\n".join(entry["text"] for entry in shown)
    else:
        raise RequestError(f"{place}.content: expected text or a list of blocks", param=f"{place}.content")
    return ChatMessage(role="tool", tool_call_id=name, content=shown, cache_control=block.get("cache_control"))


def _shown(place: str, block: Block, *, of_tool: bool = False) -> list[Block | PicturePart]:
    """Return the parts of a block of the user or of a tool result. In a tool result a sentence replaces a document that
    is not text: an agent opened the file, and a refusal would end the conversation."""
    source = block.get("source")
    match block.get("type"):
        case "image":
            return [_image(place, block)]
        case "document" if (
            isinstance(source, dict) and isinstance(source.get("data"), str) and (source.get("type") == "text")
        ):
            return [{**_text(place, {**block, "type": "text", "text": source["data"]})}]
        case "document" if isinstance(source, dict) and isinstance(source.get("content"), list):
            return [part for index, inner in enumerate(source["content"]) for part in _shown(f"{place}.{index}", inner)]
        case "search_result" if isinstance(block.get("content"), list):
            return [part for index, inner in enumerate(block["content"]) for part in _shown(f"{place}.{index}", inner)]
        case "document" if of_tool:
            note_ignored("messages.document")
            return [{"type": "text", "text": "[a document, which this model cannot read]"}]
        case "tool_reference" if of_tool:
            return [{"type": "text", "text": str(block.get("tool_name", ""))}]
        case _:
            return [_text(place, block)]


def _assistant(blocks: Sequence[tuple[str, Block]]) -> ChatMessage:
    texts: list[Block] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for place, block in blocks:
        match block.get("type"):
            case "tool_use":
                calls.append(_tool_use(place, block))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(place, block))
    message = ChatMessage(role="assistant", content=texts or None)
    if calls:
        message.tool_calls = calls
    if thoughts:
        message.reasoning_content = "\n".join(thoughts)
    return message


def _tool_use(place: str, block: Block) -> dict[str, Any]:
    name, tool_input, call_id = block.get("name"), block.get("input"), block.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise RequestError(f"{place}: a tool_use block has an id, a name and an input object", param=place)
    arguments = tool_input if isinstance(tool_input, str) else msgspec.json.encode(tool_input).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(place: str, block: Block) -> Block:
    kind = block.get("type")
    if kind != "text":
        raise RequestError(
            f"{place} has type {kind!r}; text is read here, and pictures (image) in "
            "messages of the user and in tool_result blocks",
            param=place,
            code="unsupported_parameter",
        )
    if not isinstance(block.get("text"), str):
        raise RequestError(f"{place}.text: expected str", param=f"{place}.text")
    return {name: block[name] for name in ("type", "text", "cache_control") if block.get(name) is not None}


def _image(place: str, block: Block) -> PicturePart:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            url = f"data:{media_type};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise RequestError(
                f"{place}.source has type {kind!r}; it is base64, with media_type and data, or url, with url",
                param=f"{place}.source",
            )
    return PicturePart(url, place, block.get("cache_control"))


def _tool(place: str, tool: Block) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        if isinstance(kind, str) and "input_schema" not in tool:
            return {"type": kind}  # a tool that another server would run: left out, as in the other APIs
        raise RequestError(
            f"{place} has type {kind!r}; a tool with an input_schema has the type custom", param=f"{place}.type"
        )
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function.update({name: tool[name] for name in ("description", "strict") if name in tool})
    marked = {"cache_control": tool["cache_control"]} if tool.get("cache_control") is not None else {}
    return {"type": "function", "function": function, **marked}


def _choice(choice: Block | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return ``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    kind, several = choice.get("type"), not choice.get("disable_parallel_tool_use", False)
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, several
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type is {kind!r}; it is auto, any, tool or none", param="tool_choice.type")
    return _CHOICES[kind], several


def thinks(thinking: Block | None) -> bool:
    if thinking is None:
        return False
    if thinking.get("type") not in _THINKING:
        raise RequestError(
            f"thinking.type is {thinking.get('type')!r}; it is enabled, adaptive or disabled", param="thinking.type"
        )
    if thinking.get("display") == "omitted":
        # The reasoning is sent all the same: without it the next turn matches less of the cached prefix.
        note_ignored("thinking.display")
    return bool(thinking["type"] != "disabled")


def _response_format(body: MessagesBody) -> dict[str, Any] | None:
    """Return ``output_format``, or ``output_config.format``, as a response format: a JSON schema that the answer must
    match."""
    output_format = body.output_format or (body.output_config or {}).get("format")
    if output_format is None:
        return body.response_format
    if (
        not isinstance(output_format, dict)
        or output_format.get("type") != "json_schema"
        or "schema" not in output_format
    ):
        raise RequestError("output_format needs the type json_schema and a schema", param="output_format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": output_format["schema"]}}
