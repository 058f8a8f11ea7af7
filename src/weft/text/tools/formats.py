"""The format of calls of each family: one row of data per format.

    name        a value of --tool-parser
    envelopes   the markers that open and close a sequence of calls, and the syntax inside
    writes      the text around a call that a grammar makes the model write (``calling.py``)
    signs       texts of a chat template that identify the format; the first row whose signs are all present wins
    tokens      markers that identify the format as tokens of the vocabulary, if the template has no signs

Readers, grammars and detection use the row. A new format needs only a row if its calls are JSON, tags, nested
elements, Python, name and JSON, or Gemma's ``call:name{...}``; ``docs/chat.md`` has the table of families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.errors import ConfigError

AUTO, NONE = "auto", "none"
_MARKER = re.compile("<[^<>]+>")
"""Pattern of the markers in the texts around calls and names."""
ITEM = "item"
"""Name of an element of an array, in the syntax "nested"."""

Body = Literal["json", "xml", "python", "headed", "braces", "nested"]
HasToken = Callable[[str], bool]
"""Function that tells whether a text is one added token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Markers around calls. ``open``: "" if an answer begins with a call. ``close``: None if no marker ends the calls.
    ``bodies``: the reader for each first character of the text inside ("" for any). ``keeps_open``: the opening text is
    part of the first call."""

    open: str
    close: str | None
    bodies: tuple[tuple[str, Body], ...]
    keeps_open: bool = False


@dataclass(frozen=True, slots=True)
class Writing:
    """The text that a grammar writes around calls. ``lead`` and ``tail`` surround all calls, ``before`` and ``behind``
    each one, ``between`` separates them. ``style`` writes name and arguments; with JSON, ``key`` is the name of the
    arguments, "" where the function's name is their key (Apertus). ``name_key`` is the key of the function's name;
    ``numbered``: the number of the call comes first (Command)."""

    style: Body
    lead: str = ""
    before: str = ""
    behind: str = ""
    between: str = ""
    tail: str = ""
    key: str = "arguments"
    name_key: str = "name"
    numbered: bool = False

    def json_head(self, name: str, number: str) -> str:
        """Return the JSON before the arguments of a call."""
        shown = json.dumps(name, ensure_ascii=False)
        if not self.key:
            return f"{{{shown}: "
        numbered = f'"tool_call_id": "{number}", ' if self.numbered else ""
        return f'{{{numbered}"{self.name_key}": {shown}, "{self.key}": '


@dataclass(frozen=True, slots=True)
class Head:
    """Texts around the name in a call of the syntax "headed". ``numbered`` separates the name from an id; ``name`` is
    how a grammar writes the name. ``offered``: whether a call needs the name of an offered tool, because no marker
    precedes it (GLM 4)."""

    before: str
    arguments: str
    behind: str
    numbered: str = ""
    name: str = "{name}"
    offered: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a call and its parameters. ``named``: the text after the name of a parameter; any whitespace may be
    between its tags. ``padded``: whether a value has a line end before and after it. ``quoted``: whether a name is an
    attribute (MiniMax-M2). ``says_type``: whether another attribute gives the type, text or JSON (GigaChat); otherwise
    the tool's schema gives it. Without ``function``, a call begins with its bare name and ends with the envelope.
    ``attributes``: those of the names of a function and a parameter. ``text_type``: the attribute that says that a
    value is text. ``heads``: texts that open a call and a parameter, with places for ``{name}``, ``{number}`` and
    ``{type}`` (Kimi K3, which writes no line ends); other formats make them of the fields above."""

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    named: str = ">"
    parameter_end: str = "</parameter>"
    padded: bool = True
    quoted: bool = False
    says_type: bool = False
    attributes: tuple[str, str] = ("name", "name")
    text_type: str = 'string="true"'
    heads: tuple[str, str] | None = None

    def begin(self, name: str, number: str = "1") -> str:
        """Return the opening of a call, as a grammar writes it."""
        if self.heads is not None:
            return self.heads[0].replace("{number}", number).replace("{name}", name)
        return (
            f'{self.function} name="{name}">\n'
            if self.quoted
            else f"{self.function}{name}{'>' * bool(self.function)}\n"
        )

    def parameter_begin(self, name: str, kind: str) -> str:
        """Return the opening of a parameter. ``kind``: JSON type of its value."""
        is_text = kind == "string"
        if self.heads is not None:
            return self.heads[1].replace("{type}", kind).replace("{name}", name)
        if self.quoted:
            said = f' string="{str(is_text).lower()}"' if self.says_type else ""
            return f'{self.parameter} name="{name}"{said}>'
        return f"{self.parameter}{name}{self.named}" + "\n" * self.padded

    def element_end(self, name: str) -> str:
        """Return the end tag of an element, in the syntax "nested"."""
        return f"{self.parameter_end}{name}>"

    @property
    def value_end(self) -> str:
        return "\n" * self.padded + self.parameter_end + self.line_end

    @property
    def line_end(self) -> str:
        """Text after the end tag of a value."""
        return "" if self.heads is not None else "\n"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single tokens."""
        named = tuple(f"<{part}" for part in self.named.split("<")[1:])
        first = self.named.partition("<")[0].strip()
        parts = (self.function, self.function_end, self.parameter, first, *named, self.parameter_end)
        return tuple(part for part in parts if len(part) > 1)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls. ``quote`` surrounds texts of the syntax "braces". ``new_id`` makes the id of a call from
    random hex and its number; some templates check ids."""

    name: str
    envelopes: tuple[Envelope, ...]
    writes: Writing
    signs: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...] = ()
    head: Head | None = None
    tags: Tags = Tags()
    quote: str = ""
    new_id: Callable[[str, str, int], str] = lambda random_hex, name, number: f"call_{random_hex[:24]}"

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(envelope.open for envelope in self.envelopes if envelope.open)

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers without meaning after a call: some models write one too many."""
        closes = dict.fromkeys(envelope.close for envelope in self.envelopes if envelope.close)
        bodies = {body for envelope in self.envelopes for _, body in envelope.bodies}
        of_calls = (self.tags.function_end,) if bodies & {"xml", "nested"} else ()
        of_values = (self.tags.parameter_end,) if "xml" in bodies else ()
        return (*closes, *(end for end in (*of_calls, *of_values) if end))

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be single tokens, which must not be left out of the answer's text."""
        heads = (self.head.before, self.head.arguments, self.head.behind, self.head.numbered) if self.head else ()
        parts = (part for text in (*self.opens, *self.ends, *heads) for part in (text, *_MARKER.findall(text)))
        known = (*parts, *self.tags.markers, self.quote, *self.tokens)
        return tuple(dict.fromkeys(text for text in known if text))


