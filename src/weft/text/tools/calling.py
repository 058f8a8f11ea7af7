"""Grammars of answers that are calls of the given tools, in the format of the model's family.

    start: LEAD call (BETWEEN call)* TAIL          "required"; only one call for "named"
    call:  BEFORE (tool_0 | tool_1 | ...) BEHIND
    tool_0:  {"name": "f", "arguments": <JSON schema of its parameters> }             json
             <function=f> <parameter=x> text or JSON </parameter> ... </function>     xml
             f(x=<JSON schema of x>, ...)                                             python
             call:f{x:<JSON schema of x>,...}                                         braces
             <f> <x> text, JSON, or elements by the schema of x </x> ... </f>         nested

So the arguments always fit the tool's schema. If the tool is not strict, parts of the schema that no grammar enforces
(``uniqueItems``, ``not``, unknown formats, look-around in patterns) are left out: it promises no more. Tags and
Python have one value per parameter, in the order of the schema; optional parameters may be left out, and additional
properties are not written. A string in tags is free text: its length and pattern are not enforced. Nested elements are
written for arrays with a schema of their items and objects with properties, at any depth; other arrays and objects are
JSON text, which readers accept too.

``strict_grammar`` leaves the model free to call or not: free text, and after an opening marker a call that fits the
schema. It is used for all tools of a request if one tool is strict or not all tools are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammars import (
    FREE_TEXT,
    GUIDANCE,
    TokenOf,
    json_schema,
    lark_grammar,
    lenient,
    literal,
    quoted,
    slashed,
)
from weft.text.tools.definitions import Tool
from weft.text.tools.formats import ITEM, Tags, ToolFormat
from weft.text.tools.values import alternatives, fixed_values, json_type, types_of

_NUMBER = "\0"
"""Placeholder for a call's number."""


class _Rules:
    """Lark rules of a grammar that is being written. ``add`` returns the name of a new rule."""

    def __init__(self, token_of: TokenOf) -> None:
        self.lines: list[str] = []
        self._token_of = token_of

    def add(self, body: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body or quoted('')}")
        return name

    def free_text(self, end: str) -> str:
        """Return free text and then ``end``."""
        marker = self.text(end.lstrip("\n"))
        if marker.startswith("<["):
            return _sequence(self.add(FREE_TEXT), marker)  # free text includes line ends before the marker
        return self.add(FREE_TEXT, f"[suffix={quoted(end)}]")

    def text(self, text: str) -> str:
        return literal(text, self._token_of)

    def schema(self, schema: dict[str, Any], field: str) -> str:
        return self.add("%json " + json.dumps(json_schema(schema, field=field)))


def calls_grammar(
    row: ToolFormat,
    tools: Sequence[Tool],
    *,
    several: bool,
    token_of: TokenOf,
    field: str,
    around: tuple[str, str] = ("", ""),
) -> Grammar:
    """Return the grammar of an answer that is one call of ``tools``; with ``several``, one or more calls. ``around``:
    texts before and after the calls."""
    rules = _Rules(token_of)
    calls = _calls(rules, row, tools, several=several, field=field)
    body = _sequence(rules.text(around[0]), calls, rules.text(around[1]))
    return lark_grammar("\n".join([f"start: {body}", *rules.lines]), field=field)


