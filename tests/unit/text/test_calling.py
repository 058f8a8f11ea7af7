"""Calls that a model is made to write: random tokens under the grammar are read back as calls that fit."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.fixtures.constrained import tokenizer, write
from weft.errors import RequestError
from weft.text.channels import MessageReader, channel_format
from weft.text.tools.calling import calls_grammar, strict_grammar
from weft.text.tools.definitions import ToolChoice, read_choice, read_tools, unheld_formats
from weft.text.tools.formats import FORMATS
from weft.text.tools.json_calls import CallDelta
from weft.text.tools.reader import ToolCallReader

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
        "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "kind": {"type": "string", "enum": ["a", "b c"]},
    },
    "required": ["unit", "days"],
}
OPTIONAL = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
    "additionalProperties": False,
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "note", "parameters": OPTIONAL}},
        {"type": "function", "function": {"name": "get_time"}},
        {
            "type": "custom",
            "custom": {
                "name": "dial",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{2,4}(/[a-c])?"}},
            },
        },
    ]
)
PARAMETERS = {tool.name: {**tool.parameters, "additionalProperties": False} for tool in TOOLS}
BY_NAME = {row.name: row for row in FORMATS}


def read_back(row: Any, text: str, tools: Any = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    channels = channel_format(row.name)
    if channels is not None:
        messages = MessageReader(channels, None, takes_calls=True, thinks=True, single=False, eager=False)
        parsed = [*messages.push(text), *messages.finish(is_cut=False)]
    else:
        reader = ToolCallReader(row, tools, eager=False)
        parsed = [*reader.push(text), *reader.finish()]
    content = "".join(part for part in parsed if isinstance(part, str))
    return content, [(part.name or "", json.loads(part.arguments)) for part in parsed if isinstance(part, CallDelta)]


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_random_tokens_under_the_grammar_of_a_family_are_calls_that_fit(row: Any, with_markers: bool) -> None:
    token_of = tokenizer(with_markers).added_id
    grammar = calls_grammar(row, TOOLS, several=True, token_of=token_of, field="tools")
    names = set()
    for seed in range(6):
        text = write(grammar, seed, with_markers=with_markers)
        if text is None:  # calls without an end
            continue
        content, calls = read_back(row, text)
        assert not content.strip()
        assert calls
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(arguments, PARAMETERS[name])
    assert len(names) > 1


@pytest.mark.parametrize("row", [BY_NAME[name] for name in ("hermes", "qwen3_xml", "lfm2", "gemma4")])
def test_what_no_grammar_enforces_is_left_out_of_tools_that_are_not_strict(row: Any) -> None:
    """pydantic writes ``uniqueItems`` for a set, and zod look-around for an address."""
    unheld = {
        "set": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1, "uniqueItems": True},
        "mail": {
            "type": "array",
            "items": {"type": "string", "format": "mail", "pattern": "^(?!\\.)a", "maxLength": 2},
        },
        "any": {"type": "object", "properties": {"x": {"not": {}}}, "maxProperties": 0, "additionalProperties": False},
    }
    parameters = {"type": "object", "properties": unheld, "required": list(unheld), "additionalProperties": False}
    function = {"name": "f", "parameters": parameters}
    loose, strict = (
        read_tools([{"type": "function", "function": {**function, "strict": strict}}]) for strict in (False, True)
    )
    token_of = tokenizer().added_id
    held = calls_grammar(row, loose, several=False, token_of=token_of, field="tools")
    text = next(filter(None, (write(held, seed) for seed in range(9))))
    [(name, arguments)] = read_back(row, text)[1]
    assert name == "f"
    assert set(arguments) == set(unheld)
    held_set = arguments["set"]  # the reader does not know this tool: a value in a tag is a text
    assert len(json.loads(held_set) if isinstance(held_set, str) else held_set) <= 1, "a grammar enforces the length"
    refused = calls_grammar(row, strict, several=False, token_of=token_of, field="tools")
    with pytest.raises((RequestError, ValueError, AssertionError)):
        write(refused, 1)


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_a_named_function_is_called_once(row: Any) -> None:
    grammar = calls_grammar(row, TOOLS[:1], several=False, token_of=tokenizer().added_id, field="tools")
    text = write(grammar, 5)
    assert text is not None
    [(name, arguments)] = read_back(row, text)[1]
    assert name == "forecast"
    jsonschema.validate(arguments, SCHEMA)


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_a_second_call_may_follow_where_several_may_and_nowhere_else(row: Any) -> None:
    tools, token_of, writes = TOOLS[2:3], tokenizer().added_id, row.writes
    one, several = (
        calls_grammar(row, tools, several=several, token_of=token_of, field="tools") for several in (False, True)
    )
    text = write(one, 5)
    assert text is not None
    call = text.removeprefix(writes.lead).removesuffix(writes.tail)
    both = f"{writes.lead}{call}{writes.between}{call}{writes.tail}"
    assert write(several, 5, wish=both, tokens_max=len(both.encode()) + 1) is not None
    with pytest.raises(AssertionError, match="refused"):
        write(one, 5, wish=both)


@pytest.mark.parametrize(
    "row", [row for row in FORMATS if row.writes.style in ("xml", "nested")], ids=lambda row: row.name
)
def test_listed_values_that_are_no_strings_are_written_as_json_has_them(row: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean", "enum": [True]}, "none": {"enum": [None]}},
        "required": ["on", "none"],
    }
    tools = read_tools([{"type": "function", "function": {"name": "set", "parameters": parameters}}])
    grammar = calls_grammar(row, tools, several=False, token_of=tokenizer().added_id, field="tools")
    text = write(grammar, 1)
    assert text is not None
    assert "true" in text
    assert "null" in text


@pytest.mark.parametrize(
    "row", [row for row in FORMATS if row.writes.style in ("xml", "nested")], ids=lambda row: row.name
)
def test_listed_values_of_several_types_are_read_as_they_are_listed(row: Any) -> None:
    """Strings among other values have no quotes in tags: a reader would keep them."""
    listed, either = (
        ["a b", 3, None],
        {"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "integer", "minimum": 5, "maximum": 6}]},
    )
    parameters = {
        "type": "object",
        "$defs": {"mode": {"enum": ["on", "off"]}},
        "properties": {"listed": {"enum": listed}, "either": either},
        "required": ["listed", "either"],
    }
    tools = read_tools([{"type": "function", "function": {"name": "set", "parameters": parameters}}])
    grammar = calls_grammar(row, tools, several=False, token_of=tokenizer().added_id, field="tools")
    seen = set()
    for seed in range(12):
        text = write(grammar, seed)
        assert text is not None
        [(_, arguments)] = read_back(row, text, tools)[1]
        assert arguments["listed"] in listed
        assert arguments["either"] in ("on", "off", 5, 6)
        seen |= {arguments["listed"], arguments["either"]}
    assert seen & {"a b", "on", "off"}, "no string was written: the test sees nothing"


@pytest.mark.parametrize(
    "row", [row for row in FORMATS if row.writes.style in ("xml", "nested")], ids=lambda row: row.name
)
def test_a_string_that_listed_numbers_may_give_way_to_is_free_text(row: Any) -> None:
    def tools_of(schema: dict[str, Any]) -> Any:
        parameters = {"type": "object", "properties": {"at": schema}, "required": ["at"]}
        return read_tools([{"type": "function", "function": {"name": "set", "parameters": parameters}}])

    def grammar_of(tools: Any) -> Any:
        return calls_grammar(row, tools, several=False, token_of=tokenizer().added_id, field="tools")

    wanted = write(grammar_of(tools_of({"enum": ["noon"]})), 1)
    assert wanted is not None
    mixed = tools_of({"anyOf": [{"enum": [1, 2]}, {"type": "string"}]})
    assert write(grammar_of(mixed), 1, wish=wanted, tokens_max=len(wanted.encode()) + 1) == wanted
    assert read_back(row, wanted, mixed)[1] == [("set", {"at": "noon"})]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_the_text_of_a_custom_tool_is_held_to_its_regex(row: Any) -> None:
    grammar = calls_grammar(row, TOOLS[3:], several=False, token_of=tokenizer().added_id, field="tools")
    text = write(grammar, 3)
    assert text is not None
    [(name, arguments)] = read_back(row, text)[1]
    assert name == "dial"
    assert re.fullmatch("[0-9]{2,4}(/[a-c])?", arguments["input"])


@pytest.mark.parametrize("name", ["qwen3_xml", "lfm2", "hermes"])
def test_free_text_of_an_argument_is_taken_as_it_stands(name: str) -> None:
    tools = read_tools(
        [
            {
                "type": "function",
                "function": {
                    "name": "save",
                    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
                },
            }
        ]
    )
    grammar = calls_grammar(BY_NAME[name], tools, several=False, token_of=tokenizer().added_id, field="tools")
    wish = {
        "qwen3_xml": "<tool_call>\n<function=save>\n<parameter=text>\nif a < b:\n  </p>\n</parameter>\n"
        "</function>\n</tool_call>",
        "lfm2": '<|tool_call_start|>[save(text="if a < b:\\n  </p>")]<|tool_call_end|>',
        "hermes": '<tool_call>\n{"name": "save", "arguments": {"text": "if a < b:\\n  </p>"}}\n</tool_call>',
    }
    text = write(grammar, 1, wish=wish[name])
    assert text == wish[name]
    assert read_back(BY_NAME[name], text) == ("", [("save", {"text": "if a < b:\n  </p>"})])


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "lfm2", "granite", "kimi", "minimax_m3"])
def test_strict_tools_leave_text_free_and_hold_calls_to_the_schema(name: str, with_markers: bool) -> None:
    row = BY_NAME[name]
    token_of = tokenizer(with_markers).added_id
    grammar = strict_grammar(row, TOOLS[:1], several=True, token_of=token_of, field="tools")
    begin = row.writes.lead + row.writes.before
    marker = next(open for open in row.opens if begin.startswith(open))
    write(grammar, 1, wish="No call: <b> {x}", with_markers=with_markers, tokens_max=20)
    write(grammar, 1, wish=f"I look. {begin}", with_markers=with_markers, tokens_max=80)
    with pytest.raises(AssertionError, match="refused"):
        write(grammar, 1, wish=f"I look. {marker}?", with_markers=with_markers)


def test_strict_tools_need_a_marker_where_the_model_has_none() -> None:
    with pytest.raises(RequestError, match="need the mode required"):
        strict_grammar(BY_NAME["llama3_json"], TOOLS, several=True, token_of=tokenizer().added_id, field="tools")


def test_a_schema_that_cannot_be_compiled_is_found_when_it_is_compiled() -> None:
    tools = read_tools(
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": {"x": {"type": "nothing"}}, "required": ["x"]},
                },
            }
        ]
    )
    for name in ("hermes", "qwen3_xml", "lfm2"):
        grammar = calls_grammar(BY_NAME[name], tools, several=False, token_of=tokenizer().added_id, field="tools")
        with pytest.raises(RequestError, match="nothing"):
            write(grammar, 1)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([3], "tools[0]"),
        ([{"type": "functoin", "function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "custom"}], "tools[0].custom"),
        ([{"type": "custom", "custom": {}}], "tools[0].custom.name"),
        ([{"function": {"name": "f", "parameters": {"type": "string"}}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], "tools"),
    ],
)
def test_a_bad_tool_is_named(value: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(value)
    assert caught.value.param == param


@pytest.mark.parametrize("stated", [None, ["object", "null"], "OBJECT", "dict"])
def test_parameters_that_are_an_object_in_other_words_are_an_object(stated: Any) -> None:
    """As generators of schemas write them (pydantic, Gemini, Python), and models are told one word."""
    parameters = {"type": stated, "properties": {"x": {"type": "string"}}}
    [tool] = read_tools([{"function": {"name": "f", "parameters": parameters}}])
    assert tool.parameters == tool.definition["function"]["parameters"] == parameters | {"type": "object"}
    for wrong in ("array", ["string", "null"], 3, []):
        with pytest.raises(RequestError, match="expected the JSON schema of an object"):
            read_tools([{"function": {"name": "f", "parameters": parameters | {"type": wrong}}}])


@pytest.mark.parametrize(
    ("value", "tools", "expected"),
    [
        (None, TOOLS, ToolChoice("auto")),
        (None, (), ToolChoice("none")),
        ("auto", (), ToolChoice("none")),
        ("none", TOOLS, ToolChoice("none")),
        ("required", TOOLS, ToolChoice("required")),
        ({"type": "function", "function": {"name": "note"}}, TOOLS, ToolChoice("named", "note")),
        ({"type": "custom", "custom": {"name": "dial"}}, TOOLS, ToolChoice("named", "dial")),
        ({"type": "custom", "name": "dial"}, TOOLS, ToolChoice("named", "dial")),
    ],
)
def test_tool_choice_is_read(value: Any, tools: Any, expected: ToolChoice) -> None:
    assert read_choice(value, tools) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("maybe", "maybe"),
        ("required", "empty"),
        ({"type": "web"}, "has type 'web'"),
        ({"type": "web", "name": "note"}, "has type 'web'"),
        (3, "has type 'int'"),
        ({"type": "function", "function": {}}, "name is missing"),
        ({"type": "function", "function": {"name": "x"}}, "empty"),
    ],
)
def test_a_bad_tool_choice_is_named(value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_choice(value, ())
    with pytest.raises(RequestError, match="'absent', which is not in tools: forecast, note"):
        read_choice({"type": "function", "function": {"name": "absent"}}, TOOLS)


def test_the_tools_are_named_whose_grammar_no_call_is_held_to() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [
        {"type": "custom", "custom": {"name": name, "format": form}}
        for name, form in (
            ("held", {"type": "grammar", "syntax": "regex", "definition": "a"}),
            ("free", {"type": "text"}),
            ("none", None),
            ("flat", lark),
            ("nested", {"type": "grammar", "grammar": lark}),
        )
    ]
    assert unheld_formats([*tools, {"type": "function", "function": {"name": "f"}}, "no tool"]) == ["flat", "nested"]
    assert unheld_formats(None) == []
