"""``tools`` and ``tool_choice`` of a request, checked for the template, the reader and the grammar.

    tools: [{"type": "function", "function": {"name", "description", "parameters", "strict"}}, ...]
           {"type": "custom", "custom": {"name": "sql", "format": ...}}  --> a function of ``input``
    tool_choice: "none" | "auto" | "required" | {"type": "function", "function": {"name": ...}}
               | {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [...]}}

The Responses API writes the last two without the inner object. Allowed tools are a part of ``tools``. The prompt has
all tools, so requests that allow different ones share a cached prefix.

No chat template knows custom tools. So the template sees a function, the model calls it, and its only argument is the
text. A ``regex`` of the format becomes the pattern of the parameter, and makes the function strict. A ``lark`` grammar
is only written in the description of the parameter and not enforced: the client checks the text. The text is unpacked
from complete calls, in streams too.

A tool of another type is one that its own server runs (``web_search``, ``code_interpreter``, ``mcp``). weft runs no
tools, and the client does not expect a call of such a tool, so it is left out (``hosted_types``). A choice that names
one is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import RequestError
from weft.text.tools.values import types_of

TOOLS_MAX = 512
_KINDS = ("function", "custom")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_NOTHING_ELSE: dict[str, Any] = {**_NOTHING, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request. ``definition`` is the object for the template; ``parameters`` a JSON schema of an object.
    ``input_regex``: a regex for the text of a custom tool."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    definition: dict[str, Any]
    is_custom: bool = False
    input_regex: str | None = None

    @property
    def properties(self) -> dict[str, Any]:
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The choice of a tool. ``name`` is set for mode "named". ``allowed``: the only tools that "auto" and "required"
    may call; None for all."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    allowed: frozenset[str] | None = None

    def among(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return those of ``tools`` that an answer may call."""
        if self.mode == "named":
            return [tool for tool in tools if tool.name == self.name]
        return [tool for tool in tools if self.allowed is None or tool.name in self.allowed]


def read_tools(value: Sequence[Any] | None) -> tuple[Tool, ...]:
    """Return the tools of a request, checked. Raise RequestError that names the element."""
    if not value:
        return ()
    if len(value) > TOOLS_MAX:
        raise RequestError(f"tools has {len(value)} tools; the limit is {TOOLS_MAX}", param="tools")
    tools = tuple(_tool(f"tools[{index}]", item) for index, item in enumerate(value) if hosted_type(item) is None)
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools has two functions called {name!r}", param="tools")
    return tools