def strict_grammar(row: ToolFormat, tools: Sequence[Tool], *, several: bool, token_of: TokenOf, field: str) -> Grammar:
    """Return a grammar of free text with or without calls. Raise RequestError if no marker opens a call in this
    format."""
    opening = row.writes.lead + row.writes.before
    marker = next((open for open in row.opens if opening.startswith(open)), None)
    text = literal(marker, token_of) if marker else ""
    # Free text has no special tokens. So a marker of several tokens, some of them special, cannot end it, unless it
    # begins with the token that only calls of the format have.
    own = token_of(row.tokens[0]) if len(row.tokens) == 1 else None
    begins_calls = text.startswith(f"<[{own}]>")
    if marker is None or ("<[" in text and token_of(marker) is None and not begins_calls):
        raise RequestError(
            f"{field}: strict and allowed tools need the mode required with this model, whose "
            f"calls ({row.name}) begin with no marker of one token",
            param=field,
        )
    rules = _Rules(token_of)
    body = _calls(rules, row, tools, several=several, field=field, without=marker)
    head = f"TEXT {text}" if text.startswith("<[") else rules.add(FREE_TEXT, f"[suffix={quoted(marker)}]")
    again = "*" if several and not row.writes.lead else "?"
    return lark_grammar(
        "\n".join([f"start: (begun){again} TEXT", f"begun: {head} {body}", f"TEXT: {FREE_TEXT}", *rules.lines]),
        field=field,
    )


def _calls(
    rules: _Rules, row: ToolFormat, tools: Sequence[Tool], *, several: bool, field: str, without: str = ""
) -> str:
    """Add the rules of calls. ``without``: an already written marker, with which ``lead`` or ``before`` begins."""
    writes = row.writes
    lead, before = writes.lead, writes.before
    first_before = before
    if without:
        if lead:
            lead = lead.removeprefix(without)
        else:
            first_before = before.removeprefix(without)
    names = " | ".join(_call(rules, row, tool, field) for tool in tools)
    named = rules.add(names)
    first = _sequence(rules.text(first_before), named, rules.text(writes.behind))
    call = _sequence(rules.text(before), named, rules.text(writes.behind))
    # Without a lead, each call has its own envelope; under a strict grammar each call repeats the marker.
    repeats = several and (writes.lead or not without)
    # A lexer takes the longest match: a separator that also begins the end becomes a terminal of its own, before both.
    shared = writes.between if writes.tail.startswith(writes.between) else ""
    between, behind = rules.text(writes.between.removeprefix(shared)), rules.text(shared)
    more = f"({_sequence(between, call, behind)})*" if repeats else ""
    return _sequence(rules.text(lead), first, behind, more, rules.text(writes.tail.removeprefix(shared)))


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _call(rules: _Rules, row: ToolFormat, tool: Tool, field: str) -> str:
    writes, name = row.writes, tool.name
    if not tool.strict:
        tool = replace(tool, parameters=lenient(tool.parameters, field=field))
    if writes.style == "json":
        before, number, behind = writes.json_head(name, _NUMBER).partition(_NUMBER)
        numbered = (rules.add(slashed("[0-9]{1,3}")), quoted(behind)) if number else ()
        return rules.add(_sequence(quoted(before), *numbered, rules.schema(tool.parameters, field), quoted("}")))
    if writes.style == "headed":
        head = row.head
        assert head is not None
        begin = (head.before + head.name + head.arguments).replace("{name}", name)
        schema = rules.schema(tool.parameters, field)
        return rules.add(_sequence(rules.text(begin), schema, rules.text(head.behind)))
    if writes.style == "xml":
        tags = row.tags
        parts = [_xml_parameter(rules, tags, tool, key, field) for key in tool.properties]
        opening, marked, after = tags.begin(name, _NUMBER).partition(_NUMBER)
        index = (rules.add(slashed("[0-9]{1,3}")), rules.text(after)) if marked else ()
        return rules.add(_sequence(rules.text(opening), *index, *parts, rules.text(tags.function_end)))
    if writes.style == "nested":
        elements = _Elements(rules, row.tags, tool, field)
        begin, end = rules.text(row.tags.begin(name)), rules.text(row.tags.function_end)
        return rules.add(_sequence(begin, elements.of_object(tool.properties, tool.parameters.get("required")), end))
    if writes.style == "braces":
        members = _members(rules, tool, ",", lambda key: _brace_member(rules, row.quote, tool, key, field))
        return rules.add(_sequence(quoted(f"call:{name}{{"), members, quoted("}")))
    arguments = _members(
        rules, tool, ", ", lambda key: _sequence(quoted(f"{key}="), rules.schema(_part_schema(tool, key), field))
    )
    return rules.add(_sequence(quoted(f"{name}("), arguments, quoted(")")))


