"""Structured output: the fields of a request that say what its answer must match, made into one Grammar.

    response_format      {"type": "json_object"}                                       OpenAI's
                         {"type": "json_schema", "json_schema": {"schema": ...}}
                         {"type": "text"}                                              asks for nothing
    structured_outputs   {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
    guided_json, guided_regex, guided_choice, guided_grammar                           the same, older names

One of them at a time: two that both ask for something are an error that names both.
"""

from __future__ import annotations

from typing import Any

from weft.errors import RequestError
from weft.request import Grammar
from weft.server.protocol import SamplingFields
from weft.text.grammars import KINDS, WHITESPACE, grammar_from, json_grammar

_KINDS = (*KINDS, "json_object")
_UNSERVED = ("structural_tag", "disable_additional_properties")
_ANY_OBJECT = {"type": "object"}


def grammar_of(body: SamplingFields) -> Grammar | None:
    """Raises RequestError that names the field. What a grammar itself says is judged by the engine."""
    asked: list[tuple[str, Grammar]] = []
    if body.response_format is not None and body.response_format.get("type") != "text":
        asked.append(("response_format", _response_format(body.response_format)))
    if body.structured_outputs:
        asked.append(("structured_outputs", _structured_outputs(body.structured_outputs)))
    for kind in KINDS:
        name, value = f"guided_{kind}", getattr(body, f"guided_{kind}")
        if value is not None:
            asked.append((name, grammar_from(kind, value, name)))
    if len(asked) > 1:
        raise RequestError(f"{asked[0][0]} and {asked[1][0]} both say what the answer must match; one can",
                           param=asked[1][0])
    return asked[0][1] if asked else None


def _response_format(value: dict[str, Any]) -> Grammar:
    kind = value.get("type")
    if kind == "json_object":
        return json_grammar(_ANY_OBJECT, field="response_format")
    if kind != "json_schema":
        raise RequestError(f"response_format.type is {kind!r}; it is text, json_object or json_schema",
                           param="response_format.type")
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise RequestError("response_format.json_schema.schema is missing",
                           param="response_format.json_schema.schema")
    return json_grammar(schema, field="response_format.json_schema.schema")


def _structured_outputs(value: dict[str, Any]) -> Grammar:
    for name in _UNSERVED:
        if value.get(name):
            raise RequestError(f"structured_outputs.{name} is not supported",
                               param=f"structured_outputs.{name}", code="unsupported_parameter")
    given = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(given) != 1:
        said = f"has {' and '.join(given)}" if given else "asks for nothing"
        raise RequestError(f"structured_outputs {said}; it takes one of {', '.join(_KINDS)}",
                           param="structured_outputs")
    kind = given[0]
    whitespace: str | None = value.get("whitespace_pattern") or WHITESPACE
    if value.get("disable_any_whitespace"):
        whitespace = None
    if kind == "json_object":
        kind, value = "json", {"json": _ANY_OBJECT}
    return grammar_from(kind, value[kind], f"structured_outputs.{kind}", whitespace=whitespace)
