"""How each family writes its calls: one row of data per format.

    name        what --tool-parser takes
    envelopes   what opens a stretch of calls in an answer, what closes it, and what may stand inside
    writes      how to make the model write such a call: the pieces of text around it (``calling.py``)
    signs       texts in a chat template that tell the format; the first row whose signs are all there wins

A new format is a new row where its calls are JSON, tags, Python or name and JSON; ``docs/chat.md`` has the
table of families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.errors import ConfigError

AUTO, NONE = "auto", "none"

Body = Literal["json", "xml", "python", "headed"]


@dataclass(frozen=True, slots=True)
class Envelope:
    """``open`` "" is an answer that begins with a call. ``close`` None: the calls end by themselves.
    ``bodies``: first character (of the text inside, "" for any) -> how it is read. ``keeps_open``: the
    opening text is part of the first call."""

    open: str
    close: str | None
    bodies: tuple[tuple[str, Body], ...]
    keeps_open: bool = False


@dataclass(frozen=True, slots=True)
class Writing:
    """``lead`` and ``tail`` stand around all calls, ``before`` and ``behind`` around each, ``between``
    separates them. ``style`` writes name and arguments; with JSON, ``key`` is the name of the arguments."""

    style: Body
    lead: str = ""
    before: str = ""
    behind: str = ""
    between: str = ""
    tail: str = ""
    key: str = "arguments"


@dataclass(frozen=True, slots=True)
class Head:
    """What stands around the name of a "headed" call. ``before`` is not repeated where the envelope is."""

    before: str
    arguments: str
    behind: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Of a call in tags. ``quoted``: a name is an attribute, and another one of a parameter says whether its
    value is text as it stands or JSON (GigaChat); else the tool's schema says it."""

    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    quoted: bool = False

    def begin(self, tag: str, name: str, *, text: bool | None = None) -> str:
        """``text``: of a parameter's value."""
        if not self.quoted:
            return f"{tag}{name}>\n"
        kind = "" if text is None else f' string="{str(text).lower()}"'
        return f'{tag} name="{name}"{kind}>' + ("\n" if text is None else "")

    @property
    def value_end(self) -> str:
        return f"{self.parameter_end}\n" if self.quoted else f"\n{self.parameter_end}\n"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``new_id`` makes the id of a call from random hex and its number; templates of some families check
    them."""

    name: str
    envelopes: tuple[Envelope, ...]
    writes: Writing
    signs: tuple[tuple[str, ...], ...]
    head: Head | None = None
    tags: Tags = Tags()
    new_id: Callable[[str, str, int], str] = lambda random_hex, name, number: f"call_{random_hex[:24]}"

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(envelope.open for envelope in self.envelopes if envelope.open)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be single tokens, which must not be left out of the answer's text."""
        ends = tuple(envelope.close for envelope in self.envelopes if envelope.close)
        heads = (self.head.before, self.head.arguments, self.head.behind) if self.head else ()
        of = self.tags
        tags = (of.function, of.function_end, of.parameter, of.parameter_end) if of.quoted else ()
        return (*self.opens, *ends, *(text for text in heads if text), *tags)


_JSON: tuple[tuple[str, Body], ...] = (("{", "json"), ("[", "json"))
_TAGGED: tuple[tuple[str, Body], ...] = (*_JSON, ("<", "xml"))
_TOOL_CALL = Envelope("<tool_call>", "</tool_call>", _TAGGED)

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "qwen3_xml", (_TOOL_CALL, Envelope("<function=", None, (("<", "xml"),), keeps_open=True)),
        Writing("xml", before="<tool_call>\n", behind="\n</tool_call>", between="\n"),
        signs=(("<function=", "<parameter="),)),
    ToolFormat(
        "lfm2", (Envelope("<|tool_call_start|>", "<|tool_call_end|>", (("", "python"),)),),
        Writing("python", lead="<|tool_call_start|>[", between=", ", tail="]<|tool_call_end|>"),
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|tool_response_start|>",))),
    ToolFormat(
        "olmo3", (Envelope("<function_calls>", "</function_calls>", (("", "python"),)),),
        Writing("python", lead="<function_calls>", between="\n", tail="</function_calls>"),
        signs=(("<function_calls>",),)),
    ToolFormat(
        "nemotron", (Envelope("<TOOLCALL>", "</TOOLCALL>", _JSON),),
        Writing("json", lead="<TOOLCALL>[", between=", ", tail="]</TOOLCALL>"), signs=(("<TOOLCALL>",),)),
    ToolFormat(
        "jamba", (Envelope("<tool_calls>", "</tool_calls>", _JSON),),
        Writing("json", lead="<tool_calls>[\n", between=",\n", tail="\n]</tool_calls>"),
        signs=(("<tool_calls>",),)),
    ToolFormat(
        "gigachat", (Envelope("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>", (("<", "xml"),)),),
        Writing("xml", lead="<｜GCML｜tool_calls>\n", between="\n", tail="\n</｜GCML｜tool_calls>"),
        signs=(("｜GCML｜",),),
        tags=Tags("<｜GCML｜invoke", "</｜GCML｜invoke>", "<｜GCML｜parameter", "</｜GCML｜parameter>",
                  quoted=True)),
    ToolFormat(
        "kimi", (Envelope("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", (("<", "headed"),)),),
        Writing("headed", lead="<|tool_calls_section_begin|>", tail="<|tool_calls_section_end|>"),
        signs=(("<|tool_calls_section_begin|>",),),
        head=Head("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        new_id=lambda random_hex, name, number: f"functions.{name}:{number}"),
    ToolFormat(
        "mistral", (Envelope("[TOOL_CALLS]", None, (*_JSON, ("", "headed"))),),
        Writing("json", lead="[TOOL_CALLS][", between=", ", tail="]"), signs=(("[TOOL_CALLS]",),),
        head=Head("", "[ARGS]", ""), new_id=lambda random_hex, name, number: random_hex[:9]),
    ToolFormat(
        "granite", (Envelope("<|tool_call|>", None, _JSON), Envelope("<tool_call>", "</tool_call>", _JSON)),
        Writing("json", lead="<|tool_call|>[", between=", ", tail="]"), signs=(("<|tool_call|>",),)),
    ToolFormat(
        "hermes", (_TOOL_CALL,),
        Writing("json", before="<tool_call>\n", behind="\n</tool_call>", between="\n"),
        signs=(("<tool_call>",),)),
    ToolFormat(
        "llama3_json", (Envelope("<|python_tag|>", None, _JSON), Envelope("", None, (("{", "json"),))),
        Writing("json", between="; ", key="parameters"),
        signs=(("<|python_tag|>",), ('"parameters":', "<|start_header_id|>"))),
    ToolFormat(   # read by ``weft.text.channels``: each call is a message
        "harmony", (), Writing("headed"), signs=(("<|channel|>", "<|message|>"),),
        head=Head("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        new_id=lambda random_hex, name, number: name),
)  # fmt: skip
NAMES = tuple(row.name for row in FORMATS)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The row called ``name``; with "auto" the one that ``template`` (its source) speaks for; None for
    "none", or where nothing does. Raises ConfigError that lists the names."""
    check_tool_parser(name)
    if name == NONE:
        return None
    if name != AUTO:
        return next(row for row in FORMATS if row.name == name)
    return next((row for row in FORMATS if any(all(sign in template for sign in signs) for signs in row.signs)), None)


def check_tool_parser(name: str) -> None:
    if name not in (AUTO, NONE, *NAMES):
        raise ConfigError(
            f"--tool-parser {name!r} is unknown; there are {', '.join((AUTO, NONE, *NAMES))}", param="--tool-parser"
        )