def hosted_type(tool: Any) -> str | None:
    """Return the type of a tool that another server runs; None for every other tool. A tool with a definition counts as
    a function with a wrong type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind in _KINDS:
        return None
    is_defined = any(name in tool for name in _KINDS) or ("name" in tool and "parameters" in tool)
    return None if is_defined or "input_schema" in tool else kind


def hosted_types(tools: Sequence[Any] | None) -> list[str]:
    """Return the types of the tools that ``read_tools`` leaves out, in order."""
    return [kind for kind in map(hosted_type, tools or ()) if kind is not None]


def read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice in ``tool_choice`` among these tools. Raise RequestError."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value == "none":
        return ToolChoice("none")
    if isinstance(value, str):
        if value not in ("auto", "required"):
            raise RequestError(
                f"tool_choice is {value!r}; it is none, auto, required, or a function by its name", param="tool_choice"
            )
        if value == "required":
            _need_tools(tools)
        return ToolChoice("required" if value == "required" else "auto" if tools else "none")
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value, tools)
    kind = value.get("type") if isinstance(value, dict) else type(value).__name__
    if not isinstance(value, dict) or kind not in _KINDS:
        raise RequestError(
            f"tool_choice has type {kind!r}; this server serves function, custom and allowed_tools", param="tool_choice"
        )
    inner = value.get(kind)
    name = inner.get("name") if isinstance(inner, dict) else value.get("name")
    if not isinstance(name, str):
        raise RequestError(f"tool_choice.{kind}.name is missing", param=f"tool_choice.{kind}.name")
    _check_name(name, tools)
    return ToolChoice("named", name)


def _allowed(value: dict[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    inner = value.get("allowed_tools", value)
    mode = inner.get("mode") if isinstance(inner, dict) else None
    if mode not in ("auto", "required"):
        raise RequestError(
            f"tool_choice.mode is {mode!r}; allowed_tools have the mode auto or required", param="tool_choice.mode"
        )
    listed = inner.get("tools")
    if not isinstance(listed, list) or not listed:
        raise RequestError(
            "tool_choice.tools is missing: the tools that are allowed, at least one", param="tool_choice.tools"
        )
    names = set()
    for index, tool in enumerate(listed[:TOOLS_MAX]):
        if hosted_type(tool) is not None:
            continue
        function = tool.get("function", tool.get("custom", tool)) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RequestError(
                f"tool_choice.tools[{index}].name is missing: a function of tools", param=f"tool_choice.tools[{index}]"
            )
        _check_name(name, tools)
        names.add(name)
    if not names:
        raise RequestError(
            "tool_choice.tools has only tools that another server runs; allow a function of tools",
            param="tool_choice.tools",
        )
    return ToolChoice(mode, allowed=frozenset(names))


def _check_name(name: str, tools: Sequence[Tool]) -> None:
    _need_tools(tools)
    if name not in {tool.name for tool in tools}:
        raise RequestError(
            f"tool_choice names {name[:128]!r}, which is not in tools: {', '.join(tool.name for tool in tools)}",
            param="tool_choice",
        )


def _need_tools(tools: Sequence[Tool]) -> None:
    if not tools:
        raise RequestError("tool_choice asks for a call, and tools is empty", param="tool_choice")


def _tool(where: str, item: Any) -> Tool:
    if not isinstance(item, dict):
        raise RequestError(f"{where}: expected an object, got {type(item).__name__}", param=where)
    kind, input_regex = item.get("type", "function"), None
    function: Any
    if kind not in _KINDS:
        raise RequestError(f"{where} has type {kind!r}; this server serves function and custom", param=f"{where}.type")
    if kind == "custom":
        function, input_regex = custom_function(where, item)
        item = {name: value for name, value in item.items() if name != "custom"}
    else:
        function = item.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f"{where}.function is missing: an object with name and parameters", param=f"{where}.function"
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.{kind}.name is {name!r}; it has 1 to 128 letters, digits, _, - or .", param=f"{where}.{kind}.name"
        )
    parameters = function.get("parameters")
    takes_none = parameters is None
    if parameters is None:
        parameters = _NOTHING
    stated = parameters.get("type") if isinstance(parameters, dict) else ""
    if stated is not None and "object" not in types_of({"type": stated}, {}):
        raise RequestError(
            f"{where}.function.parameters: expected the JSON schema of an object", param=f"{where}.function.parameters"
        )
    # Templates iterate over properties without checking for them. Arguments are always an object, even if the schema
    # allows null, has no type, or has the type name of another language.
    parameters = {"properties": {}, **parameters, "type": "object"}
    definition = {**item, "type": "function", "function": {**function, "parameters": parameters}}
    arguments = _NOTHING_ELSE if takes_none else parameters
    if kind == "custom":
        arguments = {**parameters, "additionalProperties": False}
    return Tool(name, arguments, function.get("strict") is True, definition, kind == "custom", input_regex)


INPUT = "input"


def custom_function(where: str, tool: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the function that replaces a custom tool, and the regex of its input. Raise RequestError."""
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise RequestError(f"{where}.custom is missing: an object with name", param=f"{where}.custom")
    regex = _regex(f"{where}.custom.format", custom.get("format"))
    text: dict[str, Any] = {"type": "string", "description": "The text for the tool."}
    if regex is not None:
        text["pattern"] = f"^(?:{regex})$"
    elif (lark := lark_grammar(custom)) is not None:
        text["description"] = f"The text for the tool, in this grammar (lark):\n{lark}"
    function = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return {
        **function,
        "strict": regex is not None,
        "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]},
    }, regex


def function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a past call of a custom tool, as the template sees it."""
    custom = call.get("custom")
    shown = custom if isinstance(custom, dict) else {}
    return {
        **{name: value for name, value in call.items() if name != "custom"},
        "type": "function",
        "function": {"name": shown.get("name"), "arguments": {INPUT: shown.get("input")}},
    }


def input_of(arguments: str) -> str:
    """Return the text of a call. If the model wrote other arguments than ``input``, return all of them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _regex(where: str, form: Any) -> str | None:
    """Return the regex of a custom tool's format, if it has one. Raise RequestError."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else type(form).__name__
    if kind == "text":
        return None
    if kind != "grammar":
        raise RequestError(f"{where}.type is {kind!r}; it is text or grammar", param=f"{where}.type")
    grammar = form.get("grammar", form)  # OpenAI's two APIs differ in this
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    if syntax not in ("regex", "lark"):
        raise RequestError(
            f"{where}.syntax is {syntax!r}; it is regex or lark", param=f"{where}.syntax", code="unsupported_parameter"
        )
    if not isinstance(grammar.get("definition"), str):
        raise RequestError(f"{where}.definition is missing: a {syntax}", param=f"{where}.definition")
    return str(grammar["definition"]) if syntax == "regex" else None


def lark_grammar(custom: Any) -> str | None:
    """Return the lark grammar of a custom tool, which is not enforced."""
    form = custom.get("format") if isinstance(custom, dict) else None
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    if not isinstance(grammar, dict) or grammar.get("syntax") != "lark":
        return None
    definition = grammar.get("definition")
    return definition if isinstance(definition, str) else None


def unheld_formats(tools: Sequence[Any] | None) -> list[str]:
    """Return the names of the custom tools whose grammar is not enforced."""
    custom = [tool.get("custom") for tool in tools or () if isinstance(tool, dict)]
    return [
        str(custom_tool.get("name"))
        for custom_tool in custom
        if isinstance(custom_tool, dict) and lark_grammar(custom_tool) is not None
    ]
