"""Values of arguments: strict JSON in and out, and texts read by the types of a tool's schema.

    days: integer               3        -> 3        soon  -> "soon"      {"a": 1} -> "{\"a\": 1}"
    mode: string or null        null     -> null     "a"   -> "\"a\""     [1]      -> "[1]"
    tags: array                 ['a']    -> ["a"]    "[1]" -> [1]
    size: number                NaN      -> "NaN"    1e999 -> "1e999"     0x10     -> "0x10"

A text that can be read as a type of the schema other than string becomes that value. Any other text stays unchanged,
quotes included: no character is lost, and the client's validation sees the model's text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_HOPS_MAX = 8
_BACKSLASH = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_PYTHON_NAMES = {"True": True, "False": False, "None": None}
_NUMBERS = ("integer", "number")
_QUOTES = ('"', "'")
_JSON_TYPES = {name: name for name in ("string", "integer", "number", "boolean", "object", "array", "null")}
_TYPE_NAMES = {
    **_JSON_TYPES,
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
"""Types of JSON Schema, by the names that Python tools send."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of a number")
    return number


def parse_json(text: str) -> Any:
    """Return the value of ``text``, whose strings may have raw line ends and backslashes that escape nothing (a regex,
    a path). Raise ValueError, also for NaN and for numbers beyond a double."""
    try:
        return _parsed(text)
    except ValueError:
        mended = _BACKSLASH.sub(lambda match: match[0] if match[1] else "\\\\", text)
        if mended == text:
            raise
        return _parsed(mended)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(value: Any) -> str:
    """Return JSON text that can be sent as UTF-8. Raise ValueError for a number that JSON cannot express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


def is_object(text: str) -> bool:
    """Return whether ``text`` is a JSON object."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def read_value(text: str, types: set[str]) -> Any:
    """Return the value of ``text`` for a parameter of these JSON types; the text itself if no type is known."""
    if not types or types == {"string"}:
        return text
    bare = text.strip()
    value = parse_literal(bare)
    if isinstance(value, str) and "string" not in types:  # JSON inside a string
        value = parse_literal(value.strip())
    return text if isinstance(value, str) or not _is_allowed(value, types) else value


def parse_literal(text: str) -> Any:
    """Return the value that ``text`` writes in JSON or Python, or ``text``."""
    if text in _PYTHON_NAMES:
        return _PYTHON_NAMES[text]
    try:
        return parse_json(text)
    except ValueError:
        pass
    if not text.startswith(("[", "(", "{")):
        return text
    try:
        value = ast.literal_eval(text)
        return json.loads(to_json(value)) if isinstance(value, (list, tuple, dict)) else text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _is_allowed(value: Any, types: set[str]) -> bool:
    return bool(types & _types_of_value(value))


def _types_of_value(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return set(_NUMBERS)
    if isinstance(value, float):
        return {"number"}
    return {"string"} if isinstance(value, str) else {"object"} if isinstance(value, dict) else {"array"}


def json_type(value: Any) -> str:
    """Return the name of the JSON type of ``value``; a whole number is a number."""
    return (_types_of_value(value) - {"integer"} or {"number"}).pop()


def types_of(schema: Any, root: Mapping[str, Any], hops: int = _HOPS_MAX, seen: set[int] | None = None) -> set[str]:
    """Return the JSON types that a schema and its alternatives allow; empty if it does not say. References into
    ``root`` are followed. ``seen``: identities of schemas that were read already: alternatives that refer to one
    another would be read in every order."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or not hops or id(schema) in seen:
        return set()
    seen.add(id(schema))
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = {_TYPE_NAMES[name.lower()] for name in names if isinstance(name, str) and name.lower() in _TYPE_NAMES}
    for inner in parts_of(schema):
        types |= types_of(inner, root, hops - 1, seen)
    if not types:
        for value in fixed_values(schema):
            types |= _types_of_value(value)
        types |= {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
    if schema.get("nullable") is True and types:
        types = types | {"null"}
    if "$ref" in schema:
        types |= types_of(followed(schema, root), root, hops - 1, seen)
    return types


def parts_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of a schema, and the schemas that it combines."""
    listed = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
    return [part for parts in listed if isinstance(parts, list) for part in parts]


def alternatives(
    schema: Any, root: Mapping[str, Any], hops: int = _HOPS_MAX, seen: set[int] | None = None
) -> list[Mapping[str, Any]]:
    """Return the schemas of which a value must match one. A schema that combines several is not taken apart."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or not hops or id(schema) in seen:
        return []
    seen.add(id(schema))
    parts = [followed(schema, root)] if "$ref" in schema else parts_of(schema)
    if not parts or ("allOf" in schema and len(parts) > 1):
        return [schema]
    return [leaf for part in parts for leaf in alternatives(part, root, hops - 1, seen)]


def fixed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, if any."""
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []


def followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema``, or the target of its reference "#/..." into ``root``; empty if the target does not exist."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def inner_schema(schema: Any, root: Mapping[str, Any], name: str, index: int) -> Any:
    """Return the schema of an element of a value: of the property ``name`` of an object, or of item ``index`` of an
    array; empty if ``schema`` does not say it."""
    for part in alternatives(schema, root):
        properties, first = part.get("properties"), part.get("prefixItems")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if isinstance(first, list) and index < len(first):
            return first[index]
        for key in ("items", "additionalProperties"):
            if isinstance(part.get(key), Mapping):
                return part[key]
    return {}


class Parameters:
    """The parameters of the tools that a request offers."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas

    def offered(self, name: str) -> str:
        """Return the offered tool for the name that a model wrote: some models add a namespace (``default_api:f``) or
        quotes."""
        if name in self._schemas:
            return name
        if name[:1] in _QUOTES and name[:1] == name[-1:]:
            return self.offered(name[1:-1])
        tools = [tool for tool in self._schemas if name.endswith((f":{tool}", f"/{tool}", f".{tool}"))]
        return tools[0] if len(tools) == 1 else name

    def has(self, tool: str) -> bool:
        return tool in self._schemas

    def names(self, tool: str) -> frozenset[str]:
        properties = self._schemas.get(tool, {}).get("properties")
        return frozenset(properties) if isinstance(properties, Mapping) else frozenset()

    def parameter(self, tool: str, name: str) -> str:
        """Return the parameter for the name that a model wrote, which some models put into quotes."""
        bare = name[1:-1] if name[:1] in _QUOTES and name[:1] == name[-1:] else name
        return bare if bare in self.names(tool) else name

    def root(self, tool: str) -> Mapping[str, Any]:
        """Return the schema of all parameters, into which references point; empty if the tool is not offered."""
        return self._schemas.get(tool, {})

    def schema(self, tool: str, name: str) -> Any:
        """Return the schema of a parameter; empty if it is not known."""
        properties = self.root(tool).get("properties")
        return properties.get(name, {}) if isinstance(properties, Mapping) else {}

    def types(self, tool: str, name: str) -> set[str]:
        return types_of(self.schema(tool, name), self.root(tool))
