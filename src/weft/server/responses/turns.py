"""From a Responses body to the turn that every dialect shares (``ChatTurn``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.server.responses.items import Item, messages_of
from weft.server.responses.protocol import LOGPROBS, ResponsesBody
from weft.server.turn import ChatTurn
from weft.text.chat_request import ConversationFields, KnownPrefix

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
_FORMATS = ("text", "json_object", "json_schema")


def responses_turn(body: ResponsesBody, items: Sequence[Item], known: KnownPrefix | None = None) -> ChatTurn:
    """``items``: the whole conversation, earlier turns too; ``known``: tokens of those. Raises RequestError
    that names the field."""
    response_format, fields = _response_format(body), body
    if response_format is not body.response_format:
        fields = msgspec.structs.replace(body, response_format=response_format)
    wants_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs
    return ChatTurn(conversation=conversation(body, items), fields=fields, max_tokens=body.max_output_tokens,
                logprobs=(body.top_logprobs or 0) if wants_logprobs else None, prompt_field="input",
                    known=known)


def conversation(body: ResponsesBody, items: Sequence[Item]) -> ConversationFields:
    """The fields that shape the prompt. Raises RequestError."""
    messages = messages_of(items, body.instructions)
    if not messages:
        raise RequestError("input is empty: it needs text or at least one item", param="input")
    effort = None if body.reasoning is None else body.reasoning.effort
    return ConversationFields(
        messages=messages, tools=[_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ())],
        tool_choice=body.tool_choice, parallel_tool_calls=body.parallel_tool_calls,
        variables=body.chat_template_kwargs, reasoning_effort=effort)


def format_of(body: ResponsesBody) -> dict[str, Any]:
    """``text.format``, with its default."""
    asked = None if body.text is None else body.text.format
    return asked or {"type": "text"}


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    asked = format_of(body)
    kind = asked.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"text.format.type is {kind!r}; it is {', '.join(_FORMATS)}",
                           param="text.format.type")
    if kind == "text":
        return body.response_format
    if body.response_format is not None:
        raise RequestError("text.format and response_format both say what the answer must match; one can",
                           param="text.format")
    if kind == "json_object":
        return {"type": "json_object"}
    if not isinstance(asked.get("schema"), dict):
        raise RequestError("text.format.schema is missing: a JSON schema", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": asked.get("name"), "schema": asked["schema"]}}


def _tool(place: str, tool: Any) -> dict[str, Any]:
    """As chat completions have it: the function in an object of its own."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise RequestError(f"{place} has type {kind!r}; this server runs no tools of its own, so a tool is a "
                           "function or custom", param=f"{place}.type", code="unsupported_parameter")
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{place}.name is missing", param=f"{place}.name")
    if kind == "custom":
        return {"type": "custom", "custom": {name: tool[name] for name in ("name", "description", "format")
                                             if tool.get(name) is not None}}
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict")
                if tool.get(name) is not None}
    return {"type": "function", "function": function}


def in_own_words(error: RequestError) -> RequestError:
    """``error`` of a turn with the names of this dialect."""
    param = _NAMES.get(error.param or "", error.param)
    message = error.message.replace("(max_tokens)", "(max_output_tokens)")
    if ".custom." in (param or ""):  # chat completions have an object more
        param, message = str(param).replace(".custom.", "."), message.replace(".custom.", ".")
    return type(error)(message, param=param, code=error.code)
