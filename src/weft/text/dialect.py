"""The dialect of one model in a chat: the formats of its reasoning and of its tool calls.

    template + vocabulary + flags --Dialect--> plan(request) --> AnswerPlan: grammar, reader, tokens to show

This module decides how the text of an answer is read: which parts are separated, which grammar the answer must match,
and which marker tokens the detokenizer leaves in the text for the readers.

An answer is a stream of blocks: reasoning, text, and tool calls.

    start(reasoning)   delta "hm"   delta " so"            stop
    start(text)        delta "I look."                     stop
    start(call)        delta '{"city": '  delta '"Rome"}'  stop

A block begins with the first piece of its kind and ends when another one begins, or with the answer. The answers of all
APIs are written from these events; a complete answer consists of the blocks of the same events.

``weft.text.channels`` reads answers that are messages in channels.

*Grammars of answers.* Required tool calls and structured output are both grammars. With optional tools and a schema,
the answer is either. If the model reasons, its reasoning comes first: free text up to its end marker.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec

from weft.errors import RequestError
from weft.request import Grammar, SamplingParams
from weft.text import channels
from weft.text.chat_request import ChatRequest
from weft.text.choices import Stops, stop_strings
from weft.text.current_request import note_ignored
from weft.text.grammars import NO_FORCING, behind_reasoning, bounded_reasoning, framed
from weft.text.reasoning import FORMATS, ReasoningFormat, ReasoningSplitter, begins_inside, reasoning_format
from weft.text.stop_scope import AfterReasoning, InMessages, ScopedStops, StopScope
from weft.text.tokenizer import Tokenizer
from weft.text.tools.calling import calls_grammar, strict_grammar
from weft.text.tools.definitions import Tool, ToolChoice, input_of
from weft.text.tools.formats import FORMATS as TOOL_FORMATS
from weft.text.tools.formats import NAMES, HasToken, ToolFormat, tool_format
from weft.text.tools.json_calls import CallDelta
from weft.text.tools.reader import LastCalls, ToolCallReader

BlockKind = Literal["reasoning", "text", "call", "custom_call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """A block of an answer. ``index`` numbers the blocks of an answer, ``call_index`` its calls. ``is_complete`` is set
    when the block stops: an answer that was cut may have half a text, or half of the arguments of a call."""

    kind: BlockKind
    index: int
    call_index: int = -1
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a function call the arguments as JSON text, of a custom call the text for the tool."""
        return "".join(self.parts)

    @property
    def is_call(self) -> bool:
        return self.call_index >= 0


class BlockEvent(msgspec.Struct, frozen=True):
    """An event of a block. ``block`` is shared and may already contain later text, even at its start event."""

    phase: Literal["start", "delta", "stop"]
    block: AnswerBlock
    delta: str = ""


class BlockWriter:
    """The blocks of one answer. ``blocks``: all so far; ``take`` returns each event once."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.call_count = 0
        """Number of complete calls."""
        self._open: AnswerBlock | None = None
        self._events: list[BlockEvent] = []

    def take(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def write(self, kind: Literal["reasoning", "text"], text: str) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._start(AnswerBlock(kind, len(self.blocks)))
        self._delta(block, text)

    def call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            kind: BlockKind = "custom_call" if delta.is_custom else "call"
            self._start(AnswerBlock(kind, len(self.blocks), delta.index, delta.call_id or "", delta.name))
        assert self._open is not None
        self._delta(self._open, delta.arguments)
        if delta.complete:
            self._open.is_complete = True
            self.call_count += 1

    def stop(self, *, is_cut: bool = False) -> None:
        """Stop the current block. ``is_cut``: the answer reached its limit of tokens in this block."""
        if self._open is not None:
            self._open.is_complete |= not (self._open.is_call or is_cut)
            self._events.append(BlockEvent("stop", self._open))
            self._open = None

    def _start(self, block: AnswerBlock) -> AnswerBlock:
        self.stop()
        self.blocks.append(block)
        self._events.append(BlockEvent("start", block))
        self._open = block
        return block

    def _delta(self, block: AnswerBlock, text: str) -> None:
        if text:
            block.parts.append(text)
            self._events.append(BlockEvent("delta", block, text))


def arguments_of(text: str) -> Any:
    """Return the object in a call's arguments; an answer that was cut may have only the beginning of an object."""
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}


def text_of(blocks: Iterable[AnswerBlock], kind: BlockKind) -> str:
    """Return the text of all blocks of this kind."""
    return "".join(block.text for block in blocks if block.kind == kind)


