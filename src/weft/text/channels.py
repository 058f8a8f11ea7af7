"""Answers that are messages in channels: the header of each names its kind.

    <|channel|>analysis<|message|>The user asks ...<|end|>                            reasoning       gpt-oss
    <|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>            text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{"x": 1}<|call|>                                                   a call
    <|start|>assistant<|channel|>final<|message|>It is noon.<|return|>                text

    <|content_thinking|>The user asks ...<|end_message|>                              reasoning       Inkling
    <|message_model|><|content_text|>I look it up.<|end_message|>                     text
    <|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"x": 1}}<|end_message|>      a call

The prompt ends with the beginning of a header, or inside a message that the answer continues. The recipient of a header
of gpt-oss decides before its channel: models call functions from any channel, and write ``to=`` before or after it. A
header that never ends is text, and so is an answer that begins in another way.

A call is emitted when its arguments are a complete object; a long call is emitted as it comes (``CallGate``). Anything
else is text. If the request offers no tools, a call's arguments are text.

Sources: OpenAI's guide to the harmony response format; the chat template of Inkling.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from dataclasses import dataclass
from typing import Any

from weft.request import Grammar
from weft.text.choices import first_marker, held_characters, may_become
from weft.text.grammars import BUDGET_FIELD, FREE_TEXT, NO_FORCING, TokenOf, bounded_thoughts, literal, quoted
from weft.text.tools.json_calls import HELD_CHARS, CallDelta, CallGate, ObjectScanner, call_of
from weft.text.tools.values import is_object, parse_json, parse_literal, to_json


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """A format of messages. ``bodies``: the markers between a header and its body. ``ends``: markers that end a body;
    the ``openers`` among them begin the next header, for a model that forgot an end. ``starts``: beginnings of an
    answer that is messages. ``turn``: the text before each later message. ``thought``, ``said`` and ``answer``: headers
    of reasoning, text and the final message, as a grammar writes them. ``has_named_calls``: a call's body has its
    name."""

    name: str
    turn: str
    bodies: tuple[str, ...]
    ends: tuple[str, ...]
    openers: tuple[str, ...]
    starts: tuple[str, ...]
    thought: str
    said: str
    answer: str
    others: tuple[str, ...] = ()
    has_named_calls: bool = False

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that may be tokens; they stay in the text for the reader."""
        return tuple(dict.fromkeys((*self.bodies, *self.ends, *self.openers, *self.others)))

    def kind(self, header: str, body: str) -> str:
        """Return reasoning, text or call, of a message whose header ends with the marker ``body``."""
        if body == _THINKING:
            return "reasoning"
        if body == _INVOKE or _RECIPIENT.search(header):
            return "call"
        channel = _CHANNEL.search(header)
        return "reasoning" if channel is not None and channel[1] == "analysis" else "text"


_START, _CHANNEL_MARK, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_MODEL, _THINKING, _TEXT = "<|message_model|>", "<|content_thinking|>", "<|content_text|>"
_INVOKE = "<|content_invoke_tool_json|>"
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BARE_HEADER = re.compile(r"[\w.-]{0,128}")

FORMATS = (
    ChannelFormat(
        "harmony",
        turn=f"{_START}assistant",
        bodies=(_MESSAGE,),
        ends=(_END, "<|call|>", "<|return|>", _START, _CHANNEL_MARK),
        openers=(_START, _CHANNEL_MARK),
        starts=(_CHANNEL_MARK, _START, _MESSAGE, "to=functions."),
        thought=f"{_CHANNEL_MARK}analysis{_MESSAGE}",
        said=f"{_CHANNEL_MARK}commentary{_MESSAGE}",
        answer=f"{_CHANNEL_MARK}final{_MESSAGE}",
        others=("<|constrain|>",),
    ),
    ChannelFormat(
        "inkling",
        turn=_MODEL,
        bodies=(_THINKING, _TEXT, _INVOKE),
        ends=("<|end_message|>", "<|content_model_end_sampling|>", _MODEL),
        openers=(_MODEL,),
        starts=(_MODEL, _THINKING, _TEXT, _INVOKE),
        thought=_THINKING,
        said=_TEXT,
        answer=_TEXT,
        has_named_calls=True,
    ),
)


def channel_format(name: str) -> ChannelFormat | None:
    """Return the format that both parsers call ``name``; None if its answers are not messages."""
    return next((row for row in FORMATS if row.name == name), None)


def open_header(row: ChannelFormat, prompt: str) -> str | None:
    """Return the header, with its last marker, of the message in which ``prompt`` ends; None if the answer writes the
    header."""
    start, turn = prompt.rfind(row.openers[0]), row.openers[0]
    if start < 0:
        return None
    header = prompt[start + len(turn) :]
    match = first_marker(header, row.bodies)
    if match is None:
        return None
    end = match[0] + len(match[1])
    return None if any(marker in header[end:] for marker in row.ends) else header[:end]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


