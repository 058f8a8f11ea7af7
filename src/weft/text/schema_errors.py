"""Advice on a JSON schema that the compiler refuses: the position of the keyword, and a replacement.

    'Unimplemented keys: ["not"]', schema  -->  "the keyword 'not' at #/properties/a cannot be enforced token by token:
                                                 list the allowed values, with enum, const or anyOf"

The compiler names a keyword without its position, and a library may have written the client's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

INSTEAD = {
    "not": "list the allowed values, with enum, const or anyOf",
    "if": "write each case as an object of an anyOf, with a const that tells them apart",
    "then": "it belongs to if",
    "else": "it belongs to if",
    "uniqueItems": "leave it out and check the answer, or give each item a place of its own with prefixItems",
    "contains": "give the schema of every item, with items, or of the first ones, with prefixItems",
    "minContains": "it belongs to contains",
    "maxContains": "it belongs to contains",
    "dependentRequired": "write each case as an object of an anyOf, with its own required",
    "dependentSchemas": "write each case as an object of an anyOf",
    "propertyNames": "use patternProperties, with additionalProperties false",
    "unevaluatedProperties": "use additionalProperties in each object of the anyOf or allOf",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "oneOf": "its parts may match one value together: write anyOf, or give each part a const that tells them apart",
}
"""Replacements for keywords of JSON Schema that no grammar enforces."""
_NAMES_OF_PARTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PARTS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS_OF_PARTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_KEYWORD = re.compile(r'"([$\w]+)"')
_NOTHING_MATCHES = "NoExtensionBias"
"""The compiler's word for a grammar in which no token may begin a text."""
_ONE_OF = "oneOf constraints are not supported"


def explained(reason: str, grammar: str) -> str:
    """Return the compiler's ``reason`` with the position of the keyword and a remedy. ``grammar``: the text of a
    ``Grammar``."""
    if reason == _NOTHING_MATCHES:
        return "nothing matches it: a rule, or a $ref, leads only back to itself"
    match = _KEYWORDS.search(reason)
    keywords = _KEYWORD.findall(match[1]) if match else ["oneOf"] if _ONE_OF in reason else []
    if not keywords:
        return reason
    schemas = [part["json_schema"] for part in json.loads(grammar)["grammars"] if "json_schema" in part]
    for keyword in keywords:
        place = next((place for schema in schemas for place in _places_of(schema, keyword, "#")), None)
        if place is not None:
            remedy = f": {INSTEAD[keyword]}" if keyword in INSTEAD else ""
            return f"the keyword {keyword!r} at {place} cannot be enforced token by token{remedy}"
    return reason


def _places_of(schema: Any, keyword: str, pointer: str) -> Iterator[str]:
    """Yield the JSON pointer of each subschema that has ``keyword``."""
    if not isinstance(schema, dict):
        return
    if keyword in schema:
        yield pointer
    for name in _PARTS:
        yield from _places_of(schema.get(name), keyword, f"{pointer}/{name}")
    for name in _LISTS_OF_PARTS:
        parts = schema.get(name)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from _places_of(part, keyword, f"{pointer}/{name}/{number}")
    for name in _NAMES_OF_PARTS:
        parts = schema.get(name)
        for own, part in (parts if isinstance(parts, dict) else {}).items():
            yield from _places_of(part, keyword, f"{pointer}/{name}/{str(own).replace('~', '~0').replace('/', '~1')}")
