"""Answers that are messages in channels (harmony, the format of gpt-oss): each says in its header what it is.

    <|channel|>analysis<|message|>The user asks ...<|end|>                            reasoning
    <|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>            text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{"x": 1}<|call|>                                                   a call
    <|start|>assistant<|channel|>final<|message|>It is noon.<|return|>                text

The prompt ends with ``<|start|>assistant``, or inside of a message that the answer continues. The recipient
of a header decides before its channel: models call functions from any channel, and write ``to=`` before or
behind it. A header that never gets to ``<|message|>`` is text, and so is an answer that begins otherwise.

A call is given out as it comes (``eager``), or when its arguments are a whole object; what is none is text.
Where no tools are offered, a call's arguments are text.

Source: OpenAI's guide to the harmony response format.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass

from weft.request import Grammar
from weft.text.choices import first_marker, held_characters, may_become
from weft.text.grammars import FREE_TEXT, NO_FORCING, TokenOf, literal, quoted
from weft.text.tools.json_calls import CallDelta

NAME = "harmony"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKERS = (START, CHANNEL, MESSAGE, END, "<|constrain|>", "<|call|>", "<|return|>")
_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
"""The last two: a model that forgot to end its message."""
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def open_header(prompt: str) -> str | None:
    """The header of the message that ``prompt`` ends in; None where the answer writes it."""
    header, message, body = prompt.rpartition(START)[2].partition(MESSAGE)
    return header if message and not any(marker in body for marker in _ENDS) else None


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


class MessageReader:
    """One per answer. ``header``: as ``open_header``. ``takes_calls``: tools are offered. ``single``: the
    first call counts alone. ``thinks``: analysis is reasoning, else text."""

    def __init__(self, header: str | None, *, takes_calls: bool, thinks: bool, single: bool, eager: bool) -> None:
        self._takes_calls, self._thinks, self._single, self._eager = takes_calls, thinks, single, eager
        self._held = ""
        self.kind = "before"
        """before: nothing is known yet; header; reasoning, text, call or skipped."""
        self.has_thought = False
        """Reasoning came with the piece at hand."""
        self._name, self._arguments, self._call_count = "", "", 0
        self._parts: list[Thought | str | CallDelta] = []
        self._has_said = False
        if header is not None:
            self._begin(header)

    @property
    def is_undecided(self) -> bool:
        return self.kind in ("before", "header")

    def push(self, text: str) -> list[Thought | str | CallDelta]:
        self._held += text
        self.has_thought = self.kind == "reasoning"
        while self._advance():
            pass
        return self._take()

    def finish(self, *, is_cut: bool) -> list[Thought | str | CallDelta]:
        """The answer is over: what was held back is what it looked like."""
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
        """One thing at a time: whether there may be more to do with the text at hand."""
        if self.kind == "before":
            bare = self._held.lstrip()
            if not bare or may_become(bare, (CHANNEL, START, MESSAGE, "to=functions.")):
                return False
            headed = bare.startswith((CHANNEL, START, MESSAGE, "to="))
            self.kind = "header" if headed else "text"
            return True
        if self.kind == "header":
            at = self._held.find(MESSAGE)
            if at >= 0:
                self._begin(self._held[:at])
                self._held = self._held[at + len(MESSAGE) :]
            return at >= 0
        match = first_marker(self._held, _ENDS)
        if match is None:
            safe = len(self._held) - held_characters(self._held, _ENDS)
            self._say(self._held[:safe])
            self._held = self._held[safe:]
            return False
        at, marker = match
        self._say(self._held[:at])
        self._end_call(is_whole=True)
        self._held = self._held[at + (0 if marker == CHANNEL else len(marker)) :]
        self.kind = "header"
        return True

    def _begin(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self._takes_calls:
            self._call_count += 1
            self.kind = "skipped" if self._single and self._call_count > 1 else "call"
            self._name, self._arguments = recipient[1], ""
            if self.kind == "call" and self._eager:
                self._give(CallDelta(self._call_count - 1, _new_id(), self._name))
        elif self._thinks and channel is not None and channel[1] == "analysis":
            self.kind, self.has_thought = "reasoning", True
        else:
            self.kind = "text"

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
            if self._eager:
                self._give(CallDelta(arguments=text))

    def _end_call(self, *, is_whole: bool) -> None:
        """``is_whole``: its end marker came, or the model stopped behind it."""
        if self.kind != "call":
            return
        self.kind = "header"
        arguments = self._arguments.strip()
        is_whole = is_whole and _is_object(arguments)
        if self._eager:
            self._give(CallDelta(arguments="" if arguments else "{}", complete=is_whole))
        elif is_whole:
            self._give(CallDelta(self._call_count - 1, _new_id(), self._name, arguments or "{}", complete=True))
        else:
            self._call_count -= 1
            self._give(self._arguments)


def _is_object(text: str) -> bool:
    """Nothing at all is an object without members."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def channel_grammar(
    calls: Grammar | None, answer: Grammar | None, *, free: bool, begun: bool, token_of: TokenOf
) -> Grammar:
    """What an answer of messages must be: analysis, then ``calls`` or a final message that is ``answer``.
    ``free``: or messages of any channel, whose calls are ``calls``. ``begun``: the prompt ends inside of the
    final message."""
    named, choices, field = [], [], ""
    for name, grammar, header in (("calls", calls, ""), ("answer", answer, f"{CHANNEL}final{MESSAGE}")):
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

    def messages(channels: tuple[str, ...], body: str) -> str:
        heads = (literal(f"{CHANNEL}{channel}{MESSAGE}", token_of) for channel in channels)
        return " | ".join(f"{head} {body}" for head in heads)

    # Free text has no marker that is a token; of another marker it would be a part, but as its suffix.
    body = "TEXT " + literal(END, token_of) if token_of(END) is not None else "ended"
    before = ("analysis", "commentary") if free else ("analysis",)
    rules = (
        f"start: (said {literal(f'{START}assistant', token_of)})* "
        f"({' | '.join([*choices, *(['last'] if free else [])])})\nsaid: {messages(before, body)}\n"
        f"ended[suffix={quoted(END)}]: {FREE_TEXT}\nTEXT: {FREE_TEXT}\n"
    )
    if free:
        rules += f"last: {messages(('analysis', 'commentary', 'final'), 'TEXT')}\n"
    return Grammar(grammar=json.dumps({"grammars": [{"lark_grammar": NO_FORCING + rules}, *named]}), field=field)
