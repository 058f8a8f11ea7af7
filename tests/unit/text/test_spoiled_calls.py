"""Texts that models are known to write, and spoiled ones: missing, doubled, nested and literal markers, types, names.
Each is read whole, cut at every character, and streamed, with one outcome. ``CONTENT`` says why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.text.tools.definitions import read_tools
from weft.text.tools.formats import FORMATS
from weft.text.tools.reader import ToolCallReader
from weft.text.tools.values import read_value, types_of

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "import": {"type": "string"},
    "max-n.x": {"type": "integer"},
    "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "opts": {"$ref": "#/$defs/opts"},
    "kind": {"enum": [1, 2]},
    "free": {"description": "anything"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"opts": {"type": ["object", "null"]}}}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
        for name in ("write", "mcp.fs-write_v2", "class")
    ]
)
BY_NAME = {row.name: row for row in FORMATS}
Calls = list[tuple[str, Any]]
X, G = "qwen3_xml", "glm"


def xml(**values: str) -> str:
    listed = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=write>\n{listed}</function>\n</tool_call>"


def wrote(**values: Any) -> Calls:
    return [("write", values)]


ONE = xml(path="a")
M2 = '<minimax:tool_call><invoke name="write"><parameter name="path">a</parameter></invoke></minimax:tool_call>'
CODE = 'if a < b and c > d:\n    print("</div>", {1: [2]})\n\n'
TYPED: list[tuple[str, str, Any]] = [
    ("mode", '{"a": 1}', '{"a": 1}'),
    ("mode", "[1, 2]", "[1, 2]"),
    ("mode", '"hello"', '"hello"'),
    ("mode", "null", None),
    ("mode", "3", "3"),
    ("max-n.x", "3", 3),
    ("max-n.x", "three", "three"),
    ("max-n.x", '{"a": 1}', '{"a": 1}'),
    ("max-n.x", '"3"', 3),
    ("size", "1e2", 100.0),
    ("size", "NaN", "NaN"),
    ("size", "-Infinity", "-Infinity"),
    ("size", "1e999", "1e999"),
    ("size", "0x10", "0x10"),
    ("size", "1_000", "1_000"),
    ("size", "007", "007"),
    ("flag", "True", True),
    ("flag", "yes", "yes"),
    ("tags", "['a', 'it''s']", ["a", "its"]),
    ("tags", '"[1]"', [1]),
    ("tags", "a, b", "a, b"),
    ("opts", "{'a': True, 'b': None}", {"a": True, "b": None}),
    ("opts", "None", None),
    ("opts", "[1]", "[1]"),
    ("opts", "{1: 2}", {"1": 2}),
    ("kind", "2", 2),
    ("kind", "two", "two"),
    ("path", '{"a": "b"}', '{"a": "b"}'),
    ("path", "true", "true"),
    ("path", "", ""),
    ("free", "3", "3"),
    ("unknown", "[3]", "[3]"),
]

CALLED: list[tuple[str, str, str, str, Calls]] = [
    (
        "no end of a value before the next one",
        X,
        ONE.replace("</parameter>\n", "<parameter=content>\nb\n</parameter>\n"),
        "",
        wrote(path="a", content="b"),
    ),
    (
        "the same without line ends",
        X,
        "<tool_call><function=write><parameter=path>a<parameter=content>b</parameter></function></tool_call>",
        "",
        wrote(path="a", content="b"),
    ),
    ("no end of the last value", X, ONE.replace("</parameter>\n", ""), "", wrote(path="a")),
    (
        "no end of the last value, text after",
        X,
        ONE.replace("</parameter>\n", "") + " Done.",
        " Done.",
        wrote(path="a"),
    ),
    ("no end of value and function", X, ONE.replace("</parameter>\n</function>\n", "") + ONE, "", wrote(path="a") * 2),
    ("no end of the function", X, ONE.replace("</function>\n", ""), "", wrote(path="a")),
    ("no end of the envelope", X, ONE.replace("</tool_call>", "") + ONE, "", wrote(path="a") * 2),
    ("no end at all, the answer ends", X, ONE.partition("</function>")[0], "", wrote(path="a")),
    ("no envelope", X, ONE.replace("<tool_call>\n", ""), "", wrote(path="a")),
    ("doubled envelope", X, f"<tool_call>{ONE}</tool_call>", "", wrote(path="a")),
    ("doubled end of a value", X, ONE.replace("</parameter>", "</parameter>\n</parameter>"), "", wrote(path="a")),
    ("doubled end of the function", X, ONE.replace("</function>", "</function></function>"), "", wrote(path="a")),
    (
        "doubled end of the function before another call",
        "minimax_m2",
        M2.replace("</invoke>", "</invoke></invoke>" + M2.partition(">")[2].partition("</minimax")[0]),
        "",
        wrote(path="a") * 2,
    ),
    ("text around", X, f"First.\n\n{ONE}\n\nThen.", "First.\n\nThen.", wrote(path="a")),
    (
        "ends of tags in a value",
        X,
        xml(content="</parameter>, </function> or </tool_call> </tool_call>x"),
        "",
        wrote(content="</parameter>, </function> or </tool_call> </tool_call>x"),
    ),
    (
        "an opening tag in a value",
        X,
        xml(content="<tool_call> <function=x> <parameter=nope>"),
        "",
        wrote(content="<tool_call> <function=x> <parameter=nope>"),
    ),
    ("code in a value", X, xml(content=CODE), "", wrote(content=CODE)),
    ("JSON in a text", X, xml(content='{"name": "x"}'), "", wrote(content='{"name": "x"}')),
    (
        "names with dashes, dots and keywords",
        X,
        "<tool_call><function=mcp.fs-write_v2><parameter=import>x</parameter><parameter=max-n.x>2</"
        "parameter></function></tool_call>",
        "",
        [("mcp.fs-write_v2", {"import": "x", "max-n.x": 2})],
    ),
    (
        "JSON in the envelope of tags",
        X,
        '<tool_call>{"name": "write", "arguments": {"path": "a"}}</tool_call>',
        "",
        wrote(path="a"),
    ),
    (
        "GLM without line ends",
        G,
        "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>",
        "",
        wrote(path="a"),
    ),
    (
        "GLM without arguments",
        G,
        "<tool_call>class</tool_call>\n<tool_call>class\n</tool_call>",
        "",
        [("class", {})] * 2,
    ),
    (
        "GLM without ends of values",
        G,
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a\n<arg_key>flag</arg_key>\n<arg_val"
        "ue>true\n</tool_call>",
        "",
        wrote(path="a", flag=True),
    ),
    (
        "GLM with tags in a value",
        G,
        "<tool_call>write<arg_key>content</arg_key><arg_value></arg_value>x</tool_call>y</arg_value></tool_call>",
        "",
        wrote(content="</arg_value>x</tool_call>y"),
    ),
    (
        "LFM2 with a raw line end",
        "lfm2",
        '<|tool_call_start|>[write(content="a\nb")]<|tool_call_end|>',
        "",
        wrote(content="a\nb"),
    ),
    (
        "LFM2.5 with a quote in a text",
        "lfm2",
        "<|tool_call_start|>[write(content='it's \"so\"', path='b')]<|tool_call_end|>",
        "",
        wrote(content='it\'s "so"', path="b"),
    ),
    (
        "LFM2 with a marker in a text",
        "lfm2",
        '<|tool_call_start|>[write(path="<|tool_call_end|>")]<|tool_call_end|>',
        "",
        wrote(path="<|tool_call_end|>"),
    ),
    (
        "LFM2 names",
        "lfm2",
        "<|tool_call_start|>[mcp.fs-write_v2(import='x', max-n.x=-2), class()]<|tool_call_end|>",
        "",
        [("mcp.fs-write_v2", {"import": "x", "max-n.x": -2}), ("class", {})],
    ),
    (
        "LFM2 JSON values",
        "lfm2",
        "<|tool_call_start|>[write(opts={\"a\": [true, null, 'b']}, flag=False)]<|tool_call_end|>",
        "",
        wrote(opts={"a": [True, None, "b"]}, flag=False),
    ),
    (
        "LFM2 escapes",
        "lfm2",
        r"""<|tool_call_start|>[write(content="a\n\"b\" \u00e9 \d")]<|tool_call_end|>""",
        "",
        wrote(content='a\n"b" é \\d'),
    ),
    (
        "an escape beyond Unicode stays as it is written",
        "lfm2",
        r"<|tool_call_start|>[write(path='\U00110000 \U0001f600')]<|tool_call_end|>",
        "",
        wrote(path="\\U00110000 \U0001f600"),
    ),
    ("LFM2 without an end", "lfm2", "<|tool_call_start|>[write(path='a')]", "", wrote(path="a")),
    (
        "Gemma with braces and ends in a text",
        "gemma4",
        '<|tool_call>call:write{content:<|"|>}<tool_call|>"{<|"|>,flag:true}<tool_call|>',
        "",
        wrote(content='}<tool_call|>"{', flag=True),
    ),
    (
        "Gemma nested",
        "gemma4",
        '<|tool_call>call:write{opts:{<|"|>a b<|"|>:[1,{c:<|"|>d<|"|>}],e:null},tags:[]}<tool_call|>',
        "",
        wrote(opts={"a b": [1, {"c": "d"}], "e": None}, tags=[]),
    ),
    (
        "Gemma bare words and numbers that are none",
        "gemma4",
        "<|tool_call>call:write{path:007,size:1e999,mode:auto mode,}<tool_call|>",
        "",
        wrote(path="007", size="1e999", mode="auto mode"),
    ),
    (
        "Gemma without the last brace",
        "gemma4",
        '<|tool_call>call:class{path:<|"|>a<|"|><tool_call|>',
        "",
        [("class", {"path": "a"})],
    ),
    (
        "JSON with a brace too many",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a"}}}</tool_call> so',
        " so",
        wrote(path="a"),
    ),
    (
        "JSON without a brace, the answer ends",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a"}',
        "",
        wrote(path="a"),
    ),
    (
        "JSON with a marker in a text",
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "</tool_call>}"}}</tool_call>',
        "",
        wrote(path="</tool_call>}"),
    ),
    (
        "JSON whose arguments are a text",
        "hermes",
        '<tool_call>{"name": "write", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>',
        "",
        wrote(path="a"),
    ),
    (
        "JSON whose arguments are null or empty",
        "hermes",
        '<tool_call>{"name": "class", "arguments": null}</tool_call><tool_call>{"name": "class", "a'
        'rguments": ""}</tool_call>',
        "",
        [("class", {})] * 2,
    ),
    (
        "a broken call before a good one",
        "hermes",
        '<tool_call>{"name": }</tool_call><tool_call>{"name": "class"}</tool_call>',
        '<tool_call>{"name": }</tool_call>',
        [("class", {})],
    ),
    (
        "Kimi without a section",
        "kimi",
        '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path": "a"}<|tool_call_e'
        "nd|><|tool_calls_section_end|>",
        "",
        wrote(path="a"),
    ),
    (
        "Kimi without arguments or number",
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.class<|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("class", {})],
    ),
    (
        "Kimi without the end of a call",
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin"
        '|>{"path": "a"}<|tool_calls_section_end|>',
        "",
        wrote(path="a"),
    ),
]
CONTENT: list[tuple[str, str, str]] = [
    ("NaN is no JSON", "hermes", '<tool_call>{"name": "write", "arguments": {"size": NaN}}</tool_call>'),
    ("a number beyond a double", "lfm2", "<|tool_call_start|>[write(size=1e999)]<|tool_call_end|>"),
    ("arguments without names", "lfm2", "<|tool_call_start|>[write('a')]<|tool_call_end|>"),
    ("a marker that is mentioned", X, "The model opens with <tool_call> and closes with </tool_call>."),
    ("a marker alone", "gemma4", "<|tool_call> is a token"),
    ("a bare word that is no offered tool", G, "<tool_call>something</tool_call>"),
    ("a function without parameters that goes on", X, "<function=write>but not so"),
    ("a missing end of a tool that is not offered", X, "<tool_call><function=f><parameter=a>x</function></tool_call>"),
    ("an orphaned end", X, "So </tool_call> it is."),
    ("Gemma's text without an end", "gemma4", '<|tool_call>call:write{path:<|"|>a}<tool_call|>'),
]


def read(name: str, pieces: list[str], *, eager: bool = False, is_cut: bool = False) -> tuple[str, list[list[str]]]:
    reader = ToolCallReader(BY_NAME[name], TOOLS, eager=eager)
    content, calls = "", {}
    for part in [part for step in [*map(reader.push, pieces), reader.finish(is_cut=is_cut)] for part in step]:
        if isinstance(part, str):
            content += part
        else:
            calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
    return content, list(calls.values())


def read_every_way(name: str, text: str) -> tuple[str, list[list[str]]]:
    whole = read(name, [text])
    assert read(name, list(text), eager=True) == whole
    for at in range(1, len(text)):
        assert read(name, [text[:at], text[at:]], eager=True) == whole, text[:at]
    return whole


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [case[1:] for case in CALLED], ids=[c[0] for c in CALLED]
)
def test_a_spoiled_call_is_found_however_it_is_cut(name: str, text: str, content: str, calls: Calls) -> None:
    found, written = read_every_way(name, text)
    assert found == content
    assert [(called, json.loads(arguments)) for called, arguments in written] == calls


@pytest.mark.parametrize(("name", "text"), [case[1:] for case in CONTENT], ids=[case[0] for case in CONTENT])
def test_a_text_that_is_no_call_is_content_word_for_word(name: str, text: str) -> None:
    assert read_every_way(name, text) == (text, [])


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_a_value_in_tags_has_a_type_of_its_schema_or_stays_text(key: str, text: str, value: Any) -> None:
    for made in (
        xml(**{key: text}),
        f"<tool_call>write<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>",
    ):
        name = X if "<function" in made else G
        [(_, arguments)] = read_every_way(name, made)[1]
        assert json.loads(arguments) == {key: value}
        assert type(json.loads(arguments)[key]) is type(value)


def test_names_of_types_from_python_are_known_and_others_mean_text() -> None:
    assert types_of({"type": "dict"}, {}) == {"object"}
    assert types_of({"type": ["int", "none"]}, {}) == {"integer", "null"}
    assert types_of({"type": "date"}, {}) == types_of({"type": 3}, {}) == set()
    assert read_value("[1]", types_of({"items": {}}, {})) == [1]


@pytest.mark.parametrize("case", [case for case in CALLED if "the answer ends" in case[0]], ids=lambda case: case[0])
def test_a_call_that_a_limit_of_tokens_cut_is_none(case: Any) -> None:
    _, name, text, _, calls = case
    assert len(read(name, [text])[1]) == len(calls)
    assert read(name, [text], is_cut=True) == (text, [])


def test_half_of_a_surrogate_pair_can_be_sent() -> None:
    [(_, arguments)] = read("lfm2", [r"<|tool_call_start|>[write(path='\ud83d')]<|tool_call_end|>"])[1]
    assert arguments.encode() == rb'{"path": "\ud83d"}'
