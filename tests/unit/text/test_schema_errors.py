"""A refused keyword of a JSON schema: its place, and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.constrained import compiler
from weft.errors import RequestError
from weft.text.grammars import json_grammar
from weft.text.schema_errors import INSTEAD

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"type": "object", "properties": {"a/b": {"anyOf": [{"not": {"const": 1}}]}}}, "#/properties/a~1b/anyOf/0"),
    "if": ({"$defs": {"x": {"if": {"required": ["a"]}, "then": {"required": ["b"]}}}, "$ref": "#/$defs/x"},
           "#/$defs/x"),
    "uniqueItems": ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items"),
    "contains": ({"prefixItems": [{"contains": {"type": "integer"}}]}, "#/prefixItems/0"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "#"),
    "propertyNames": ({"type": "object", "additionalProperties": {"propertyNames": {"pattern": "^a"}}},
                      "#/additionalProperties"),
    "unevaluatedProperties": ({"allOf": [{"type": "object", "unevaluatedProperties": False}]}, "#/allOf/0"),
    "oneOf": ({"type": "object", "properties": {"n": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
              "#/properties/n"),
}  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_not_enforced_is_named_with_its_place_and_its_remedy(keyword: str) -> None:
    schema, place = REFUSED[keyword]
    with pytest.raises(RequestError) as refused:
        compiler().build(json_grammar(schema, field="response_format.json_schema.schema"))
    assert refused.value.code == "invalid_grammar"
    assert refused.value.message.endswith(
        f"the keyword {keyword!r} at {place} cannot be enforced token by token: {INSTEAD[keyword]}"
    )


def test_a_property_that_is_called_like_a_keyword_is_none() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer"}, "if": {"const": "uniqueItems"}}}
    compiler().build(json_grammar(schema, field="f"))
    wrong = json_grammar({"type": "object", "properties": {"not": {"anyOf": [{"not": {}}]}}}, field="f")
    with pytest.raises(RequestError, match=r"'not' at #/properties/not/anyOf/0 "):
        compiler().build(wrong)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "a["}, "invalid pattern 'a[': unclosed character class"),
        ({"type": "object", "patternProperties": {"(?=x)": {}}}, "invalid pattern '(?=x)': look-around"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "a $ref, leads only back to itself"),
        ({"anyOf": [{"$ref": "#"}]}, "a $ref, leads only back to itself"),
    ],
)
def test_a_reason_names_the_pattern_or_the_circle(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        compiler().build(json_grammar(schema, field="f"))
    assert words in refused.value.message


def test_other_reasons_stay_the_compilers() -> None:
    with pytest.raises(RequestError, match="Unknown format: hostname2"):
        compiler().build(json_grammar({"type": "string", "format": "hostname2"}, field="f"))