class MessageReader:
    """A reader of one answer. ``header``: see ``open_header``. ``takes_calls``: whether the request offers tools.
    ``single``: only the first call counts. ``thinks``: whether reasoning is separated; if false it is text. ``eager``,
    ``is_sure``: as for ``ToolCallReader``."""

    def __init__(
        self,
        row: ChannelFormat,
        header: str | None,
        *,
        takes_calls: bool,
        thinks: bool,
        single: bool,
        eager: bool,
        is_sure: bool = False,
    ) -> None:
        self._row = row
        self._takes_calls, self._thinks, self._single = takes_calls, thinks, single
        self._gate = CallGate(math.inf if not eager else -1 if is_sure else HELD_CHARS)
        self._held = ""
        self.kind = "before"
        """Kind of the current part: before (not known yet), header, reasoning, text, call or skipped."""
        self.has_thought = False
        """Whether reasoning came with the current piece."""
        self._name, self._arguments, self._call_count = "", "", 0
        self._scanner: ObjectScanner | None = None
        """Scanner of the current call's arguments, and the number of characters that were emitted."""
        self._given = 0
        self._parts: list[Thought | str | CallDelta] = []
        self._has_said = False
        if header is not None:
            marker = next(marker for marker in row.bodies if header.endswith(marker))
            self._begin(header.removesuffix(marker), marker)

    @property
    def is_undecided(self) -> bool:
        return self.kind in ("before", "header")

    @property
    def held_chars(self) -> int:
        """Number of characters at the end of the text so far that are not classified yet."""
        return len(self._held)

    def push(self, text: str) -> list[Thought | str | CallDelta]:
        self._held += text
        self.has_thought = self.kind == "reasoning"
        while self._advance():
            pass
        return self._take()

    def finish(self, *, is_cut: bool) -> list[Thought | str | CallDelta]:
        """End the answer, and emit held-back text as the kind of part that it is in."""
        if self.kind == "before" or (self.kind == "header" and not self._has_said):
            self.kind = "text"
        self._say(self._held)
        self._end_call(is_whole=not is_cut)
        self._held = ""
        return self._take()

    def _take(self) -> list[Thought | str | CallDelta]:
        parts, self._parts = self._parts, []
        return parts

    def _advance(self) -> bool:
        """Process one part of the text, and return whether there may be more to do with the rest."""
        row = self._row
        if self.kind == "before":
            bare = self._held.lstrip()
            if not bare or may_become(bare, row.starts):
                return False
            if row.has_named_calls and self._may_be_name(bare):
                return self.kind == "header"
            self.kind = "header" if bare.startswith(row.starts) else "text"
            return True
        if self.kind == "header":
            match = first_marker(self._held, row.bodies)
            if match is not None:
                position, marker = match
                self._begin(self._held[:position], marker)
                self._held = self._held[position + len(marker) :]
            return match is not None
        match = first_marker(self._held, row.ends)
        if match is None:
            safe = len(self._held) - held_characters(self._held, row.ends)
            self._say(self._held[:safe])
            self._held = self._held[safe:]
            return False
        position, marker = match
        self._say(self._held[:position])
        self._end_call(is_whole=True)
        self._held = self._held[position + (0 if marker == _CHANNEL_MARK else len(marker)) :]
        self.kind = "header"
        return True

    def _may_be_name(self, text: str) -> bool:
        """Return whether ``text`` may be the name of a call, in a header that the prompt has begun."""
        match = _BARE_HEADER.match(text)
        rest = text[match.end() :] if match else text
        if rest.startswith(_INVOKE):
            self.kind = "header"
        return rest.startswith(_INVOKE) or not rest or may_become(rest, (_INVOKE,))

    def _begin(self, header: str, marker: str) -> None:
        kind = self._row.kind(header, marker)
        if kind == "call" and self._takes_calls:
            self._call_count += 1
            self.kind = "skipped" if self._single and self._call_count > 1 else "call"
            recipient = _RECIPIENT.search(header)
            self._name, self._arguments = recipient[1] if recipient else "", ""
            self._scanner = None
            if self.kind == "call" and not self._row.has_named_calls:
                self._give_call(CallDelta(self._call_count - 1, _new_id(), self._name))
        elif self._thinks and kind == "reasoning":
            self.kind, self.has_thought = "reasoning", True
        else:
            self.kind = "text"

    def _give_call(self, delta: CallDelta) -> None:
        ready = self._gate.push(delta)
        if ready is not None:
            self._give(ready)

    def _give(self, part: Thought | str | CallDelta) -> None:
        self._has_said = True
        self._parts.append(part)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.kind == "reasoning":
            self._give(Thought(text))
        elif self.kind == "text":
            self._give(text)
        elif self.kind == "call":
            self._arguments += text
            if not self._row.has_named_calls:
                self._give_arguments()

    def _give_arguments(self) -> None:
        """Emit more of an object, with line ends in its strings escaped."""
        text = self._arguments
        if self._scanner is None and text.lstrip().startswith("{"):
            start = len(text) - len(text.lstrip())
            self._scanner = ObjectScanner(start)
            self._scanner.copy(start)
            self._given = 0
        if self._scanner is not None:
            self._scanner.scan(text)
            self._give_call(CallDelta(arguments="".join(self._scanner.escaped[self._given :])))
            self._given = len(self._scanner.escaped)

    def _is_complete(self, arguments: str) -> bool:
        """Return whether the arguments are an object, perhaps with surplus brackets after it or without its last
        brace."""
        scanner = self._scanner
        if scanner is None:
            return _object_of(arguments) is not None
        if scanner.end is None:
            scanner.scan(self._arguments + "}")
            return scanner.end is not None and is_object("".join(scanner.escaped))
        end = scanner.end
        return is_object(self._arguments[scanner.start : end]) and not self._arguments[end:].strip(" \n\t\r}]")

    def _end_call(self, *, is_whole: bool) -> None:
        """End the current call. ``is_whole``: the end marker came, or the model stopped after the call."""
        if self.kind != "call":
            return
        self.kind = "header"
        arguments = self._arguments.strip()
        if self._row.has_named_calls:
            call = call_of(parse_literal(arguments)) if is_whole else None
            if call is not None:
                self._give(CallDelta(self._call_count - 1, _new_id(), *call, complete=True))
                return
        elif is_whole and self._is_complete(arguments):
            rest = "".join(self._scanner.escaped[self._given :]) if self._scanner else to_json(_object_of(arguments))
            self._give_call(CallDelta(arguments=rest, complete=True))
            return
        if not self._gate.is_open:
            self._call_count -= 1
            self._give(self._arguments)
        self._gate.drop()