_NO_CALLS = ToolChoice("none")
_MARKER_TOKENS_MAX = 32
"""Most tokens of a marker that is not a single token."""


class AnswerReader:
    """A reader of one answer, from pieces of text to events of blocks. ``has_end``: whether the end of the reasoning is
    in the text of these tokens. ``custom``: names of custom tools. Without ``shows_reasoning``, the reasoning is read
    but left out."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: ToolCallReader | None,
        last_calls: LastCalls | None,
        has_end: Callable[[Sequence[int]], bool],
        custom: frozenset[str],
        *,
        shows_reasoning: bool,
        messages: channels.MessageReader | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._messages = messages
        self._custom = custom
        self._calls = calls
        self._last_calls = last_calls
        self._shows_reasoning = shows_reasoning
        self._has_end = has_end
        self._writer = BlockWriter()
        self._space = ""
        """Whitespace after reasoning that ends with calls, held back until other text follows."""
        self._tail: list[int] = []
        self._undecided_tokens = 0
        self.reasoning_tokens = 0
        """Tokens up to the end of the reasoning, markers included."""

    @property
    def blocks(self) -> list[AnswerBlock]:
        return self._writer.blocks

    def read(self, text: str, tokens: Sequence[int], finish_reason: str | None) -> list[BlockEvent]:
        """Return the events of a piece of the answer. ``finish_reason`` is set with the last piece."""
        last = finish_reason is not None
        if self._messages is not None:
            self._read_messages(self._messages, text, tokens, finish_reason)
            return self._writer.take()
        reasoning, content = "", text
        if self._reasoning is not None:
            was_over = self._reasoning.over
            split = self._reasoning.push(text)
            if not was_over:
                self._count(tokens)
            while self._reasoning.has_more:
                self._read_split(split.reasoning, split.content, None)
                split = self._reasoning.push("")
            reasoning, content = split.reasoning, split.content
            if last:
                rest = self._reasoning.finish()
                reasoning, content = reasoning + rest.reasoning, content + rest.content
        self._read_split(reasoning, content, finish_reason)
        if last:
            if self._calls is not None:
                self._write(self._calls.finish(is_cut=finish_reason == "length"))
            self._writer.stop(is_cut=finish_reason == "length")
        return self._writer.take()

    def _read_split(self, reasoning: str, content: str, finish_reason: str | None) -> None:
        if self._last_calls is not None:
            reasoning, content = self._hold_last_calls(self._last_calls, reasoning, content, finish_reason)
        self._think(reasoning)
        if self._calls is None:
            self._writer.write("text", content)
        else:
            self._write(self._calls.push(content))

    def _read_messages(
        self, messages: channels.MessageReader, text: str, tokens: Sequence[int], finish_reason: str | None
    ) -> None:
        undecided, parts = messages.is_undecided, messages.push(text)
        if messages.has_thought:
            spent = len(tokens) if messages.kind == "reasoning" else self._tokens_to_end(tokens)
            self.reasoning_tokens += self._undecided_tokens + spent
        still = undecided and messages.is_undecided
        self._undecided_tokens = self._undecided_tokens + len(tokens) if still else 0
        if finish_reason is not None:
            parts += messages.finish(is_cut=finish_reason == "length")
        for part in parts:
            if isinstance(part, channels.Thought):
                self._think(part.text)
            else:
                self._write([part])
        if finish_reason is not None:
            self._writer.stop(is_cut=finish_reason == "length")

    def finish_reason(self, reason: str | None) -> str | None:
        """Return ``tool_calls`` for an answer that ends with calls, else ``reason``. Call it after the last piece was
        read."""
        return "tool_calls" if reason == "stop" and self._writer.call_count else reason

    def _hold_last_calls(
        self, last_calls: LastCalls, reasoning: str, content: str, finish_reason: str | None
    ) -> tuple[str, str]:
        """Hold back calls at the end of the reasoning until it is certain that nothing follows."""
        reasoning, content, self._space = last_calls.push(reasoning), self._space + content, ""
        if content.strip():
            return reasoning + last_calls.release(), content
        if not last_calls.pending:
            return reasoning, content
        if finish_reason is None:
            self._space = content
            return reasoning, ""
        calls = last_calls.calls(is_cut=finish_reason == "length")
        if not calls:
            return reasoning + last_calls.release(), content
        self._think(reasoning)
        self._write(calls)
        return "", ""

    def _think(self, reasoning: str) -> None:
        if self._shows_reasoning:
            self._writer.write("reasoning", reasoning)

    def _write(self, parsed: Iterable[str | CallDelta]) -> None:
        for part in parsed:
            if isinstance(part, str):
                self._writer.write("text", part)
            elif part.name in self._custom:
                self._writer.call(replace(part, arguments=input_of(part.arguments), is_custom=True))
            else:
                self._writer.call(part)

    def _count(self, tokens: Sequence[int]) -> None:
        reasoning = self._reasoning
        assert reasoning is not None
        if reasoning.undecided:  # possibly the beginning of a start marker
            self._undecided_tokens += len(tokens)
            return
        self.reasoning_tokens, self._undecided_tokens = self.reasoning_tokens + self._undecided_tokens, 0
        if reasoning.inside:
            self.reasoning_tokens += len(tokens)
        elif reasoning.over:
            self.reasoning_tokens += self._tokens_to_end(tokens)
        else:
            self.reasoning_tokens = 0
        self._tail = [*self._tail, *tokens][-_MARKER_TOKENS_MAX:]

    def _tokens_to_end(self, tokens: Sequence[int]) -> int:
        """Return the number of ``tokens`` up to the one that completes the end marker. A piece may have many tokens,
        and the marker may have begun in the piece before."""
        counts = range(1, len(tokens))
        return bisect_left(counts, True, key=lambda count: self._has_end([*self._tail, *tokens[:count]])) + 1


class AnswerPlan(msgspec.Struct, frozen=True):
    """The plan of an answer's text. ``grammar``: the grammar of the answer. ``shown_ids``: special tokens that stay in
    the text. ``_is_sure``: whether the grammar forces complete calls; a grammar that only bounds the reasoning does
    not."""

    grammar: Grammar | None
    shown_ids: frozenset[int]
    _reasoning: ReasoningFormat | None
    _inside: bool
    _calls: ToolFormat | None
    _tools: tuple[Tool, ...]
    _single: bool
    _tokenizer: Tokenizer
    _channels: channels.ChannelFormat | None = None
    _header: str | None = None
    """Header of the message that the prompt has begun."""
    _is_sure: bool = False

    def stops(self, sampling: SamplingParams) -> Stops | None:
        """Return the stop strings of an answer that may reason: they do not count in its reasoning. None for an
        answer without stop strings, or of a model without reasoning."""
        if not sampling.stop or self._reasoning is None:
            return None
        scope: StopScope
        if self._channels is not None:
            scope = InMessages(
                self._channels,
                self._header,
                takes_calls=self._calls is not None,
                thinks=True,
                single=self._single,
                eager=False,
            )
        else:
            scope = AfterReasoning(ReasoningSplitter(self._reasoning, inside=self._inside))
        return ScopedStops(stop_strings(sampling), scope)

    def reader(self, *, eager: bool, shows_reasoning: bool = True) -> AnswerReader:
        """Return a reader of the answer. ``eager``: for a stream, see ``ToolCallReader``."""
        splitter = calls = last_calls = messages = None
        custom = frozenset(tool.name for tool in self._tools if tool.is_custom)
        if self._channels is not None:
            messages = channels.MessageReader(
                self._channels,
                self._header,
                takes_calls=self._calls is not None,
                thinks=self._reasoning is not None,
                single=self._single,
                eager=eager and not custom,
                is_sure=self._is_sure,
            )
        elif self._reasoning is not None:
            splitter = ReasoningSplitter(self._reasoning, inside=self._inside)
        if self._calls is not None and messages is None:
            calls = ToolCallReader(
                self._calls, self._tools, eager=eager and not custom, single=self._single, is_sure=self._is_sure
            )
            if splitter is not None:
                whole = ToolCallReader(self._calls, self._tools, eager=False, single=self._single)
                last_calls = LastCalls(self._calls, whole)
        return AnswerReader(
            splitter, calls, last_calls, self._has_end, custom, shows_reasoning=shows_reasoning, messages=messages
        )

    def _has_end(self, tokens: Sequence[int]) -> bool:
        row = self._channels or self._reasoning
        return row is not None and row.end in self._tokenizer.decode(tokens, skip_special_tokens=False)


def answer_markers() -> frozenset[str]:
    """Return the markers of reasoning and calls in all formats, except formats of messages in channels, whose markers
    are also those of turns."""
    rows = [row for row in FORMATS if channels.channel_format(row.name) is None]
    calls = [row for row in TOOL_FORMATS if channels.channel_format(row.name) is None]
    return frozenset[str]().union(*(row.markers for row in rows), *(row.markers for row in calls))


def call_format(source: str, tokenizer: Tokenizer, tool_parser: str = "auto") -> ToolFormat | None:
    """Return the format of calls of a model with the template ``source``; None if it is not known. Raise ConfigError
    for an unknown parser name."""
    return tool_format(tool_parser, source, _knows(tokenizer))


def _knows(tokenizer: Tokenizer) -> HasToken:
    return lambda text: tokenizer.added_id(text) is not None


class TemplateText(Protocol):
    """Interface to the properties of a chat template that a dialect needs."""

    @property
    def source(self) -> str: ...

    @property
    def reads_tools(self) -> bool: ...


class Dialect:
    """The dialect of one model. Raises ConfigError for an unknown parser name."""

    def __init__(
        self,
        template: TemplateText | None,
        tokenizer: Tokenizer,
        *,
        reasoning_parser: str = "auto",
        tool_parser: str = "auto",
    ) -> None:
        source = "" if template is None else template.source
        self._tokenizer = tokenizer
        self.reasoning = reasoning_format(reasoning_parser, source, _knows(tokenizer))
        self.tools = call_format(source, tokenizer, tool_parser)
        self.template_takes_tools = template is not None and template.reads_tools
        names = [row.name for row in (self.reasoning, self.tools) if row is not None]
        self.channels = next(filter(None, map(channels.channel_format, names)), None)

    @property
    def bounds_reasoning(self) -> bool:
        """Whether a budget of reasoning tokens can be enforced: the markers of the reasoning must be tokens."""
        if self.reasoning is None:
            return False
        markers = self.channels.markers if self.channels is not None else (self.reasoning.start, self.reasoning.end)
        return all(self._tokenizer.added_id(marker) is not None for marker in markers)

    def plan_of(self, request: ChatRequest, prompt: str, grammar: Grammar | None) -> AnswerPlan:
        """Return ``plan`` of a checked request. ``prompt``: the rendered text; ``grammar``: of the requested structured
        output. Raise RequestError."""
        return self.plan(
            prompt,
            tools=request.tools,
            choice=request.choice,
            several_calls=request.several_calls,
            grammar=grammar,
            continued=request.continued,
            budget=request.thinking_token_budget,
        )

    def plan(
        self,
        prompt: str,
        *,
        tools: Sequence[Tool] = (),
        choice: ToolChoice = _NO_CALLS,
        several_calls: bool = True,
        grammar: Grammar | None = None,
        continued: str | None = None,
        budget: int | None = None,
    ) -> AnswerPlan:
        """Return the plan of one request's answer. ``prompt``: the rendered text; ``continued``: the beginning of the
        answer, if the prompt ends with one; ``grammar``: of the requested structured output; ``budget``: most tokens of
        the reasoning, if ``bounds_reasoning``. Raise RequestError if these cannot be combined, or if this model cannot
        do it."""
        calls = self._check_tools(tools, choice)
        if not self.bounds_reasoning:
            budget = None
        if self.channels is not None:
            return self._plan_channels(self.channels, calls, tools, choice, several_calls, grammar, prompt, budget)
        row = self.reasoning
        begun = continued is not None or (row is not None and _has_begun(row, prompt))
        wanted = self._grammar(calls, tools, choice, several_calls, grammar, begun=begun)
        is_sure = wanted is not None
        inside = row is not None and begins_inside(row, prompt, continued)
        if row is not None and (inside or not self._closed(row, prompt, continued)):
            token_of = self._tokenizer.added_id
            if wanted is not None:
                wanted = behind_reasoning(
                    wanted,
                    start=row.start,
                    end=row.end,
                    opened=inside,
                    token_of=token_of,
                    budget=budget,
                    bare_end=row.bare_end,
                )
            elif budget is not None:
                wanted = bounded_reasoning(
                    start=row.start, end=row.end, opened=inside, again=row.again, token_of=token_of, budget=budget
                )
        markers = (*(row.markers if row else ()), *(calls.markers if calls else ()))
        ids = (self._tokenizer.added_id(marker) for marker in markers)
        return AnswerPlan(
            wanted,
            frozenset(token for token in ids if token is not None),
            row,
            inside,
            calls,
            tuple(tools),
            not several_calls,
            self._tokenizer,
            _is_sure=is_sure,
        )

    def _plan_channels(
        self,
        row: channels.ChannelFormat,
        calls: ToolFormat | None,
        tools: Sequence[Tool],
        choice: ToolChoice,
        several: bool,
        grammar: Grammar | None,
        prompt: str,
        budget: int | None,
    ) -> AnswerPlan:
        token_of, header, offered = self._tokenizer.added_id, channels.open_header(row, prompt), choice.among(tools)
        is_free = choice.mode == "auto" and grammar is None
        limited = len(offered) < len(tools) or any(tool.strict for tool in offered)
        called = None
        if calls is not None and (not is_free or limited or budget is not None):
            grammar = self._content_grammar(choice, grammar)
            # Each call is a message, and the end of the call is the end of the answer.
            called = calls_grammar(calls, offered, several=False, token_of=token_of, field="tools")
        wanted = None
        if called is not None or grammar is not None or (budget is not None and header is None):
            wanted = channels.channel_grammar(
                row,
                called,
                grammar,
                free=is_free or (called is None and grammar is None),
                begun=header is not None,
                token_of=token_of,
                budget=budget,
            )
        ids = (token_of(marker) for marker in row.markers)
        return AnswerPlan(
            wanted,
            frozenset(token for token in ids if token is not None),
            self.reasoning,
            False,
            calls,
            tuple(tools),
            not several,
            self._tokenizer,
            row,
            header,
            called is not None or grammar is not None,
        )

    @staticmethod
    def _content_grammar(choice: ToolChoice, grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of answers that are no calls. Where ``choice`` requires a call there is none: libraries
        send a response format with every request, and an answer without content has no form. Raise RequestError for a
        field that is no response format."""
        if choice.mode == "auto" or grammar is None:
            return grammar
        if not grammar.field.startswith("response_format"):
            raise RequestError(
                f"{grammar.field} cannot be combined with a tool_choice that asks for a call: "
                "the answer is one or the other",
                param="tool_choice",
            )
        note_ignored("response_format")
        return None

    def _closed(self, row: ReasoningFormat, prompt: str, continued: str | None) -> bool:
        """Return whether the prompt shows that the reasoning has ended or is left out."""
        return continued is not None or prompt.rstrip().endswith(row.end) or _has_begun(row, prompt)

    def _check_tools(self, tools: Sequence[Tool], choice: ToolChoice) -> ToolFormat | None:
        """Return the format of the expected calls; None if there can be no calls. Raise RequestError."""
        if choice.mode == "none" or not tools:
            return None
        if not self.template_takes_tools:
            raise RequestError(
                "tools is not supported: this model's chat template does not use them. Start "
                "the server with --chat-template FILE to give it one that does",
                param="tools",
                code="unsupported_parameter",
            )
        if self.tools is None:
            raise RequestError(
                "tools is not supported: how this model writes its calls is not known. Start "
                f"the server with --tool-parser and one of {', '.join(NAMES)}",
                param="tools",
                code="unsupported_parameter",
            )
        return self.tools

    def _grammar(
        self,
        calls: ToolFormat | None,
        tools: Sequence[Tool],
        choice: ToolChoice,
        several: bool,
        grammar: Grammar | None,
        *,
        begun: bool,
    ) -> Grammar | None:
        """Return the grammar of the answer after its reasoning. ``begun``: the prompt ends inside the content."""
        token_of, row = self._tokenizer.added_id, self.reasoning
        around = ("", "") if row is None else row.around(begun=begun, calls=True)
        if grammar is not None and row is not None:
            grammar = framed(grammar, row.around(begun=begun, calls=False), token_of)
        if calls is None:
            return grammar
        offered = choice.among(tools)
        if choice.mode == "auto":
            if grammar is not None:
                free = calls_grammar(
                    calls, offered, several=several, token_of=token_of, field=grammar.field, around=around
                )
                return _either(free, grammar)
            if len(offered) < len(tools) or any(tool.strict for tool in offered):
                return strict_grammar(calls, offered, several=several, token_of=token_of, field="tools")
            return None
        self._content_grammar(choice, grammar)
        return calls_grammar(
            calls,
            offered,
            several=several and choice.mode == "required",
            token_of=token_of,
            field="tools",
            around=around,
        )


def _has_begun(row: ReasoningFormat, prompt: str) -> bool:
    """Return whether ``prompt`` ends where content begins."""
    return bool(row.frame) and prompt.rstrip().endswith(row.frame[0])


def _either(calls: Grammar, answer: Grammar) -> Grammar:
    """Return a grammar of an answer that matches ``answer`` or is calls."""
    inner = json.loads(answer.grammar)["grammars"]
    first = inner[0]["lark_grammar"].removeprefix(NO_FORCING)
    called = json.loads(calls.grammar)["grammars"][0]["lark_grammar"].removeprefix(NO_FORCING)
    grammars = [
        {"lark_grammar": f"{NO_FORCING}start: @calls | @structured"},
        {"name": "calls", "lark_grammar": called},
        {"name": "structured", "lark_grammar": first},
        *inner[1:],
    ]
    return Grammar(field=answer.field, grammar=json.dumps({"grammars": grammars}))
