"""Tools, calls and results as the embedded model's chat template writes them, and as the API has them.

    tool    get_weather(city: string, days?: integer): The weather of a city.
    call    <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bemo"}}\n</tool_call>
    result  <tool_response>\nrain\n</tool_response>

A tool takes one line instead of its JSON schema: an embedded model has few tokens to spend. `tests/train`
compares the texts with the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.eval.recall import Episode

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """One call in the form of the chat template."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}"


def written_results(results: Sequence[str]) -> str:
    """The user turn that the chat template makes of tool messages."""
    return "\n".join(f"{RESULT_OPEN}\n{result}\n{RESULT_CLOSE}" for result in results)


def read_calls(text: str) -> list[dict[str, Any]]:
    """The calls of a written answer."""
    parts = [part.split(CALL_CLOSE)[0] for part in text.split(CALL_OPEN)[1:]]
    return [json.loads(part) for part in parts]


def tool_line(tool: dict[str, Any]) -> str:
    """A tool in the system prompt, as the chat template writes it."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    parts = []
    for key, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type") if isinstance(schema.get("type"), str) else "any"
        kind = "|".join(str(value) for value in schema["enum"]) if schema.get("enum") else kind
        parts.append(f"{key}{'' if key in required else '?'}: {kind}")
    description = f": {function['description']}" if function.get("description") else ""
    return f"{function['name']}({', '.join(parts)}){description}"


def system_text(system: str | None, tools: Sequence[dict[str, Any]]) -> str:
    """The system prompt of a conversation with tools."""
    head = f"{system}\n\n" if system else ""
    return head + "\n".join(["<tools>", *(tool_line(tool) for tool in tools), "</tools>"])


def chat_messages(episode: Episode, turn_index: int) -> list[dict[str, Any]]:
    """The messages of the API that end with what the user, or a tool, says in turn `turn_index`."""
    messages: list[dict[str, Any]] = []
    if episode.system:
        messages.append({"role": "system", "content": episode.system})
    ids: list[str] = []
    for index, turn in enumerate(episode.turns[: turn_index + 1]):
        if turn.user.startswith(RESULT_OPEN):
            results = [part.split(RESULT_CLOSE)[0].strip("\n") for part in turn.user.split(RESULT_OPEN)[1:]]
            for call_id, result in zip(ids, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            messages.append({"role": "user", "content": turn.user})
        if index == turn_index:
            break
        calls = read_calls(turn.reply)
        ids = [f"call_{index}_{number}" for number in range(len(calls))]
        answer: dict[str, Any] = {"role": "assistant", "content": None if calls else turn.reply}
        if calls:
            answer["tool_calls"] = [
                {"id": call_id, "type": "function",
                 "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
                for call_id, call in zip(ids, calls, strict=True)
            ]
        messages.append(answer)
    return messages
