"""Grammars from the request's fields ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Any

from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammars import KINDS, WHITESPACE, TokenOf, grammar_from, json_grammar
from weft.text.structural_tags import structural_tag

_OUTPUT_KINDS = (*KINDS, "json_object", "structural_tag")
_UNSERVED_OUTPUTS = ("disable_additional_properties",)
_ANY_OBJECT = {"type": "object"}


def from_response_format(value: dict[str, Any], token_of: TokenOf) -> Grammar:
    """Return the grammar of the field ``response_format``, which is not text. Raise RequestError."""
    kind = value.get("type")
    if kind == "structural_tag":
        return structural_tag(value, "response_format", token_of)
    if kind == "json_object":
        schema = value.get("schema")  # llama-server's form of json_schema
        if schema is not None:
            return json_grammar(schema, field="response_format.schema")
        return json_grammar(_ANY_OBJECT, field="response_format")
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {kind!r}; it is text, json_object, json_schema or structural_tag",
            param="response_format.type",
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise RequestError("response_format.json_schema.schema is missing", param="response_format.json_schema.schema")
    return json_grammar(schema, field="response_format.json_schema.schema")


def from_structured_outputs(value: dict[str, Any], token_of: TokenOf) -> Grammar:
    """Return the grammar of the field ``structured_outputs``. Raise RequestError."""
    for name in _UNSERVED_OUTPUTS:
        if value.get(name):
            raise RequestError(
                f"structured_outputs.{name} is not supported",
                param=f"structured_outputs.{name}",
                code="unsupported_parameter",
            )
    kinds = [kind for kind in _OUTPUT_KINDS if value.get(kind) not in (None, False)]
    if len(kinds) != 1:
        said = f"has {' and '.join(kinds)}" if kinds else "asks for nothing"
        raise RequestError(
            f"structured_outputs {said}; it takes one of {', '.join(_OUTPUT_KINDS)}", param="structured_outputs"
        )
    kind = kinds[0]
    if kind == "structural_tag":
        return structural_tag(
            _object_of(value[kind], f"structured_outputs.{kind}"), f"structured_outputs.{kind}", token_of
        )
    whitespace: str | None = value.get("whitespace_pattern") or WHITESPACE
    if value.get("disable_any_whitespace"):
        whitespace = None
    if kind == "json_object":
        kind, value = "json", {"json": _ANY_OBJECT}
    return grammar_from(kind, value[kind], f"structured_outputs.{kind}", whitespace=whitespace)


def _object_of(value: Any, field: str) -> dict[str, Any]:
    """Return ``value``, an object or its JSON text. Raise RequestError if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field} is not JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise RequestError(f"{field} is {type(value).__name__}; it takes an object", param=field)
    return value
