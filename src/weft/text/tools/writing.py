"""Past calls as text, in the format in which the model writes calls.

    [{"name": "f", "arguments": {"x": 1}}] --ToolFormat--> <|tool_call_start|>[f(x=1)]<|tool_call_end|>

The format is that of the grammars in ``calling.py``; the readers return the same calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.text.tools.formats import ITEM, Tags, ToolFormat, Writing
from weft.text.tools.values import json_type

_PLAIN = Writing("json", between="\n")
"""Writing for a model without a known format, and for formats whose calls are separate messages, which cannot be
content."""


def calls_text(row: ToolFormat | None, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of ``calls``, each with ``function`` (``name``, and ``arguments`` as an object)."""
    functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
    writes = row.writes if row is not None and row.envelopes else _PLAIN
    texts = [
        f"{writes.before}{_call(row, writes, i, str(call.get('name')), call.get('arguments') or {})}{writes.behind}"
        for i, call in enumerate(functions)
    ]
    return f"{writes.lead}{writes.between.join(texts)}{writes.tail}" if texts else ""


def _call(row: ToolFormat | None, writes: Writing, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    if row is None or writes.style == "json":
        return f"{writes.json_head(name, str(number))}{_json(arguments)}}}"
    if writes.style == "headed":
        head = row.head
        assert head is not None
        begin = head.before + head.name.replace(":0", f":{number}") + head.arguments
        return begin.replace("{name}", name) + _json(arguments) + head.behind
    if writes.style == "xml":
        return (
            row.tags.begin(name, str(number + 1))
            + "".join(_tagged(row, *item) for item in arguments.items())
            + row.tags.function_end
        )
    if writes.style == "nested":
        return row.tags.begin(name) + _nested(arguments, row.tags) + row.tags.function_end
    if writes.style == "braces":
        return f"call:{name}{_braces(arguments, row.quote)}"
    return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})"


def _tagged(row: ToolFormat, key: str, value: Any) -> str:
    shown = value if isinstance(value, str) else _json(value)
    return f"{row.tags.parameter_begin(key, json_type(value))}{shown}{row.tags.value_end}"


def _nested(value: Any, tags: Tags) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, (Mapping, list)):
        return _json(value)
    members = value.items() if isinstance(value, Mapping) else ((ITEM, item) for item in value)
    return "".join(
        f"{tags.parameter_begin(name, json_type(inner))}{_nested(inner, tags)}{tags.element_end(name)}"
        for name, inner in members
    )


def _braces(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_braces(inner, quote)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_braces(inner, quote) for inner in value)}]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
