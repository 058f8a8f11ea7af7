"""Calls read back from text, in every format, cut anywhere: calls, content, and nothing lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.text.tools.definitions import Tool, read_tools
from weft.text.tools.formats import FORMATS, tool_format
from weft.text.tools.json_calls import HELD_CHARS, CallDelta
from weft.text.tools.reader import ToolCallReader

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array"},
            },
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: tuple[Tool, ...] = read_tools([WEATHER, TIME])
BY_NAME = {row.name: row for row in FORMATS}
Calls = list[tuple[str, Any]]


def read(name: str, pieces: list[str], *, eager: bool = False, single: bool = False) -> tuple[str, Calls]:
    """(content, [(name, arguments)]); arguments that are not JSON stay text."""
    reader = ToolCallReader(BY_NAME[name], TOOLS, eager=eager, single=single)
    content, calls, ids = "", {}, set()
    for part in [part for step in [*map(reader.push, pieces), reader.finish()] for part in step]:
        if isinstance(part, str):
            content += part
            continue
        call = calls.setdefault(part.index, [part.name, ""])
        call[1] += part.arguments
        if part.name is not None:
            assert part.call_id not in ids
            ids.add(part.call_id)
        else:
            assert part.call_id is None
    return content, [(called, _parsed(text)) for called, text in calls.values()]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


PARIS: Calls = [("get_weather", {"city": "Paris", "days": 3})]
BOTH: Calls = [*PARIS, ("get_time", {})]
JSON_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
JSON_TIME = '{"name": "get_time", "arguments": {}}'
XML_PARIS = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
XML_TIME = "<function=get_time>\n</function>"
GCML_PARIS = (
    '<｜GCML｜invoke name="get_weather">\n<｜GCML｜parameter name="city" string="true">Paris'
    '</｜GCML｜parameter>\n<｜GCML｜parameter name="days" string="false">3</｜GCML｜parameter>\n'
    "</｜GCML｜invoke>"
)
GCML_TIME = '<｜GCML｜invoke name="get_time"></｜GCML｜invoke>'
PY_PARIS = 'get_weather(city="Paris", days=3)'

CALLED = [
    ("hermes", f"<tool_call>\n{JSON_PARIS}\n</tool_call>", "", PARIS),
    ("hermes", f"Let me see.\n<tool_call>{JSON_PARIS}</tool_call>\n<tool_call>\n{JSON_TIME}</tool_call>",
     "Let me see.", BOTH),
    ("hermes", f"<tool_call>{JSON_PARIS}", "", PARIS),
    ("hermes", f"<tool_call>{JSON_PARIS[:-1]}\n</tool_call> Done.", " Done.", PARIS),
    ("hermes", f"<tool_call>{JSON_PARIS[:-1]}</tool_call>\n<tool_call>{JSON_TIME}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>[{JSON_PARIS}, {JSON_TIME}]</tool_call> Done.", " Done.", BOTH),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
     "", PARIS),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": '
     '"{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>', "", PARIS),
    ("hermes", '<tool_call>{"type": "function", "function": ' + JSON_PARIS + "}</tool_call>", "", PARIS),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", {})]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call> {\\"}"}}</tool_call>',
     "", [("get_weather", {"city": '</tool_call> {"}'})]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "two\nlines"}}</tool_call>', "",
     [("get_weather", {"city": "two\nlines"})]),
    ("hermes", f"<tool_call>{XML_PARIS}</tool_call>", "", PARIS),
    ("gigachat", f"I look.\n\n<｜GCML｜tool_calls>\n{GCML_PARIS}\n</｜GCML｜tool_calls>", "I look.", PARIS),
    ("gigachat", f"<｜GCML｜tool_calls>{GCML_PARIS}{GCML_TIME}</｜GCML｜tool_calls>", "", BOTH),
    ("gigachat", '<｜GCML｜tool_calls><｜GCML｜invoke name="get_weather"><｜GCML｜parameter name="city" '
     'string="true">\n"a" <b>\n</｜GCML｜parameter></｜GCML｜invoke></｜GCML｜tool_calls>', "",
     [("get_weather", {"city": '\n"a" <b>\n'})]),
    ("qwen3_xml", f"<tool_call>\n{XML_PARIS}\n</tool_call>", "", PARIS),
    ("qwen3_xml", f"I look.\n\n{XML_PARIS}\n", "I look.", PARIS),
    ("qwen3_xml", f"<tool_call>\n{XML_PARIS}\n</tool_call>\n<tool_call>\n{XML_TIME}\n</tool_call>", "", BOTH),
    ("qwen3_xml", "<tool_call><function=get_weather><parameter=city>\na <b> \n\n</parameter>"
     "<parameter=exact>True</parameter><parameter=tags>[1, \"x\"]</parameter>"
     "<parameter=days>soon</parameter></function></tool_call>", "",
     [("get_weather", {"city": "a <b> \n", "exact": True, "tags": [1, "x"], "days": "soon"})]),
    ("qwen3_xml", f"<tool_call>{JSON_PARIS}</tool_call>", "", PARIS),
    ("lfm2", f"<|tool_call_start|>[{PY_PARIS}]<|tool_call_end|>Checking.", "Checking.", PARIS),
    ("lfm2", f"<|tool_call_start|>[{PY_PARIS}, get_time()]<|tool_call_end|>", "", BOTH),
    ("lfm2", f"<|tool_call_start|>[{JSON_PARIS}]<|tool_call_end|>", "", PARIS),
    ("lfm2", "<|tool_call_start|>[a.b(x=None, y=true, z={'k': [-1, 2.5]})]<|tool_call_end|>", "",
     [("a.b", {"x": None, "y": True, "z": {"k": [-1, 2.5]}})]),
    ("olmo3", f"<function_calls>{PY_PARIS}\nget_time()</function_calls>", "", BOTH),
    ("nemotron", f"Sure. <TOOLCALL>[{JSON_PARIS}, {JSON_TIME}]</TOOLCALL>", "Sure.", BOTH),
    ("jamba", f"<tool_calls>[\n{JSON_PARIS},\n{JSON_TIME}\n]</tool_calls>", "", BOTH),
    ("granite", f"<|tool_call|>[{JSON_PARIS}, {JSON_TIME}]", "", BOTH),
    ("granite", f"<tool_call>{JSON_PARIS}</tool_call>", "", PARIS),
    ("mistral", f"[TOOL_CALLS][{JSON_PARIS}, {JSON_TIME}]", "", BOTH),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]get_time[ARGS]{}', "",
     BOTH),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', "", PARIS),
    ("llama3_json", '\n<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
     '{"name": "get_time", "parameters": {}}', "", BOTH),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
     "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "", BOTH),
]  # fmt: skip

CONTENT = [
    ("hermes", "No call. 1 < 2, <tool, <tool_cal"),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call> so'),
    ("hermes", f"<tool_call>{JSON_PARIS[:-2]}</tool_call>"),
    ("hermes", "<tool_call>not json</tool_call>\n"),
    ("hermes", '<tool_call>{"no": "name"}</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "x <tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("qwen3_xml", "<tool_call><function=f><parameter=a>x</function></tool_call>"),
    ("qwen3_xml", "<function=f>but not so"),
    ("qwen3_xml", "<tool_call>words</tool_call>"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|> after"),
    ("lfm2", "<|tool_call_start|>[f(a=1"),
    ("lfm2", "<|tool_call_start|>a = 1<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>" + "(" * 500 + "<|tool_call_end|>"),
    ("mistral", "[TOOL_CALLS]words and words"),
    ("llama3_json", '{"a": 1} is JSON'),
    ("llama3_json", 'see {"name": "get_time", "parameters": {}}'),
    ("kimi", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
    ("jamba", "<tool_calls>[]</tool_calls>"),
]


def _cuts(text: str) -> list[list[str]]:
    rng = random.Random(len(text))
    found = [[text], list(text)]
    for _ in range(6):
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        found.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return found


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLED)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str, content: str, calls: Calls, eager: bool) -> None:
    for pieces in _cuts(text):
        assert read(name, pieces, eager=eager) == (content, calls), pieces


@pytest.mark.parametrize(("name", "text"), CONTENT)
def test_what_is_no_call_is_content_word_for_word(name: str, text: str) -> None:
    for pieces in _cuts(text):
        assert read(name, pieces) == (text, []), pieces


def test_a_good_call_behind_a_broken_one_is_still_read() -> None:
    broken = '<tool_call>{"name": 3}</tool_call>'
    for pieces in _cuts(f"{broken}\n<tool_call>{JSON_PARIS}</tool_call>"):
        assert read("hermes", pieces) == (broken, PARIS)


def test_calls_before_a_broken_one_in_a_list_are_kept() -> None:
    for pieces in _cuts(f"<TOOLCALL>[{JSON_PARIS}, oops]</TOOLCALL>"):
        assert read("nemotron", pieces) == (", oops]</TOOLCALL>", PARIS)


def test_a_stream_gives_the_arguments_of_a_long_call_out_before_it_is_complete() -> None:
    reader = ToolCallReader(BY_NAME["hermes"], TOOLS, eager=True)
    begun = '{"city": "' + "x" * HELD_CHARS
    assert reader.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa') == []
    [first] = ToolCallReader(BY_NAME["hermes"], TOOLS, eager=True).push(
        f'<tool_call>{{"name": "get_weather", "arguments": {begun}'
    )
    assert isinstance(first, CallDelta)
    assert first == CallDelta(0, first.call_id, "get_weather", begun)
    [whole] = reader.push('ris"}}</tool_call>')
    assert isinstance(whole, CallDelta)
    assert (whole.arguments, whole.complete) == ('{"city": "Paris"}', True)
    sure = ToolCallReader(BY_NAME["hermes"], TOOLS, eager=True, is_sure=True)
    assert len(sure.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')) == 2


@pytest.mark.parametrize("length", [3, 300])
def test_a_value_whose_end_is_missing_has_no_line_end_however_long_it_is(length: int) -> None:
    value = "x" * length
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}\n</tool_call>"
    assert read("glm", [text]) == ("", [("get_weather", {"city": value})])


def test_a_call_that_begins_without_a_marker_and_comes_in_one_piece_is_given_out_with_it() -> None:
    reader = ToolCallReader(BY_NAME["llama3_json"], TOOLS, eager=False)
    [call] = reader.push('{"name": "get_weather", "parameters": {"city": "Paris"}}')
    assert isinstance(call, CallDelta)
    assert (call.name, call.arguments, call.complete) == ("get_weather", '{"city": "Paris"}', True)
    assert reader.finish() == []


def test_a_stream_that_breaks_off_in_a_call_loses_no_character() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'
    assert read("hermes", list(text), eager=True) == (text, [])
    content, [(name, arguments)] = read("hermes", list(text + "x" * HELD_CHARS), eager=True)
    assert (content, name, arguments[:13]) == ("", "get_weather", '{"city": "Pax')


def test_one_call_is_given_out_where_more_are_not_wanted() -> None:
    text = f"<tool_call>{JSON_PARIS}</tool_call><tool_call>{JSON_TIME}</tool_call>"
    assert read("hermes", [text], single=True) == ("", PARIS)


def test_ids_are_as_the_families_want_them() -> None:
    def first_id(name: str, text: str) -> str:
        [delta] = ToolCallReader(BY_NAME[name], TOOLS, eager=False).push(text)
        assert isinstance(delta, CallDelta)
        return str(delta.call_id)

    assert first_id("hermes", f"<tool_call>{JSON_TIME}</tool_call>").startswith("call_")
    nine = first_id("mistral", f"[TOOL_CALLS][{JSON_TIME}]")
    assert len(nine) == 9
    assert nine.isalnum()
    assert (
        first_id(
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.x:7"
            "<|tool_call_argument_begin|>{}<|tool_call_end|>",
        )
        == "functions.x:7"
    )


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("<tool_call>\n{'name'", "hermes"),
        ("<tool_call>\n<function=x><parameter=y>", "qwen3_xml"),
        ("<|tool_list_start|>", "lfm2"),
        ("<TOOLCALL>", "nemotron"),
        ("<tool_calls>", "jamba"),
        ("<|tool_call|>", "granite"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<function_calls>", "olmo3"),
    ],
)
def test_the_template_tells_the_format(sign: str, name: str) -> None:
    row = tool_format("auto", "{{ messages }}" + sign)
    assert row is not None
    assert row.name == name


def test_the_format_can_be_named_or_left_out() -> None:
    assert tool_format("auto", "nothing of the kind") is None
    assert tool_format("none", "<tool_call>") is None
    assert tool_format("lfm2", "<tool_call>") is BY_NAME["lfm2"]
    with pytest.raises(ConfigError, match=r"--tool-parser 'x'.*auto, none, seed_oss, qwen3_xml.*llama3_json"):
        tool_format("x", "")