def _required(tool: Tool) -> set[str]:
    return set(tool.parameters.get("required") or ())


def _part_schema(tool: Tool, key: str) -> dict[str, Any]:
    return _with_definitions(tool, tool.properties[key])


def _with_definitions(tool: Tool, schema: Any) -> dict[str, Any]:
    """Return a part of the tool's schema, with the definitions that it may refer to and the options."""
    names = [name for name in ("$defs", "definitions", GUIDANCE) if name in tool.parameters]
    shared: dict[str, Any] = {name: tool.parameters[name] for name in names}
    return {**shared, **schema} if isinstance(schema, dict) else shared


_ANY_TYPE = {"string", "number", "boolean", "object", "array", "null"}


def _xml_parameter(rules: _Rules, tags: Tags, tool: Tool, key: str, field: str) -> str:
    schema, end = _part_schema(tool, key), tags.value_end
    if (tags.heads is not None or tags.says_type) and tool.input_regex is None:
        forms = " | ".join(_typed(rules, tags, tool, key, field))
        return rules.add(forms) if key in _required(tool) else f"{rules.add(forms)}?"
    if tool.input_regex is not None:
        value = f"{rules.add(slashed(tool.input_regex))} {rules.text(end)}"
    elif "string" in types_of(schema, schema) and not _lists_values(schema):
        value = rules.free_text(end)
    else:
        value = f"({' | '.join(_untyped(rules, tool, schema, end, field))})"
    rule = rules.add(_sequence(rules.text(tags.parameter_begin(key, "string")), value))
    return rule if key in _required(tool) else f"{rule}?"


def _untyped(rules: _Rules, tool: Tool, schema: dict[str, Any], end: str, field: str) -> list[str]:
    """Return the forms of a value whose type the reader takes from the schema, each with the end tag ``end``. Strings
    are written as they are: a reader keeps quotes, because texts of the type string have none."""
    parts, closing = alternatives(schema, schema), rules.text(end)
    if not any(fixed_values(part) for part in parts):
        return [_sequence(rules.schema(schema, field), closing)]
    forms: list[str] = []
    for part in parts:
        if listed := fixed_values(part):
            forms += [_sequence(quoted(_listed_text(value)), closing) for value in listed]
        elif "string" in types_of(part, schema) and not _lists_values(part):
            forms.append(rules.free_text(end))
        else:
            forms.append(_sequence(rules.schema(_with_definitions(tool, part), field), closing))
    return forms


