"""The same texts in every format: values with quotes, brackets and markers of the format, types, names, several calls,
ends that are missing or doubled, markers in prose. Each is read whole and in pieces, with one outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.text.test_published_formats import FAMILIES, dialect_of
from weft.text.dialect import AnswerBlock, text_of
from weft.text.tools.definitions import ToolChoice, read_tools
from weft.text.tools.formats import FORMATS, ToolFormat
from weft.text.tools.values import json_type
from weft.text.tools.writing import calls_text

Calls = list[tuple[str, dict[str, Any]]]
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "import": {"type": "string"},
    "max-n.x": {"type": "integer"},
    "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": ["integer", "null"]},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "opts": {"type": "object"},
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
        for name in ("write", "mcp.fs-write_v2", "class")
    ]
)
OF_MESSAGES = ("harmony", "inkling")
"""Formats whose markers are tokens that end messages: the text of a value cannot have them."""
ENDS_BY_ITSELF = ("mistral", "granite", "llama3_json", "glm4", *OF_MESSAGES)
"""Formats without an end around calls, which could be missing, doubled or orphaned."""


@dataclass(frozen=True)
class Text:
    text: str
    calls: Calls
    content: str = ""


def python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{python(key)}: {python(inner)}' for key, inner in value.items())}}}"
    return repr(value)


def braces(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(braces(inner, quote) for inner in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{braces(inner, quote)}' for key, inner in value.items())}}}"
    return json.dumps(value)


def nested(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, (dict, list)):
        return json.dumps(value)
    members = value.items() if isinstance(value, dict) else (("item", item) for item in value)
    return "".join(f"]<]minimax[>[<{name}>{nested(inner)}]<]minimax[>[</{name}>" for name, inner in members)


def one(row: ToolFormat, number: int, name: str, arguments: dict[str, Any]) -> str:
    """A call, without the text around all calls."""
    writes, text = row.writes, json.dumps(arguments, ensure_ascii=False)
    match writes.style:
        case "json":
            body = f"{writes.json_head(name, str(number))}{text}}}"
        case "python":
            body = f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"
        case "braces":
            body = f"call:{name}{braces(arguments, row.quote)}"
        case "xml":
            body = row.tags.begin(name)
            for key, value in arguments.items():
                spelled = value if isinstance(value, str) else json.dumps(value)
                body += row.tags.parameter_begin(key, json_type(value)) + spelled + row.tags.value_end
            body += row.tags.function_end
        case "nested":
            body = f']<]minimax[>[<invoke name="{name}">{nested(arguments)}]<]minimax[>[</invoke>'
        case _:
            assert row.head is not None
            begun = row.head.name.replace("{name}", name).replace(":0", f":{number}")
            written = row.head.arguments.replace("{name}", name)
            body = f"{row.head.before}{begun}{written}{text}{row.head.behind}"
    return writes.before + body + writes.behind


def written(row: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    if row.name in OF_MESSAGES:
        apart = {"harmony": "<|call|><|start|>assistant", "inkling": "<|end_message|><|message_model|>"}[row.name]
        return apart.join(one(row, at, *call) for at, call in enumerate(calls))
    inside = row.writes.between.join(one(row, at, *call) for at, call in enumerate(calls))
    return f"{row.writes.lead}{inside}{row.writes.tail}"


VALUES = {
    "a word": "a",
    "no character": "",
    "a line end inside": "a\nb",
    "line ends around": "\na\n",
    "spaces around": "  a  ",
    "double quotes": 'say "so"',
    "single quotes": "it's 'so'",
    "both quotes and a backslash": '"it\'s" C:\\new\\users',
    "a JSON object": '{"name": "x", "arguments": {}}',
    "a JSON list": "[1, 2]",
    "a number": "007",
    "a word of JSON": "true",
    "null": "null",
    "tags of HTML": "<b>x</b> </div> a < b > c",
    "brackets and commas": "f(a, b), {c: [d]}",
    "letters and pictures": "Köln 🏔 日本",
    "escapes of HTML": "a &amp; b %20 \\u00e9",
    "marks of reasoning": "<think>x</think>",
    "code": 'if a < b:\n    print("</x>", {1: [2]})\n',
    "a long text": "lorem ipsum, " * 40,
}
TYPED: dict[str, dict[str, Any]] = {
    "a whole number": {"max-n.x": -3},
    "a fraction": {"size": 0.0015},
    "a switch": {"flag": False},
    "null of a union": {"mode": None},
    "text of a union": {"mode": "hello"},
    "null of a union in a list of types": {"count": None},
    "a number of such a union": {"count": 7},
    "a list": {"tags": ["a", "b, c", 'd"e']},
    "an empty list": {"tags": []},
    "an object": {"opts": {"a": [1, {"b": None}], "c d": True}},
    "a name that is a keyword": {"import": "x"},
    "several": {"path": "a", "max-n.x": 1, "flag": True, "tags": ["x"], "mode": None},
}
UNTYPED = {"opts": {"a": ["1", {"b": "null"}], "c d": "true"}}
"""The arguments called "an object", where the schema alone gives types and has none for the members of the object."""


def texts_of(row: ToolFormat) -> Iterator[tuple[str, Text]]:
    for name, value in VALUES.items():
        yield f"{name} in a value", Text(written(row, ("write", {"path": value})), [("write", {"path": value})])
    markers = {} if row.name in OF_MESSAGES else {
        "the opening": row.opens[0] if row.opens else "",
        "the end": next(iter(row.ends), ""),
        "a whole call": written(row, ("class", {})),
    }  # fmt: skip
    for name, marker in markers.items():
        value = f"see {marker} so"
        if row.quote and row.quote in value:  # no rule of the format could tell it from the text's own end
            continue
        yield f"{name} in a value", Text(written(row, ("write", {"path": value})), [("write", {"path": value})])
    for name, arguments in TYPED.items():
        meant = UNTYPED if name == "an object" and row.writes.style == "nested" else arguments
        yield name, Text(written(row, ("write", arguments)), [("write", meant)])
    call, other = ("write", {"path": "a"}), ("mcp.fs-write_v2", {"path": "b"})
    yield "a name with dashes and dots", Text(written(row, other), [other])
    yield "a keyword for a name", Text(written(row, ("class", {"path": "a"})), [("class", {"path": "a"})])
    yield "no arguments", Text(written(row, ("class", {})), [("class", {})])
    yield "two calls", Text(written(row, call, other), [call, other])
    yield "one call twice", Text(written(row, call, call), [call, call])
    yield "no call", Text("Just words.\n", [], "Just words.\n")
    if row.name in OF_MESSAGES:
        return
    if row.opens:  # a call without an opening begins the answer
        opening = "" if row.opens[0] in written(row, call) else row.opens[0]  # Llama's JSON opens an answer without one
        yield "text before", Text(f"I look.\n{opening}{written(row, call)}", [call], "I look.")
        mention = f"The marker {row.opens[0]} opens a call."
        yield "the opening in prose", Text(mention, [], mention)
    if row.name in ENDS_BY_ITSELF:
        return
    whole, close = written(row, call), str(row.envelopes[0].close)
    assert whole.endswith(close)
    yield "text after", Text(f"{whole}\nI looked.", [call], "I looked.")
    yield "no end around the calls", Text(whole.removesuffix(close), [call])
    yield "two ends", Text(whole + close, [call])
    yield "an end in prose", Text(f"So {close} it is.", [], f"So {close} it is.")
    yield "a call after an opening alone", Text(f"{row.opens[0]}{whole}", [call])


def read(row: ToolFormat, text: str, step: int, *, eager: bool) -> list[AnswerBlock]:
    family = next(family for family in FAMILIES.values() if family.parsers[1] == row.name)
    reader = dialect_of(family).plan("<|x|>", tools=TOOLS, choice=ToolChoice("auto")).reader(eager=eager)
    for at in range(0, len(text), step):
        reader.read(text[at : at + step], [1], None)
    reader.read("", [], "stop")
    return reader.blocks


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_forty_texts_are_read_as_they_were_meant(row: ToolFormat) -> None:
    named, wrong = dict(texts_of(row)), []
    assert len(named) >= (38 if row.name in OF_MESSAGES else 40)
    for name, text in named.items():
        for step, eager in ((1, True), (7, True), (len(text.text), True), (len(text.text), False)):
            blocks = read(row, text.text, step, eager=eager)
            calls = [(block.name, json.loads(block.text)) for block in blocks if block.is_call]
            content = text_of(blocks, "text").strip()
            if calls != text.calls or content != text.content.strip():
                wrong.append(f"{name} by {step}: {text.text!r} -> {content!r} {calls}")
                break
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("row", [row for row in FORMATS if row.envelopes], ids=lambda row: row.name)
def test_past_calls_in_the_words_of_a_model_are_read_as_the_same_calls(row: ToolFormat) -> None:
    several = [[("write", {"path": value})] for value in VALUES.values()]
    several += [[("write", arguments)] for arguments in TYPED.values()]
    several += [[("class", {})], [("write", {"path": "a"}), ("mcp.fs-write_v2", {"path": "b", "flag": True})]]
    for calls in several:
        text = calls_text(row, [{"function": {"name": name, "arguments": given}} for name, given in calls])
        blocks = read(row, text, len(text), eager=False)
        if row.writes.style == "nested":
            calls = [(name, UNTYPED if "opts" in given else given) for name, given in calls]
        assert [(block.name, json.loads(block.text)) for block in blocks if block.is_call] == calls, text
        assert not text_of(blocks, "text").strip(), text
