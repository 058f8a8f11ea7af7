"""Calls of nested elements (MiniMax-M3): values by the schema, tags that are missing, grammars of nested schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest

from tests.fixtures.constrained import tokenizer, write
from weft.text.tools.calling import calls_grammar
from weft.text.tools.definitions import read_tools
from weft.text.tools.formats import FORMATS
from weft.text.tools.json_calls import HELD_CHARS
from weft.text.tools.reader import ToolCallReader

M3 = "]<]minimax[>["
[ROW] = [row for row in FORMATS if row.name == "minimax_m3"]
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "n": {"type": "integer"},
    "flag": {"type": "boolean"},
    "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "grid": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
    "maybe": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "opts": {"type": "object", "properties": {"unit": {"type": "string"}, "item": {"type": "number"}}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "free": {},
}
ROWS = {"row": {"type": "object", "properties": {"sku": {"type": "string"}, "q": {"type": ["integer", "null"]}}}}
TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES, "$defs": ROWS}},
        }
        for name in ("f", "g")
    ]
)
Calls = list[tuple[str, dict[str, Any]]]


def el(name: str, *inside: str) -> str:
    return f"{M3}<{name}>{''.join(inside)}{M3}</{name}>"


def items(*values: str) -> str:
    return "".join(el("item", value) for value in values)


def call(*inside: str, name: str = "f") -> str:
    return f'{M3}<invoke name="{name}">{"".join(inside)}{M3}</invoke>\n'


def block(*calls: str) -> str:
    return f"{M3}<tool_call>\n{''.join(calls)}{M3}</tool_call>"


def read(text: str, step: int, *, eager: bool) -> tuple[str, Calls]:
    reader, content, calls = ToolCallReader(ROW, TOOLS, eager=eager), "", []
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    for part in [part for parts in [*map(reader.push, pieces), reader.finish()] for part in parts]:
        if isinstance(part, str):
            content += part
            continue
        if part.name is not None:
            calls.append([part.name, ""])
        calls[-1][1] += part.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


VALUES: list[tuple[str, Any]] = [
    (el("path", "\n<b>a</b> < 3 "), {"path": "\n<b>a</b> < 3 "}),
    (el("path", "12") + el("mode", "null") + el("n", " 3\n") + el("flag", "true"),
     {"path": "12", "mode": None, "n": 3, "flag": True}),
    (el("n", "three"), {"n": "three"}),
    (el("tags", items("a", "2")), {"tags": ["a", "2"]}),
    (el("tags", items("a")), {"tags": ["a"]}),
    (el("tags"), {"tags": []}),
    (el("tags", '["a", "b"]'), {"tags": ["a", "b"]}),
    (el("tags", el("tag", "a"), el("tag", "b")), {"tags": ["a", "b"]}),
    (el("tags", "a") + el("tags", "b"), {"tags": ["a", "b"]}),
    (el("grid", items(items("1", "2"), items("3"))), {"grid": [[1, 2], [3]]}),
    (el("rows", "\n", el("item", el("sku", "7"), el("q", "2")), el("item", el("q", "null"))),
     {"rows": [{"sku": "7", "q": 2}, {"q": None}]}),
    (el("maybe", items("1")), {"maybe": [1]}),
    (el("maybe", "null"), {"maybe": None}),
    (el("pair", items("1", "1")), {"pair": [1, "1"]}),
    (el("opts", el("unit", "C"), el("item", "2.5")), {"opts": {"unit": "C", "item": 2.5}}),
    (el("opts", el("item", "1")), {"opts": {"item": 1}}),
    (el("opts"), {"opts": {}}),
    (el("opts", "hm ", el("unit", "C"), el("unit", "F")), {"opts": {"unit": ["C", "F"], "$text": "hm "}}),
    (el("map", el("a b", "1"), el("c", "2")), {"map": {"a b": 1, "c": 2}}),
    (el("free", "3"), {"free": "3"}),
    (el("free", items("3")), {"free": ["3"]}),
    (el("free", el("a", items("3"))), {"free": {"a": ["3"]}}),
    (el("new", el("a", "1")), {"new": {"a": "1"}}),
    ("", {}),
]  # fmt: skip
MISTAKES: list[tuple[str, str, Calls]] = [
    (block(call(el("path", f"see {M3}</invoke>, {block(call(name='g'))}"))), "",
     [("f", {"path": f"see {M3}</invoke>, {block(call(name='g'))}"})]),
    (block(call(el("path", el("path", "a")))), "", [("f", {"path": el("path", "a")})]),
    (block(call(f"{M3}<path>a")), "", [("f", {"path": "a"})]),
    (block(call(f"{M3}<path>a{M3}</parameter>")), "", [("f", {"path": "a"})]),
    (block(call(f"{M3}<path>a", el("n", "1"))), "", [("f", {"path": "a", "n": 1})]),
    (block(call(f"{M3}<path>a"), call(el("path", "b"))), "", [("f", {"path": "a"}), ("f", {"path": "b"})]),
    (block(call(f"{M3}<opts>{M3}<unit>C{M3}</opts>")), "", [("f", {"opts": {"unit": "C"}})]),
    (block(call(el("path", "a")).replace(f"{M3}</invoke>", ""), call(name="g")), "", [("f", {"path": "a"}), ("g", {})]),
    (block(call(el("path", "a")) + f"{M3}</invoke>", call(name="g")), "", [("f", {"path": "a"}), ("g", {})]),
    (block(call(f"{M3}<rows>{M3}<item>{M3}<q>2{M3}</item>", el("item", el("q", "3")), f"{M3}</rows>")), "",
     [("f", {"rows": [{"q": 2}, {"q": 3}]})]),
    (block(call(el("path", "a"), f"{M3}</path>", el("n", "1"))), "", [("f", {"path": "a", "n": 1})]),
    (block(call()) + f"{M3}</invoke>", "", [("f", {})]),
    (block(call()).replace('"f"', "'f'"), "", [("f", {})]),
    (block(call()).replace('"f"', "f"), "", [("f", {})]),
    (f"So: {block(call(name='tools.f'))} It is.", "So:  It is.", [("f", {})]),
    (block(call("junk")), block(call("junk")), []),
    (f"{M3}<tool_call>{M3} is how it begins.", f"{M3}<tool_call>{M3} is how it begins.", []),
    (block(call(el("opts", f"{M3}<a>" * 101))), "", [("f", {"opts": f"{M3}<a>" * 101})]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "arguments"), VALUES)
def test_elements_are_the_values_that_the_schema_says(body: str, arguments: dict[str, Any]) -> None:
    text = block(call(body), call(el("n", "1"), name="g"))
    for step, eager in ((1, True), (5, True), (len(text), False)):
        assert read(text, step, eager=eager) == ("", [("f", arguments), ("g", {"n": 1})])


@pytest.mark.parametrize(("text", "content", "calls"), MISTAKES)
def test_missing_and_literal_tags_are_read_by_the_rest_of_the_answer(text: str, content: str, calls: Calls) -> None:
    for step, eager in ((1, True), (5, True), (len(text), False)):
        shown, found = read(text, step, eager=eager)
        assert ("".join(shown.split()), found) == ("".join(content.split()), calls)


def test_a_long_text_is_emitted_while_it_comes() -> None:
    reader, given = ToolCallReader(ROW, TOOLS, eager=True), ""
    for piece in (f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<path>', *["lorem " * 10] * 20):
        given += "".join(part.arguments for part in reader.push(piece) if not isinstance(part, str))
    assert len(given) > HELD_CHARS


NODE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["leaf", "a b"]},
        "on": {"type": "boolean"},
        "inner": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
DEEP = {
    "type": "object",
    "properties": {
        "node": {"$ref": "#/$defs/node"},
        "grid": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1},
            "minItems": 2,
            "maxItems": 3,
        },
        "either": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "array", "items": {"enum": [1, None]}}]},
        "maybe": {"anyOf": [{"const": "x"}, {"type": "null"}]},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"const": "x"}],
            "items": {"type": "null"},
            "minItems": 2,
        },
        "both": {
            "allOf": [
                {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ],
            "maxProperties": 2,
        },
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    },
    "$defs": {"node": NODE},
    "required": ["node", "grid"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("with_markers", [True, False])
def test_random_tokens_under_the_grammar_of_a_nested_schema_fit_it(with_markers: bool) -> None:
    [tool] = read_tools([{"type": "function", "function": {"name": "deep", "parameters": DEEP}}])
    token_of = tokenizer(with_markers).added_id
    grammar = calls_grammar(ROW, [tool], several=False, token_of=token_of, field="tools")
    seen: set[str] = set()
    for seed in range(12):
        text = write(grammar, seed, with_markers=with_markers, tokens_max=3000)
        assert text is not None
        reader = ToolCallReader(ROW, [tool], eager=False)
        [part] = [*reader.push(text), *reader.finish()]
        assert not isinstance(part, str)
        arguments = json.loads(part.arguments)
        jsonschema.validate(arguments, DEEP)
        seen |= arguments.keys()
    assert seen == DEEP["properties"].keys()


def test_nested_values_are_written_as_the_model_writes_them() -> None:
    grammar = calls_grammar(ROW, TOOLS[:1], several=False, token_of=tokenizer().added_id, field="tools")
    wish = block(
        call(
            el("path", "a < b\n</x>"),
            el("tags", items("a", "b c")),
            el("rows", el("item", el("sku", "7"), el("q", "2")), items("")),
            el("opts", el("unit", "C")),
            el("map", '{"a": 1}'),
            el("free", "x"),
        )
    )
    assert write(grammar, 1, wish=wish, tokens_max=900) == wish
    with pytest.raises(AssertionError, match="refused"):
        write(grammar, 1, wish=wish.replace(">2]", ">two]"), tokens_max=900)


def test_alternatives_that_refer_to_one_another_are_read_once() -> None:
    again = [{"$ref": f"#/$defs/{letter}"} for letter in "ab" * 40]
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [*again, {"type": "integer"}]}, "b": {"anyOf": [*again, {"type": "boolean"}]}},
    }
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    begun = time.process_time()
    for row in FORMATS:
        calls_grammar(row, tools, several=False, token_of=lambda text: None, field="tools")
    reader = ToolCallReader(ROW, tools, eager=False)
    [part] = [*reader.push(block(call(el("x", "3")))), *reader.finish()]
    assert not isinstance(part, str)
    assert json.loads(part.arguments) == {"x": 3}
    assert time.process_time() - begun < 5
