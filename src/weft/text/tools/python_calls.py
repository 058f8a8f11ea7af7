"""Calls written as Python: LFM2 and OLMo 3.

    [get_weather(city="Paris", days=3), get_time()]           a list
    get_weather(city="Paris")                                 one to a line
    [{"name": "get_weather", "arguments": {...}}]             LFM2 writes this too

Parsed, never run: only literals are values, and JSON's true, false and null are among them. Read when the
envelope is complete, as an unfinished expression says little.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from weft.text.tools.body_reader import BodyReader, CallDelta
from weft.text.tools.json_calls import call_of

_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonCalls(BodyReader):
    """See the module."""

    def _read(self, last: bool) -> list[CallDelta]:
        body, end = self.text, len(self.text)
        at = self.text.find(self.close) if self.close is not None else -1
        if at >= 0 and self.close is not None:
            body, end = self.text[:at], at + len(self.close)
        elif not last:
            return []
        calls = read_python_calls(body)
        if not calls:
            self.broken = True
            return []
        self.end = end
        self.call_count = len(calls)
        self.whole = self.emitted = end
        return [CallDelta(name=name, arguments=arguments, complete=True) for name, arguments in calls]


def read_python_calls(text: str) -> list[tuple[str, str]]:
    """(name, arguments as JSON text) of each call; empty when ``text`` is anything but calls."""
    text = text.strip()
    try:
        listed = _json_calls(text)
        if listed is None:
            listed = [_call(node) for node in _expressions(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return listed


def _json_calls(text: str) -> list[tuple[str, str]] | None:
    """None when ``text`` is not JSON; ValueError when it is and not calls."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    valid = [call for call in calls if call is not None]
    if len(valid) < len(calls):
        raise ValueError("an item is no call")
    return valid


def _expressions(text: str) -> list[ast.expr]:
    expressions: list[ast.expr] = []
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not an expression")
        value = statement.value
        expressions += value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    return expressions


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument has no name")
        arguments[keyword.arg] = _literal(keyword.value)
    return _name(node.func), json.dumps(arguments, ensure_ascii=False)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise ValueError("not a name")


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no string")
        return {str(key): _literal(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError("a value that JSON does not have")
    return value
