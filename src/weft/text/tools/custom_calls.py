"""Custom tools: the model writes a text for them, where a function gets arguments.

    {"type": "custom", "custom": {"name": "sql", "format": ...}}  --custom_function--> a function with one
                                                                                       parameter, ``input``
    call sql {"input": "SELECT 1"}  --input_of--> SELECT 1

No chat template knows custom tools. So the template sees a function, the model calls it, and the one argument
is the text. A ``regex`` of the format becomes the pattern of the parameter, and makes the function strict.

The text is unpacked from whole calls. So requests with custom tools get calls whole, in streams too.

Rejected: a grammar in lark (most families write the text inside a string of JSON, whose escapes a grammar of
the text does not know); the text in parts (half an escape is no text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.errors import RequestError

INPUT = "input"


def custom_function(where: str, tool: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The function that stands for a custom tool, and the regex of its input. Raises RequestError."""
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise RequestError(f"{where}.custom is missing: an object with name", param=f"{where}.custom")
    regex = _regex(f"{where}.custom.format", custom.get("format"))
    text: dict[str, Any] = {"type": "string", "description": "The text for the tool."}
    if regex is not None:
        text["pattern"] = f"^(?:{regex})$"
    function = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return {**function, "strict": regex is not None,
            "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}}, regex


def function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A past call of a custom tool, as the template sees it."""
    custom = call.get("custom")
    shown = custom if isinstance(custom, dict) else {}
    return {**{name: value for name, value in call.items() if name != "custom"}, "type": "function",
            "function": {"name": shown.get("name"), "arguments": {INPUT: shown.get("input")}}}


def input_of(arguments: str) -> str:
    """The text of a call. A model may write other arguments than it was shown: then they are the text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _regex(where: str, form: Any) -> str | None:
    """Raises RequestError."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else type(form).__name__
    if kind == "text":
        return None
    if kind != "grammar":
        raise RequestError(f"{where}.type is {kind!r}; it is text or grammar", param=f"{where}.type")
    grammar = form.get("grammar", form)  # the two APIs of OpenAI differ in this
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    if syntax != "regex":
        raise RequestError(f"{where}.syntax is {syntax!r}; this server holds the text of a custom tool to a "
                           "regex, and to no other grammar", param=f"{where}.syntax",
                           code="unsupported_parameter")
    if not isinstance(grammar.get("definition"), str):
        raise RequestError(f"{where}.definition is missing: a regex", param=f"{where}.definition")
    return str(grammar["definition"])