def _listed_text(value: Any) -> str:
    """Return a listed value as tags have it: a string without quotes, any other value in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _typed(rules: _Rules, tags: Tags, tool: Tool, key: str, field: str) -> list[str]:
    """Return the forms of a parameter whose tag says the type of its value: one for each type and each listed value."""
    schema, forms = _part_schema(tool, key), []
    for part in alternatives(schema, schema):
        if listed := fixed_values(part):
            forms += [
                rules.text(f"{tags.parameter_begin(key, json_type(value))}{_listed_text(value)}{tags.value_end}")
                for value in listed
            ]
            continue
        types = types_of(part, schema) or _ANY_TYPE
        for kind in sorted(types - ({"integer"} if "number" in types else set())):
            begin = rules.text(tags.parameter_begin(key, "number" if kind == "integer" else kind))
            if kind == "string" and not _lists_values(part):
                forms.append(_sequence(begin, rules.free_text(tags.value_end)))
            else:
                of_kind = _with_definitions(tool, {**part, "type": kind})
                forms.append(_sequence(begin, rules.schema(of_kind, field), rules.text(tags.value_end)))
    return forms


class _Elements:
    """Rules of the nested elements of a call of ``tool``. A schema that refers to itself becomes a rule that does."""

    def __init__(self, rules: _Rules, tags: Tags, tool: Tool, field: str) -> None:
        self._rules, self._tags, self._tool, self._field = rules, tags, tool, field
        self._known: dict[tuple[int, str], str] = {}
        """Names of rules, by the identity of a schema and the name of the element."""

    def of_object(self, properties: Mapping[str, Any], required: Any) -> str:
        """Return the elements of an object: those of its properties in order."""
        names = required if isinstance(required, list) else ()
        return _sequence(*(self._one(key, properties[key]) + "?" * (key not in names) for key in properties))

    def _one(self, name: str, schema: Any) -> str:
        key, lines = (id(schema), name), self._rules.lines
        if key not in self._known:
            rule = self._known[key] = self._rules.add("")
            index, end = len(lines) - 1, self._tags.element_end(name)
            values = " | ".join(self._values(schema if isinstance(schema, dict) else {}, end))
            lines[index] = f"{rule}: {self._rules.text(self._tags.parameter_begin(name, ''))} ({values})"
        return self._known[key]

    def _values(self, schema: dict[str, Any], end: str) -> list[str]:
        """Return the forms of a value, each with the end tag ``end``."""
        rules, root, closing = self._rules, self._tool.parameters, self._rules.text(end)
        if self._tool.input_regex is not None:
            return [_sequence(rules.add(slashed(self._tool.input_regex)), closing)]
        forms: list[str] = []
        types: set[str] = set()
        for part in alternatives(schema, root) or [schema]:
            kinds, items, properties = types_of(part, root), part.get("items"), part.get("properties")
            if listed := fixed_values(part):
                forms += [_sequence(quoted(_listed_text(value)), closing) for value in listed]
                continue
            if "array" in kinds and isinstance(items, dict) and "prefixItems" not in part:
                bounds = f"{{{part.get('minItems', 0)},{part.get('maxItems', '')}}}"
                forms.append(_sequence(self._one(ITEM, items) + bounds, closing))
                kinds = kinds - {"array"}
            if "object" in kinds and isinstance(properties, dict) and properties:
                forms.append(_sequence(self.of_object(properties, part.get("required")), closing))
                kinds = kinds - {"object"}
            types |= kinds
        if "string" in types or not (types or forms):
            return [*forms, rules.free_text(end)]
        if types:
            typed = _with_definitions(self._tool, {**schema, "type": sorted(types)})
            forms.append(_sequence(rules.schema(typed, self._field), closing))
        return forms


def _lists_values(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema has an enum or a constant anywhere: then free text would not be enough."""
    text = json.dumps(schema)
    return '"enum"' in text or '"const"' in text


def _brace_member(rules: _Rules, quote: str, tool: Tool, key: str, field: str) -> str:
    schema, token = _part_schema(tool, key), rules.text(quote)
    is_text = types_of(schema, schema) == {"string"} and not _lists_values(schema) and tool.input_regex is None
    if not is_text:
        return _sequence(quoted(f"{key}:"), rules.schema(schema, field))
    return _sequence(quoted(f"{key}:"), token, rules.free_text(quote))


def _members(rules: _Rules, tool: Tool, separator: str, written: Callable[[str], str]) -> str:
    """Return a rule of members: the required ones in order, then any of the others."""
    comma = quoted(separator)
    required = [rules.add(written(key)) for key in tool.properties if key in _required(tool)]
    rest = [rules.add(written(key)) for key in tool.properties if key not in _required(tool)]
    if required:
        return _sequence(f" {comma} ".join(required), *(f"({comma} {rule})?" for rule in rest))
    starts = [
        _sequence(rule, *(f"({comma} {later})?" for later in rest[index + 1 :])) for index, rule in enumerate(rest)
    ]
    return f"({' | '.join(starts)})?" if starts else ""
