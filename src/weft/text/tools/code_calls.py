"""Calls written as code: tags, one per parameter (Qwen3-Coder, Qwen3.5, Qwen3-Next, Nemotron 3; GigaChat 3.5
with attributes), and Python (LFM2, OLMo 3).

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

    [get_weather(city="Paris", days=3), get_time()]           a list
    get_weather(city="Paris")                                 one to a line
    [{"name": "get_weather", "arguments": {...}}]             LFM2 writes this too

A value in tags is text, and the tool's schema gives its type. A string is used unchanged, without the line
end on either side. Any other type is read as JSON, and stays a string if that fails. Arguments are given out
parameter by parameter: ``{"city": "Paris"``, then ``, "days": 3``, then ``}``.

Python is parsed, never run: only literals are values, and JSON's true, false and null are among them. It is
read when the envelope is complete, as an unfinished expression says little.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from weft.text.choices import may_become
from weft.text.tools.formats import Tags
from weft.text.tools.json_calls import BodyReader, CallDelta, call_of

_NAME_CHARS_MAX = 256
_NAMED = re.compile(r'\sname="([^"]*)"')
_HOPS_MAX = 8
_JSON_TYPES: dict[type, set[str]] = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}}


class XmlCalls(BodyReader):
    """``schemas``: the parameters of each tool, by its name."""

    def __init__(self, close: str | None, schemas: Mapping[str, Mapping[str, Any]], tags: Tags) -> None:
        super().__init__(close)
        self._schemas = schemas
        self._tags = tags
        self._at = 0
        self._function: str | None = None
        self._parameters = 0

    def _read(self, last: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.end is None and not self.broken:
            while self._at < len(self.text) and self.text[self._at].isspace():
                self._at += 1
            rest = self.text[self._at :]
            step = self._between if self._function is None else self._inside
            if not step(rest, deltas, last):
                break
        return deltas

    def _between(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        """Whether it got anywhere."""
        expected = [self._tags.function, *([self.close] if self.close is not None else [])]
        if self.close is not None and rest.startswith(self.close):
            self.end = self._at + len(self.close)
        elif rest.startswith(self._tags.function) and (self.close is not None or not self.call_count):
            name, length = self._tag_name(rest, self._tags.function)
            if name is None:
                return False
            self._function, self._parameters = name, 0
            self._at += length
            self.emitted = self._at
            deltas.append(CallDelta(name=name))
        elif may_become(rest, expected) and not last:
            return False
        elif self.call_count:
            self.end = self.whole
        else:
            self.broken = True
        return True

    def _inside(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        if rest.startswith(self._tags.parameter):
            name, length = self._tag_name(rest, self._tags.parameter)
            end = rest.find(self._tags.parameter_end, length)
            if name is None or end < 0:
                return False
            value = self._value(name, rest[length:end], rest[:length])
            deltas.append(
                CallDelta(
                    arguments=f"{', ' if self._parameters else '{'}{json.dumps(name, ensure_ascii=False)}: {value}"
                )
            )
            self._parameters += 1
            self._at += end + len(self._tags.parameter_end)
            self.emitted = self._at
        elif rest.startswith(self._tags.function_end):
            deltas.append(CallDelta(arguments="}" if self._parameters else "{}", complete=True))
            self._at += len(self._tags.function_end)
            self._function = None
            self._completed(self._at)
            if self.close is None:
                self.end = self._at
        elif may_become(rest, (self._tags.parameter, self._tags.function_end)) and not last:
            return False
        else:
            self.broken = True
        return True

    def _tag_name(self, rest: str, tag: str) -> tuple[str | None, int]:
        """The name in ``<tag=NAME>`` or ``<tag name="NAME">`` and the length of the tag; None while it is not
        complete."""
        end = rest.find(">", len(tag))
        name = rest[len(tag) : end if end >= 0 else None]
        if self._tags.quoted and end >= 0:
            attribute = _NAMED.search(name)
            name = attribute[1] if attribute else ""
        if "\n" in name or len(name) > _NAME_CHARS_MAX or (end >= 0 and not name.strip()):
            self.broken = True
            return None, 0
        return (name.strip(), end + 1) if end >= 0 else (None, 0)

    def _value(self, name: str, text: str, tag: str) -> str:
        """The JSON text of a parameter's value."""
        if self._tags.quoted:
            value = text if 'string="true"' in tag else _read_value(text, {"other"})
            return json.dumps(value, ensure_ascii=False)
        text = text.removeprefix("\n").removesuffix("\n")
        assert self._function is not None
        root = self._schemas.get(self._function, {})
        properties = root.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return json.dumps(_read_value(text, types_of(schema, root)), ensure_ascii=False)


def _read_value(text: str, types: set[str]) -> Any:
    """What ``text`` means to a parameter of these JSON types; where nothing is known of it, it is text."""
    if not types or types == {"string"}:
        return text
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if "string" in types and isinstance(value, (bool, int, float)) and not types & _JSON_TYPES[type(value)]:
        return text  # digits that are meant as text
    return value


def types_of(schema: Any, root: Mapping[str, Any], hops: int = _HOPS_MAX) -> set[str]:
    """The JSON types that a schema allows, in its alternatives too, as far as it says; references into
    ``root`` are followed."""
    if not isinstance(schema, Mapping) or not hops:
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            types |= types_of(inner, root, hops - 1)
    for value in fixed_values(schema):
        types |= {"string"} if isinstance(value, str) else {"other"} if not types else set()
    if "$ref" in schema:
        types |= types_of(followed(schema, root), root, hops - 1)
    return types


def fixed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []


def followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema``, or what its reference "#/..." into ``root`` points to; empty where it leads nowhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}


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
