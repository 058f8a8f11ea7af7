"""The body of /v1/responses, and the items of a conversation: as sent, stored, and shown to the template.

    input --read_items--> items, checked, each with an id --messages_of--> ChatMessage ...

    message               role, content: text or parts     a message of this role
    reasoning             content or summary               reasoning of the assistant message that follows
    function_call         call_id, name, arguments         a call of the assistant message before, else of a new one
    function_call_output  call_id, output                  a tool message
    custom_tool_call and its output                        the same for a custom tool, with ``input``
    item_reference        id                               a stored item (``with_items``)

An item that cannot follow in the order of an answer (reasoning, content, calls) begins another message. Parts that are
not text or pictures are refused, with their position and type. Items of tools that ran on another server
(``web_search_call``, ``mcp_call``, ``compaction``) are left out and reported as ignored. A call that the client ran
itself (``local_shell_call``) and its output become a function call and its output. So a conversation that began on
another server can continue here. Tools among the items (``additional_tools``, ``tool_search_output``) are added to the
tools of the request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.request import LOGPROBS_MAX
from weft.server.protocol import AnswerId, Int, SamplingFields, Unserved
from weft.server.responses.store import StoredResponse, StoreLimits, UnknownResponseError
from weft.text.chat import ChatMessage
from weft.text.current_request import note_ignored

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ID_CHARS_MAX = 256
_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[io]\d{1,9}")


def read_items(items_or_text: str | list[Item], response_id: str) -> list[Item]:
    """Return ``input`` of a request as items, checked; ``response_id`` becomes a part of their ids. Raise RequestError
    that names the item or part."""
    if isinstance(items_or_text, str):
        items_or_text = [{"role": "user", "content": items_or_text}]
    items = []
    for index, item in enumerate(items_or_text):
        own = _own_item(item)
        if own is None:
            note_ignored(f"input.{item['type']}")
        else:
            items.append(_item(f"input[{index}]", own, item_id(own.get("type"), response_id, "i", index)))
    return items


def _own_fields(item: Item) -> Item:
    return {name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status")}


def _own_item(item: Item) -> Item | None:
    """Return ``item`` as one of this server's types; None for an item of a tool that another server ran."""
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind in _PREFIXES or not kind or kind == "item_reference":
        return item
    call_id = item.get("call_id")
    if kind.endswith("_output") and isinstance(call_id, str):
        output = item.get("output", _own_fields(item))
        said = output if isinstance(output, str) else msgspec.json.encode(output).decode()
        return {"type": "function_call_output", "call_id": call_id, "output": said}
    if kind.endswith("_call") and isinstance(call_id, str):
        fields = _own_fields(item)
        arguments = fields.get("arguments", fields.get("action", fields))
        name = kind.removesuffix("_call")
        return {
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
        }
    return None


def new_response_id() -> str:
    return f"resp_{token_hex(16)}"


def item_id(kind: Any, response_id: str, side: Literal["i", "o"], index: int) -> str:
    """Return the id of item ``index`` of a response's input or output, which contains the id of the response
    (``response_of``)."""
    prefix = _PREFIXES.get(kind, "msg") if isinstance(kind, str) else "msg"
    return f"{prefix}_{response_id.removeprefix('resp_')}{side}{index}"


def response_of(item: str) -> str | None:
    """Return the id of the response that the item with id ``item`` belongs to; None for an id of another form."""
    match = _ITEM_ID.fullmatch(item)
    return None if match is None else f"resp_{match.group(1)}"


def messages_of(
    items: Iterable[Item], instructions: str | None, names: Mapping[tuple[str, str], str] | None = None
) -> list[ChatMessage]:
    """Return the messages of items. ``instructions`` come first, as a system message. ``names``: the model's names of
    functions inside a namespace."""
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    answers: list[list[Item]] = []
    place = -1
    for item in items:
        kind = item["type"]
        before, place = place, _place(item)
        if place >= 0:
            if before < 0 or place < before or (place == before and kind == "message"):
                answers.append([])
                messages.append(ChatMessage(role="assistant", content=None))
            answers[-1].append(item)
        elif kind in _OUTPUTS:
            messages.append(ChatMessage(role="tool", tool_call_id=item["call_id"], content=_shown(item["output"])))
        elif item["role"] in ("system", "developer"):
            messages.append(ChatMessage(role=item["role"], content=_text_of(item["content"])))
        else:
            messages.append(ChatMessage(role=item["role"], content=_shown(item["content"])))
    for message, answer in zip((message for message in messages if message.role == "assistant"), answers, strict=True):
        _fill(message, answer, names or {})
    return messages


def _place(item: Item) -> int:
    """Return the rank of an item in an assistant's message; -1 for an item of another message."""
    kind = item["type"]
    if kind == "message":
        return 1 if item["role"] == "assistant" else -1
    return 0 if kind == "reasoning" else 2 if kind in _CALLS else -1