_JSON: tuple[tuple[str, Body], ...] = (("{", "json"), ("[", "json"))
_TAGGED: tuple[tuple[str, Body], ...] = (*_JSON, ("<", "xml"))
_TOOL_CALL = Envelope("<tool_call>", "</tool_call>", _TAGGED)
_DEEPSEEK = Envelope("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", (("<", "headed"),))
_DSML = tuple(
    Envelope(f"<｜DSML｜{of}_calls>", f"</｜DSML｜{of}_calls>", (("<", "xml"),)) for of in ("tool", "function")
)
_DSML_TAGS = Tags("<｜DSML｜invoke", "</｜DSML｜invoke>", "<｜DSML｜parameter", ">", "</｜DSML｜parameter>",
                  padded=False, quoted=True, says_type=True)  # fmt: skip
_M3 = "]<]minimax[>["
_BARE_FUNCTION = Envelope("<function=", None, (("<", "xml"),), keeps_open=True)

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "seed_oss", (Envelope("<seed:tool_call>", "</seed:tool_call>", _TAGGED), _BARE_FUNCTION),
        Writing("xml", before="<seed:tool_call>\n", behind="\n</seed:tool_call>", between="\n"),
        signs=(("<seed:tool_call>",),), tokens=("<seed:tool_call>", "</seed:tool_call>"), tags=Tags(padded=False)),
    ToolFormat(
        "qwen3_xml", (_TOOL_CALL, _BARE_FUNCTION),
        Writing("xml", before="<tool_call>\n", behind="\n</tool_call>", between="\n"),
        signs=(("<function=", "<parameter="),)),
    ToolFormat(
        "zaya", (Envelope("<zyphra_tool_call>", "</zyphra_tool_call>", _TAGGED), _TOOL_CALL, _BARE_FUNCTION),
        Writing("xml", before="<zyphra_tool_call>\n", behind="\n</zyphra_tool_call>", between="\n"),
        signs=(("<zyphra_tool_call>",),), tokens=("<zyphra_tool_call>", "</zyphra_tool_call>")),
    ToolFormat(
        "glm", (Envelope("<tool_call>", "</tool_call>", (*_JSON, ("", "xml"))),),
        Writing("xml", before="<tool_call>", behind="</tool_call>", between="\n"),
        signs=(("<arg_key>", "<arg_value>"),), tokens=("<arg_key>", "<arg_value>"),
        tags=Tags("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", padded=False)),
    ToolFormat(
        "gemma4", (Envelope("<|tool_call>", "<tool_call|>", (("", "braces"),)),),
        Writing("braces", before="<|tool_call>", behind="<tool_call|>"),
        signs=(("<|tool_call>",),), tokens=("<|tool_call>", "<tool_call|>"), quote='<|"|>'),
    ToolFormat(
        "functiongemma", (Envelope("<start_function_call>", "<end_function_call>", (("", "braces"),)),),
        Writing("braces", before="<start_function_call>", behind="<end_function_call>"),
        signs=(("<start_function_call>",),), tokens=("<start_function_call>", "<end_function_call>"),
        quote="<escape>"),
    ToolFormat(
        "lfm2", (Envelope("<|tool_call_start|>", "<|tool_call_end|>", (("", "python"),)),),
        Writing("python", lead="<|tool_call_start|>[", between=", ", tail="]<|tool_call_end|>"),
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|tool_response_start|>",)),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    ToolFormat(
        "olmo3", (Envelope("<function_calls>", "</function_calls>", (("", "python"),)),),
        Writing("python", lead="<function_calls>", between="\n", tail="</function_calls>"),
        signs=(("<function_calls>",),), tokens=("<function_calls>", "</function_calls>")),
    ToolFormat(
        "nemotron", (Envelope("<TOOLCALL>", "</TOOLCALL>", _JSON),),
        Writing("json", lead="<TOOLCALL>[", between=", ", tail="]</TOOLCALL>"),
        signs=(("<TOOLCALL>",),), tokens=("<TOOLCALL>", "</TOOLCALL>")),
    ToolFormat(
        "jamba", (Envelope("<tool_calls>", "</tool_calls>", _JSON),),
        Writing("json", lead="<tool_calls>[\n", between=",\n", tail="\n]</tool_calls>"),
        signs=(("<tool_calls>",),), tokens=("<tool_calls>", "</tool_calls>")),
    ToolFormat(
        "minimax", (Envelope("<function_call>```typescript", "```", (("f", "headed"),)),),
        Writing("headed", lead="<function_call>```typescript\n", between="\n", tail="\n```"),
        signs=(("<function_call>", "typescript"),), head=Head("functions.", "(", ")")),
    ToolFormat(
        "gigachat", (Envelope("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>", (("<", "xml"),)),),
        Writing("xml", lead="<｜GCML｜tool_calls>\n", between="\n", tail="\n</｜GCML｜tool_calls>"),
        signs=(("｜GCML｜",),), tokens=("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>"),
        tags=Tags("<｜GCML｜invoke", "</｜GCML｜invoke>", "<｜GCML｜parameter", ">", "</｜GCML｜parameter>",
                  padded=False, quoted=True, says_type=True)),
    ToolFormat(   # its vocabulary may also have the markers of MiniMax-M2
        "minimax_m3", (Envelope(f"{_M3}<tool_call>", f"{_M3}</tool_call>", (("]", "nested"),)),),
        Writing("nested", lead=f"{_M3}<tool_call>\n", between="\n", tail=f"\n{_M3}</tool_call>"),
        signs=((_M3,),), tokens=(_M3,),
        tags=Tags(f"{_M3}<invoke", f"{_M3}</invoke>", f"{_M3}<", ">", f"{_M3}</", padded=False, quoted=True,
                  heads=(f'{_M3}<invoke name="{{name}}">', f"{_M3}<{{name}}>"))),
    ToolFormat(
        "minimax_m2", (Envelope("<minimax:tool_call>", "</minimax:tool_call>", (("<", "xml"),)),),
        Writing("xml", lead="<minimax:tool_call>\n", between="\n", tail="\n</minimax:tool_call>"),
        signs=(("<minimax:tool_call>",),), tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
        tags=Tags("<invoke", "</invoke>", "<parameter", ">", "</parameter>", padded=False, quoted=True)),
    ToolFormat(
        "deepseek_v32", _DSML[::-1],
        Writing("xml", lead="<｜DSML｜function_calls>\n", between="\n", tail="\n</｜DSML｜function_calls>"),
        signs=(("｜DSML｜", "function_calls>"),), tags=_DSML_TAGS),
    ToolFormat(
        "deepseek_v4", _DSML,
        Writing("xml", lead="<｜DSML｜tool_calls>\n", between="\n", tail="\n</｜DSML｜tool_calls>"),
        signs=(("｜DSML｜",),), tokens=("｜DSML｜",), tags=_DSML_TAGS),
    ToolFormat(   # a template of either family also has the other's markers
        "deepseek_v3", (_DEEPSEEK,),
        Writing("headed", lead="<｜tool▁calls▁begin｜>", between="\n", tail="<｜tool▁calls▁end｜>"),
        signs=(("<｜tool▁sep｜>", "```json"),),
        head=Head("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")),
    ToolFormat(
        "deepseek_v31", (_DEEPSEEK,),
        Writing("headed", lead="<｜tool▁calls▁begin｜>", tail="<｜tool▁calls▁end｜>"),
        signs=(("<｜tool▁sep｜>",),), tokens=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        head=Head("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")),
    ToolFormat(
        "cohere", (Envelope("<|START_ACTION|>", "<|END_ACTION|>", _JSON),),
        Writing("json", lead="<|START_ACTION|>[\n    ", between=",\n    ", tail="\n]<|END_ACTION|>",
                key="parameters", name_key="tool_name", numbered=True),
        signs=(("<|START_ACTION|>",),), tokens=("<|START_ACTION|>", "<|END_ACTION|>")),
    ToolFormat(
        "apertus", (Envelope("<|tools_prefix|>", "<|tools_suffix|>", _JSON),),
        Writing("json", lead="<|tools_prefix|>[", between=", ", tail="]<|tools_suffix|>", key=""),
        signs=(("<|tools_prefix|>",),), tokens=("<|tools_prefix|>", "<|tools_suffix|>")),
    ToolFormat(
        "kimi", (Envelope("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", (("<", "headed"),)),
                 Envelope("<|tool_call_section_begin|>", "<|tool_call_section_end|>", (("<", "headed"),)),
                 Envelope("<|tool_call_begin|>", None, (("<", "headed"),), keeps_open=True)),
        Writing("headed", lead="<|tool_calls_section_begin|>", tail="<|tool_calls_section_end|>"),
        signs=(("<|tool_calls_section_begin|>",),),
        tokens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        head=Head("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                  name="functions.{name}:0"),
        new_id=lambda random_hex, name, number: f"functions.{name}:{number}"),
    ToolFormat(
        "kimi_k3", (Envelope("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", (("<", "xml"),)),),
        Writing("xml", lead="<|open|>tools<|sep|>", tail="<|close|>tools<|sep|>"),
        signs=(("<|open|>", "<|close|>", "<|sep|>"),), tokens=("<|open|>", "<|close|>", "<|sep|>"),
        tags=Tags("<|open|>call", "<|close|>call<|sep|>", "<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>",
                  padded=False, quoted=True, says_type=True, attributes=("tool", "key"), text_type='type="string"',
                  heads=('<|open|>call tool="{name}" index="{number}"<|sep|>',
                         '<|open|>argument key="{name}" type="{type}"<|sep|>'))),
    ToolFormat(
        "plamo3", (Envelope("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>", (
            ("<", "headed"),)),),
        Writing("headed", lead="<|plamo:begin_tool_requests:plamo|>", tail="<|plamo:end_tool_requests:plamo|>"),
        signs=(("<|plamo:begin_tool_request",), ("<|plamo:begin_", "tool_request")),
        head=Head("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
                  "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                  "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>")),
    ToolFormat(
        "mistral", (Envelope("[TOOL_CALLS]", None, (*_JSON, ("", "headed"))),),
        Writing("json", lead="[TOOL_CALLS][", between=", ", tail="]"),
        signs=(("[TOOL_CALLS]",),), tokens=("[TOOL_CALLS]",),
        head=Head("", "[ARGS]", "", numbered="[CALL_ID]"),
        new_id=lambda random_hex, name, number: random_hex[:9]),
    ToolFormat(
        "granite", (Envelope("<|tool_call|>", None, _JSON), Envelope("<tool_call>", "</tool_call>", _JSON)),
        Writing("json", lead="<|tool_call|>[", between=", ", tail="]"),
        signs=(("<|tool_call|>",),), tokens=("<|tool_call|>",)),
    ToolFormat(
        "hermes", (_TOOL_CALL,),
        Writing("json", before="<tool_call>\n", behind="\n</tool_call>", between="\n"),
        signs=(("<tool_call>",),), tokens=("<tool_call>", "</tool_call>")),
    ToolFormat(
        "llama3_json", (Envelope("<|python_tag|>", None, _JSON),
                        Envelope("<function=", None, (("", "headed"),)),
                        Envelope("", None, (("{", "json"),))),
        Writing("json", between="; ", key="parameters"),
        signs=(("<|python_tag|>",), ('"parameters":', "<|start_header_id|>")), tokens=("<|python_tag|>",),
        head=Head("", ">", "</function>")),
    ToolFormat(
        "glm4", (Envelope("", None, (("", "headed"),)),), Writing("headed", between="\n"),
        signs=(("请使用 Json 格式表示调用的参数",),), head=Head("", "\n", "", offered=True)),
    ToolFormat(   # this row and the next are read by ``weft.text.channels``: each call is a message
        "harmony", (), Writing("headed"), signs=(("<|channel|>", "<|message|>"),),
        tokens=("<|channel|>", "<|message|>"),
        head=Head("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")),
    ToolFormat(
        "inkling", (), Writing("headed", between="<|end_message|><|message_model|>"),
        signs=(("<|content_invoke_tool_json|>",),), tokens=("<|content_invoke_tool_json|>", "<|end_message|>"),
        head=Head("", '<|content_invoke_tool_json|>{"name": "{name}", "args": ', "}")),
)  # fmt: skip
NAMES = tuple(row.name for row in FORMATS)


def tool_format(name: str, template: str, has_token: HasToken = lambda text: False) -> ToolFormat | None:
    """Return the row called ``name``; with "auto" the one whose signs ``template`` (its source) has, else the one whose
    markers are tokens of the vocabulary; None for "none", or where there is neither. Raise ConfigError that lists the
    names."""
    check_tool_parser(name)
    if name == NONE:
        return None
    if name != AUTO:
        return next(row for row in FORMATS if row.name == name)
    written = (row for row in FORMATS if any(all(sign in template for sign in signs) for signs in row.signs))
    known = (row for row in FORMATS if row.tokens and all(map(has_token, row.tokens)))
    return next(written, None) or next(known, None)


def check_tool_parser(name: str) -> None:
    if name not in (AUTO, NONE, *NAMES):
        raise ConfigError(
            f"--tool-parser {name!r} is unknown; there are {', '.join((AUTO, NONE, *NAMES))}", param="--tool-parser"
        )
