"""Laws of readers of calls and reasoning, over texts made of markers, pieces of calls and words, cut anywhere.

streamed equals whole        blocks, names and arguments do not depend on cuts or on streaming
arguments are JSON           each call that is given out has the text of a JSON object
nothing is lost              the content is made of the text's characters, in their order; without calls it is all
markers never leak           between good calls and words, the content is the words
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weft.text.channels import FORMATS as CHANNELS
from weft.text.channels import MessageReader, Thought
from weft.text.reasoning import FORMATS as REASONING
from weft.text.reasoning import ReasoningFormat, ReasoningSplitter
from weft.text.tools.definitions import read_tools
from weft.text.tools.formats import FORMATS, ToolFormat
from weft.text.tools.json_calls import HELD_CHARS
from weft.text.tools.reader import ToolCallReader

TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "look-up.v2",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "import": {"type": "string"},
                        "n": {"type": ["integer", "null"]},
                        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)
ROWS = [row for row in FORMATS if row.envelopes]
WORDS = ("so ", "two\nwords ", "1 < 2 ", "{x} ", '"quoted" ', "it's ", "[1, 2] ", "Köln 🏔 ", "\\n ", "<b> ")
GOOD = {
    "json": '{"name": "look-up.v2", "arguments": {"import": "a<b", "n": 3}}',
    "xml": "<function=look-up.v2>\n<parameter=import>\na<b\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>",
    "python": "look-up.v2(import='a<b', n=3)",
}
OWN = {
    "seed_oss": "<function=look-up.v2>\n<parameter=import>a<b</parameter>\n<parameter=n>3</parameter>\n</function>",
    "glm": "look-up.v2\n<arg_key>import</arg_key>\n<arg_value>a<b</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n",
    "gemma4": 'call:look-up.v2{import:<|"|>a<b<|"|>,n:3}',
    "functiongemma": "call:look-up.v2{import:<escape>a<b<escape>,n:3}",
    "minimax": 'functions.look-up.v2({"import": "a<b", "n": 3})',
    "kimi": "<|tool_call_begin|>functions.look-up.v2:0<|tool_call_argument_begin|>"
    '{"import": "a<b", "n": 3}<|tool_call_end|>',
    "plamo3": "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>look-up.v2<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    '{"import": "a<b", "n": 3}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>',
    "minimax_m2": '<invoke name="look-up.v2"><parameter name="import">a<b</parameter>'
    '<parameter name="n">3</parameter></invoke>',
    "minimax_m3": ']<]minimax[>[<invoke name="look-up.v2">]<]minimax[>[<import>a<b]<]minimax[>[</import>'
    "]<]minimax[>[<n>3]<]minimax[>[</n>]<]minimax[>[</invoke>",
    "kimi_k3": '<|open|>call tool="look-up.v2" index="1"<|sep|><|open|>argument key="import" type="string"<|sep|>a<b'
    '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look-up.v2\n```json\n"
    '{"import": "a<b", "n": 3}\n```<｜tool▁call▁end｜>',
    "deepseek_v31": '<｜tool▁call▁begin｜>look-up.v2<｜tool▁sep｜>{"import": "a<b", "n": 3}<｜tool▁call▁end｜>',
    "glm4": 'look-up.v2\n{"import": "a<b", "n": 3}',
    **{
        name: f'<｜{mark}｜invoke name="look-up.v2">'
        f'<｜{mark}｜parameter name="import" string="true">a<b</｜{mark}｜parameter>'
        f'<｜{mark}｜parameter name="n" string="false">3</｜{mark}｜parameter></｜{mark}｜invoke>'
        for name, mark in (("gigachat", "GCML"), ("deepseek_v32", "DSML"), ("deepseek_v4", "DSML"))
    },
}
ARGUMENTS = {"import": "a<b", "n": 3}
LAW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def good_call(row: ToolFormat) -> str:
    envelope = row.envelopes[0]
    body = OWN.get(row.name) or GOOD[row.writes.style]
    listed = f"[{body}]" if row.writes.lead.rstrip().endswith("[") else body
    return f"{envelope.open}{listed}{envelope.close or ''}"


def pieces_of(row: ToolFormat) -> list[str]:
    """Markers of the format, parts of a good call, and words."""
    call = good_call(row)
    parts = [call[at : at + length] for length in (9, 23) for at in range(0, len(call), length)]
    values = ("true", "NaN", "1e999", '{"a": 1}', '"x"', "null", "}", "}}", "]", ")", "</think>", "True", ",", "'x'")
    return [*row.markers, *row.markers, call, call, *parts, *values, *WORDS]


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)] or [text]


def parts_of(row: ToolFormat, pieces: Sequence[str], *, eager: bool, is_cut: bool) -> list[Any]:
    """Content joined, and calls as (name, arguments), in their order."""
    reader = ToolCallReader(row, TOOLS, eager=eager)
    found: list[Any] = []
    for part in [part for step in [*map(reader.push, pieces), reader.finish(is_cut=is_cut)] for part in step]:
        if not isinstance(part, str):
            if part.name is not None:
                found.append([part.name, ""])
            found[-1][1] += part.arguments
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def is_made_of(content: str, text: str) -> bool:
    left = iter(text)
    return all(character in left for character in content)


def check(row: ToolFormat, text: str, places: Sequence[int], *, is_cut: bool = False) -> None:
    whole = parts_of(row, [text], eager=False, is_cut=is_cut)
    for pieces in (cut(text, places), list(text)):
        assert parts_of(row, pieces, eager=False, is_cut=is_cut) == whole
        assert parts_of(row, pieces, eager=True, is_cut=is_cut) == whole
    calls = [part for part in whole if not isinstance(part, str)]
    content = "".join(part for part in whole if isinstance(part, str))
    for _, arguments in calls:
        assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
        arguments.encode()
    assert is_made_of(content, text)
    if not calls:
        assert content == text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_any_text_is_read_by_the_laws(row: ToolFormat) -> None:
    texts = st.lists(st.sampled_from(pieces_of(row)), max_size=14).map("".join)

    @LAW
    @given(texts, st.lists(st.integers(0, HELD_CHARS), max_size=6), st.booleans())
    @example("", [], False)
    @example("<function=two\nwords>{}</function>", [], False)
    def holds(text: str, places: list[int], is_cut: bool) -> None:
        if len(text) < HELD_CHARS:  # of longer calls a stream sends the beginning
            check(row, text, places, is_cut=is_cut)

    holds()


@pytest.mark.parametrize("row", [row for row in ROWS if row.opens], ids=lambda row: row.name)
def test_between_good_calls_the_content_is_the_words(row: ToolFormat) -> None:
    call = good_call(row)
    doubled = [call + call[-len(end) :] for end in row.ends if call.endswith(end)]
    items = st.lists(st.sampled_from([*([call] * 3), *doubled, "I look it up.", "It is so.\n\nDone"]), max_size=7)

    @LAW
    @given(items, st.lists(st.integers(0, HELD_CHARS), max_size=6))
    @example([call, call], [5])
    def holds(listed: list[str], places: list[int]) -> None:
        found = parts_of(row, cut(" ".join(listed), places), eager=True, is_cut=False)
        calls = [part for part in found if not isinstance(part, str)]
        assert [(name, json.loads(text)) for name, text in calls] == [
            ("look-up.v2", ARGUMENTS) for item in listed if item not in ("I look it up.", "It is so.\n\nDone")
        ]
        content = "".join(part for part in found if isinstance(part, str))
        assert content.split() == " ".join(item for item in listed if item[0] == "I").split()

    holds()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_end_marker_that_the_limit_cuts_is_no_content_behind_a_call(row: ToolFormat) -> None:
    call = good_call(row)
    whole = parts_of(row, [call], eager=True, is_cut=False)
    for end in filter(call.endswith, row.ends):
        for text in (call[:-missing] for missing in range(1, len(end))):
            for pieces in ([text], list(text)):
                found = parts_of(row, pieces, eager=True, is_cut=True)
                assert found in (whole, [text]), f"{found} of {text!r}"  # a call that was cut is content


@pytest.mark.parametrize("row", REASONING, ids=lambda row: row.name)
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_told_apart_however_the_text_is_cut(row: ReasoningFormat, inside: bool) -> None:
    pieces = [row.start, row.end, row.end, row.start[:-2], row.end[:3], "\n", "\n\n", row.label or "x", *WORDS]
    pieces += [*row.frame, *(text[:-4] for text in row.frame)]
    texts = st.lists(st.sampled_from(pieces), max_size=10).map("".join)

    def split(parts: Sequence[str]) -> tuple[str, str]:
        splitter, found = ReasoningSplitter(row, inside=inside), []
        for part in parts:
            found.append(splitter.push(part))
            while splitter.has_more:
                found.append(splitter.push(""))
        found.append(splitter.finish())
        return "".join(one.reasoning for one in found), "".join(one.content for one in found)

    @LAW
    @given(texts, st.lists(st.integers(0, 200), max_size=6))
    @example(f"{row.start}\nwhy\n{row.end}\n{row.end}\nso", [])
    def holds(text: str, places: list[int]) -> None:
        whole = split([text])
        assert split(cut(text, places)) == whole
        assert split(list(text)) == whole
        assert all(is_made_of(part, text) for part in whole)
        for marker in (row.start, row.end, *row.frame):
            text = text.replace(marker, "")
        words = "".join(text.split())
        assert len("".join("".join(whole).split())) >= len(words) - len(row.label) * (text.count(row.start) + inside)

    holds()


@pytest.mark.parametrize("row", CHANNELS, ids=lambda row: row.name)
def test_messages_are_read_by_the_laws(row: Any) -> None:
    calls = {
        "harmony": '<|channel|>commentary to=functions.now<|message|>{"a": "b"}<|call|>',
        "inkling": 'now<|content_invoke_tool_json|>{"name": "now", "args": {"a": "b"}}<|end_message|>',
    }
    parts = [*row.markers, row.turn, row.thought, row.answer, calls[row.name], f"{row.turn}{calls[row.name]}", *WORDS]

    def read(pieces: Sequence[str], *, eager: bool, is_cut: bool) -> list[Any]:
        reader = MessageReader(row, None, takes_calls=True, thinks=True, single=False, eager=eager)
        found: list[Any] = []
        for part in [*(p for piece in pieces for p in reader.push(piece)), *reader.finish(is_cut=is_cut)]:
            kind, text = ("thought", part.text) if isinstance(part, Thought) else ("text", part)
            if not isinstance(text, str):
                kind, text = f"call {part.index}" if part.name else found[-1][0], part.arguments
            if found and found[-1][0] == kind:
                found[-1][1] += text
            else:
                found.append([kind, text])
        return found

    @LAW
    @given(st.lists(st.sampled_from(parts), max_size=10).map("".join), st.lists(st.integers(0, 400)), st.booleans())
    @example(calls[row.name], [3], False)
    def holds(text: str, places: list[int], is_cut: bool) -> None:
        whole = read([text], eager=False, is_cut=is_cut)
        for pieces in (cut(text, places), list(text)):
            assert read(pieces, eager=False, is_cut=is_cut) == whole
            assert read(pieces, eager=True, is_cut=is_cut) == whole
        for kind, found in whole:
            if kind.startswith("call"):
                assert isinstance(json.loads(found), dict)
            assert is_made_of(found, text) or found == "{}"

    holds()