def _fill(message: ChatMessage, items: list[Item], names: Mapping[tuple[str, str], str]) -> None:
    thoughts = [
        "\n".join(part["text"] for part in item["content"] or item["summary"])
        for item in items
        if item["type"] == "reasoning"
    ]
    message.content = next((_text_of(item["content"]) for item in items if item["type"] == "message"), None)
    if any(thoughts):
        message.reasoning_content = "\n".join(thoughts)
    message.tool_calls = [_call(item, names) for item in items if item["type"] in _CALLS] or None


def _call(item: Item, names: Mapping[tuple[str, str], str]) -> Item:
    """Return a call as chat completions have it."""
    item = {**item, "name": names.get((item.get("namespace", ""), item["name"]), item["name"])}
    if item["type"] == "custom_tool_call":
        return {"id": item["call_id"], "type": "custom", "custom": {"name": item["name"], "input": item["input"]}}
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


def _item(place: str, item: Item, default_id: str) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise RequestError(
            f"{place} has type {kind!r}; this server takes {', '.join(_PREFIXES)}",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    own_id = item.get("id")
    if own_id is not None and not (isinstance(own_id, str) and 0 < len(own_id) <= _ID_CHARS_MAX):
        raise RequestError(f"{place}.id: expected a text of 1 to {_ID_CHARS_MAX} characters", param=f"{place}.id")
    checked: Item = {"type": kind, "id": own_id or default_id}
    if kind == "message":
        return {**checked, **_message(place, item), "status": "completed"}
    if kind == "reasoning":
        return {
            **checked,
            "summary": _parts(f"{place}.summary", item.get("summary"), "summary_text"),
            "content": _parts(f"{place}.content", item.get("content"), "reasoning_text"),
        }
    checked["call_id"] = _text(f"{place}.call_id", item.get("call_id"))
    if kind in _CALLS:
        said = "arguments" if kind == "function_call" else "input"
        given_text = item.get(said, "" if kind == "function_call" else None)
        if said in item and given_text is None:
            given_text = ""
        inside = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}
        return {
            **checked,
            "name": _text(f"{place}.name", item.get("name")),
            **inside,
            said: _text(f"{place}.{said}", given_text),
            "status": "completed",
        }
    return {**checked, "output": _content(f"{place}.output", item.get("output"), "input_text"), "status": "completed"}


def _message(place: str, item: Item) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role is {role!r}; it is one of {', '.join(ROLES)}", param=f"{place}.role")
    own = "output_text" if role == "assistant" else "input_text"
    content = _content(f"{place}.content", item.get("content"), own)
    if isinstance(content, str):
        content = [_part(own, content)]
    return {"role": role, "content": content}


def _content(place: str, content: Any, own: str) -> str | list[Item]:
    """Return the content of a message. ``own``: the type that the parts get."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{place}: expected text or a list of parts", param=place)
    parts = []
    for index, part in enumerate(content):
        here = f"{place}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_video") and own == "input_text":
            parts.append(_image(here, part) if kind == "input_image" else part)
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise RequestError(
                f"{here} has type {kind!r}; text is read here, and pictures (input_image) of users and tools",
                param=here,
                code="unsupported_parameter",
            )
        name = _TEXT_PARTS[kind]
        parts.append(_part(own, _text(f"{here}.{name}", part.get(name))))
    return parts


def _image(here: str, part: Item) -> Item:
    if not isinstance(part.get("image_url"), str):
        raise RequestError(
            f"{here}.image_url: expected a data: URL or an address; stored files (file_id) are not read",
            param=f"{here}.image_url",
        )
    return {"type": "input_image", "image_url": part["image_url"], "detail": part.get("detail") or "auto"}


def _part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _parts(place: str, parts: Any, kind: str) -> list[Item]:
    """Return the parts of a reasoning item."""
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError(f"{place}: expected a list of objects with type {kind} and text", param=place)
    return [
        {"type": kind, "text": _text(f"{place}[{index}].text", part.get("text"))} for index, part in enumerate(parts)
    ]


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        said = "it is missing" if value is None else f"expected str, got {type(value).__name__}"
        raise RequestError(f"{place}: {said}", param=place)
    return value


def _shown(content: str | list[Item]) -> str | list[Item]:
    """Return the text of ``content``; the parts, if some are pictures."""
    if isinstance(content, list) and any("text" not in part for part in content):
        return content
    return _text_of(content)


def _text_of(content: str | list[Item]) -> str:
    """Return the text of a system prompt. Raise RequestError for a picture."""
    if isinstance(content, str):
        return content
    if any("text" not in part for part in content):
        raise RequestError(
            "input: a system message has a picture; pictures are read in messages of the user and in outputs of tools",
            param="input",
            code="unsupported_parameter",
        )
    return "\n".join(part["text"] for part in content)


class _Output(msgspec.Struct):
    output: list[Item]


_decode_output = msgspec.json.Decoder(_Output).decode
_decode_items = msgspec.json.Decoder(list[Item]).decode


def is_reference(item: Item) -> bool:
    """Return whether ``item`` is a reference; OpenAI lets the type of a reference be left out."""
    return item.get("type") == "item_reference" or set(item) == {"id"}


async def with_items(
    own_items: Sequence[Item],
    known: Sequence[Item],
    get: Callable[[str], Awaitable[StoredResponse]],
    limits: StoreLimits,
) -> list[Item]:
    """Return ``own_items`` with the items that references name. The id of an item contains the id of its response, so
    the store needs no index of items. ``known``: items of the conversation so far, searched first. ``get`` raises
    UnknownResponseError. Raise RequestError, UnknownResponseError. The limits on responses and bytes of a conversation
    hold for one request (law L11)."""
    by_id = {item["id"]: item for item in known}
    responses: set[str] = set()
    size = 0
    result = []
    for index, item in enumerate(own_items):
        if not is_reference(item):
            result.append(item)
            continue
        place, name = f"input[{index}].id", item.get("id")
        if not isinstance(name, str):
            raise RequestError(f"{place} is missing: the id of a stored item", param=place)
        response_id = response_of(name)
        if name not in by_id and response_id is not None and response_id not in responses:
            responses.add(response_id)
            if len(responses) > limits.turns:
                raise RequestError(
                    f"input refers to items of more than {limits.turns} responses (limits.max_response_turns)",
                    param="input",
                )
            try:
                stored = await get(response_id)
            except UnknownResponseError:
                raise _unknown(place, name) from None
            size += stored.size
            if size > limits.turn_bytes:
                raise RequestError(
                    f"input refers to responses of {size} bytes; the limit is {limits.turn_bytes} (limits.max_body_mb)",
                    param="input",
                )
            items = [*_decode_items(stored.items), *_decode_output(stored.body).output]
            by_id.update((known_item["id"], known_item) for known_item in items)
        if name not in by_id:
            raise _unknown(place, name)
        result.append(by_id[name])
    return result


def _unknown(place: str, name: str) -> UnknownResponseError:
    return UnknownResponseError(f"{place}: there is no stored item {name[:256]!r}", param=place, code="item_not_found")


METADATA_MAX, METADATA_KEY_CHARS, METADATA_VALUE_CHARS = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
INCLUDES = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
    }
)
_VERBOSITIES = (None, "medium")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """The field ``reasoning``. ``summary`` has no effect: answers have the complete reasoning, in ``content``."""

    effort: str | None = None
    max_tokens: int | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class StreamingOptions(msgspec.Struct, kw_only=True):
    """The field ``stream_options``. Deltas are never padded, so ``include_obfuscation`` changes nothing."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """The body of /v1/responses. ``input``: text, or items as ``weft.server.responses.items`` reads them."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    previous_response_id: AnswerId | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamingOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


