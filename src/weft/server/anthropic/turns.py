"""From a Messages body to the turn that every dialect shares (``ChatTurn``).

    system                       -> a system message
    user: text                   -> a user message
    user: tool_result            -> a tool message for each result, before the text that follows
    assistant: text, tool_use    -> an assistant message with tool calls; thinking -> its reasoning
    a final assistant message    -> the beginning of the answer (``continue_final_message``)

``cache_control`` stays on its block: ``text.template_worker`` turns it into a position. Blocks that are no
text (images, documents) are refused by place and type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.server.anthropic.protocol import CountTokensBody, MessagesBody, MessageTurn
from weft.server.turn import ChatTurn
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("disabled", "enabled", "adaptive")

Block = dict[str, Any]


def messages_turn(body: MessagesBody) -> ChatTurn:
    """Raises RequestError that names the block or field."""
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    stop = body.stop if body.stop_sequences is None else list(body.stop_sequences)
    fields = msgspec.structs.replace(body, stop=stop, response_format=_response_format(body))
    return ChatTurn(conversation=conversation(body), fields=fields, max_tokens=body.max_tokens,
                show_reasoning=thinks(body.thinking))


def conversation(body: CountTokensBody) -> ConversationFields:
    """The fields that shape the prompt. Raises RequestError."""
    messages = [*_system(body.system)]
    for position, turn in enumerate(body.messages):
        messages += _turn(f"messages.{position}", turn)
    last = messages[-1] if messages else None
    continued = last is not None and last.role == "assistant" and not last.tool_calls and bool(last.content)
    choice, several = _choice(body.tool_choice)
    return ConversationFields(
        messages=messages, continue_final_message=continued or None,
        tools=[_tool(f"tools.{at}", tool) for at, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice, parallel_tool_calls=several,
        variables={"enable_thinking": thinks(body.thinking)})


def cache_marked(body: CountTokensBody) -> bool:
    """Whether the client set a ``cache_control`` anywhere."""
    lists = [body.system, body.tools, *(turn.content for turn in body.messages)]
    return any("cache_control" in block for blocks in lists if isinstance(blocks, list) for block in blocks)


def _system(system: str | list[Block] | None) -> list[ChatMessage]:
    if not system:
        return []
    return [ChatMessage(role="system", content=system if isinstance(system, str)
                        else [_text("system", at, block) for at, block in enumerate(system)])]


def _turn(place: str, turn: MessageTurn) -> list[ChatMessage]:
    if turn.role not in ("user", "assistant"):
        raise RequestError(f"{place}.role is {turn.role!r}; it is user or assistant; system has its "
                           "own field", param=f"{place}.role")
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    if turn.role == "assistant":
        return [_assistant(f"{place}.content", turn.content)]
    return _user(f"{place}.content", turn.content)


def _user(place: str, blocks: Sequence[Block]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    texts: list[Block] = []
    for at, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            if texts:
                messages.append(ChatMessage(role="user", content=texts))
                texts = []
            messages.append(_tool_result(f"{place}.{at}", block))
        else:
            texts.append(_text(place, at, block))
    if texts or not messages:
        messages.append(ChatMessage(role="user", content=texts))
    return messages


def _tool_result(place: str, block: Block) -> ChatMessage:
    name, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(name, str):
        raise RequestError(f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and all(isinstance(one, dict) for one in content):
        text = "\n".join(str(_text(f"{place}.content", at, one)["text"]) for at, one in enumerate(content))
    else:
        raise RequestError(f"{place}.content: expected text or a list of blocks", param=f"{place}.content")
    return ChatMessage(role="tool", tool_call_id=name, content=text, cache_control=block.get("cache_control"))


def _assistant(place: str, blocks: Sequence[Block]) -> ChatMessage:
    texts: list[Block] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, block in enumerate(blocks):
        match block.get("type"):
            case "tool_use":
                calls.append(_tool_use(f"{place}.{at}", block))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(place, at, block))
    message = ChatMessage(role="assistant", content=texts or None)
    if calls:
        message.tool_calls = calls
    if thoughts:
        message.reasoning_content = "\n".join(thoughts)
    return message


def _tool_use(place: str, block: Block) -> dict[str, Any]:
    name, given, call_id = block.get("name"), block.get("input", {}), block.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(given, dict):
        raise RequestError(f"{place}: a tool_use block has an id, a name and an input object", param=place)
    arguments = msgspec.json.encode(given).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(place: str, at: int, block: Block) -> Block:
    kind = block.get("type")
    if kind != "text":
        raise RequestError(f"{place}.{at} has type {kind!r}; this server reads and writes text only",
                           param=f"{place}.{at}", code="unsupported_parameter")
    if not isinstance(block.get("text"), str):
        raise RequestError(f"{place}.{at}.text: expected str", param=f"{place}.{at}.text")
    return {name: block[name] for name in ("type", "text", "cache_control") if block.get(name) is not None}


def _tool(place: str, tool: Block) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise RequestError(f"{place} has type {kind!r}; this server runs no tools of its own, so a tool is "
                           "custom", param=f"{place}.type", code="unsupported_parameter")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function.update({name: tool[name] for name in ("description", "strict") if name in tool})
    marked = {"cache_control": tool["cache_control"]} if tool.get("cache_control") is not None else {}
    return {"type": "function", "function": function, **marked}


def _choice(choice: Block | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """``tool_choice`` and ``parallel_tool_calls``."""
    if choice is None:
        return None, None
    kind, several = choice.get("type"), not choice.get("disable_parallel_tool_use", False)
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, several
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type is {kind!r}; it is auto, any, tool or none",
                           param="tool_choice.type")
    return _CHOICES[kind], several


def thinks(thinking: Block | None) -> bool:
    if thinking is None:
        return False
    if thinking.get("type") not in _THINKING:
        raise RequestError(f"thinking.type is {thinking.get('type')!r}; it is enabled, adaptive or disabled",
                           param="thinking.type")
    return bool(thinking["type"] != "disabled")


def _response_format(body: MessagesBody) -> dict[str, Any] | None:
    """``output_format``, or ``output_config.format``: a JSON schema that the answer must match."""
    asked = body.output_format or (body.output_config or {}).get("format")
    if asked is None:
        return body.response_format
    if not isinstance(asked, dict) or asked.get("type") != "json_schema" or "schema" not in asked:
        raise RequestError("output_format has the type json_schema and a schema", param="output_format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked["schema"]}}