def _object_of(arguments: str) -> dict[str, Any] | None:
    """Return an empty object for no arguments, or the only item of a list; None for anything else."""
    try:
        value = parse_json(arguments or "{}")
    except ValueError:
        return None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) else None


def channel_grammar(
    row: ChannelFormat,
    calls: Grammar | None,
    answer: Grammar | None,
    *,
    free: bool,
    begun: bool,
    token_of: TokenOf,
    budget: int | None = None,
) -> Grammar:
    """Return the grammar of an answer of messages: reasoning, then ``calls`` or a final message that is ``answer``.
    ``free``: also allow messages of any channel, whose calls are ``calls``. ``begun``: the prompt ends inside the final
    message. ``budget``: most tokens of the reasoning, which is then at most one message."""
    named, choices, field = [], [], BUDGET_FIELD
    for name, grammar, header in (("calls", calls, ""), ("answer", answer, row.answer)):
        if grammar is not None:
            first, *rest = json.loads(grammar.grammar)["grammars"]
            named += [{"name": name, "lark_grammar": first["lark_grammar"].removeprefix(NO_FORCING)}, *rest]
            opening = "" if begun or not header else f"{literal(header, token_of)} "
            choices.append(f"{opening}@{name}")
            field = grammar.field
    if begun:
        return Grammar(
            grammar=json.dumps({"grammars": [{"lark_grammar": f"{NO_FORCING}start: {' | '.join(choices)}"}, *named]}),
            field=field,
        )

    def messages(headers: tuple[str, ...], body: str) -> str:
        return " | ".join(f"{literal(header, token_of)} {body}" for header in dict.fromkeys(headers))

    # Free text cannot contain a marker that is a token. Any other marker may occur in it, but not as its suffix.
    end = row.end
    body = "TEXT " + literal(end, token_of) if token_of(end) is not None else "ended"
    before: tuple[str, ...] = (row.thought, row.said) if free else (row.thought,)
    after: tuple[str, ...] = (row.thought, row.said, row.answer)
    turn, opening = literal(row.turn, token_of), ""
    if budget is not None:
        before, after = before[1:], after[1:]
        opening = f"(thinking {turn})? "
    said = f"(said {turn})* " if before else ""
    rules = (
        f"start: {opening}{said}({' | '.join([*choices, *(['last'] if free else [])])})\n"
        f"ended[suffix={quoted(end)}]: {FREE_TEXT}\nTEXT: {FREE_TEXT}\n"
    )
    if before:
        rules += f"said: {messages(before, body)}\n"
    if budget is not None:
        rules += f"thinking: {literal(row.thought, token_of)} @thoughts {literal(end, token_of)}\n"
    if free:
        rules += f"last: {messages(after, 'TEXT')}\n"
    named += bounded_thoughts(budget)
    return Grammar(grammar=json.dumps({"grammars": [{"lark_grammar": NO_FORCING + rules}, *named]}), field=field)