UNSERVED_IN_RESPONSES: Unserved = {
    "conversation": ("use previous_response_id", ()),
    "prompt": ("this server stores no prompt templates", ()),
    "context_management": ("prompts are never edited on the server; truncation auto drops old turns", ([],)),
    "moderation": ("this server moderates nothing", ()),
    "n": ("a response has one answer", (1,)),
    "messages": ("it belongs to /v1/chat/completions; use input", ()),
    "max_tokens": ("use max_output_tokens", ()),
    "max_completion_tokens": ("use max_output_tokens", ()),
    "logprobs": (f"use include: [{LOGPROBS!r}]", (False,)),
    "prompt_logprobs": ("it belongs to /v1/completions and /v1/chat/completions", ()),
    "reasoning_effort": ("use reasoning.effort", ()),
    "verbosity": ("it is not served", ("medium",)),
}
"""Reason and harmless values of each refused field: (why it is refused, values besides null that ask for nothing)."""


_TOOL_ITEMS = ("additional_tools", "tool_search_output")


def _lift_tools(body: ResponsesBody) -> None:
    """Add the tools among the items to the tools of the request. A definition that comes twice is added once."""
    if isinstance(body.input, str):
        return
    lists = [item.get("tools") for item in body.input if item.get("type") in _TOOL_ITEMS]
    more = [tool for tools in lists if isinstance(tools, list) for tool in tools]
    if more:
        known = list(body.tools or ())
        body.tools = known + [tool for index, tool in enumerate(more) if tool not in known and tool not in more[:index]]
        body.input = [item for item in body.input if item.get("type") != "additional_tools"]


def check_fields(body: ResponsesBody) -> None:
    """Check the rules that a type cannot state, and move tools from the items to the request (``_lift_tools``). Raise
    RequestError that names the field."""
    _lift_tools(body)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(
            f"max_output_tokens is {body.max_output_tokens}; it must be at least 1", param="max_output_tokens"
        )
    if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}; it must be at least 0 and at most {LOGPROBS_MAX}",
            param="top_logprobs",
        )
    for name in body.include or ():
        if name not in INCLUDES:
            raise RequestError(f"include has {name[:100]!r}; it takes {', '.join(sorted(INCLUDES))}", param="include")
    if body.text is not None and body.text.verbosity not in _VERBOSITIES:
        note_ignored("text.verbosity")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > METADATA_MAX:
        raise RequestError(f"metadata has {len(metadata)} pairs; the limit is {METADATA_MAX}", param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS or len(value) > METADATA_VALUE_CHARS:
            raise RequestError(
                f"metadata has a key of {len(key)} and a value of {len(value)} characters; "
                f"the limits are {METADATA_KEY_CHARS} and {METADATA_VALUE_CHARS}",
                param="metadata",
            )
