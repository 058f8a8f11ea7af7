"""What an answer is made of in Responses: items, and the events that announce them.

    reasoning      output_item.added  content_part.added  reasoning_text.delta ...  reasoning_text.done
                   content_part.done  output_item.done
    message        output_item.added  content_part.added  output_text.delta ...  output_text.done
                   content_part.done  output_item.done
    function_call  output_item.added  function_call_arguments.delta ...  function_call_arguments.done
                   output_item.done
    custom_tool_call, the same with custom_tool_call_input

An item begins with the first piece of its kind and ends when another kind follows, or the answer ends. Every
delta of an item lies between its two brackets, and the deltas add up to the text of its ``done``.

A piece whose text is held back may still become a marker, so its logprobs wait. When content follows, the
last of them that cover its text belong to it; the others were of a marker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from weft.server.logprobs import ChatTokenLogprob
from weft.server.responses.items import item_id
from weft.server.turn import calls_of
from weft.text.dialect import Heard

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str = ""
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True):
    type: str = "message"
    id: str
    status: Status = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(msgspec.Struct, kw_only=True):
    """``summary`` is always empty: ``content`` has the reasoning itself."""

    type: str = "reasoning"
    id: str
    status: Status = "in_progress"
    summary: list[None] = []
    content: list[ReasoningText] = []


class OutputCall(msgspec.Struct, kw_only=True):
    type: str = "function_call"
    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class OutputCustomCall(msgspec.Struct, kw_only=True):
    type: str = "custom_tool_call"
    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    input: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class ItemEvent(msgspec.Struct, kw_only=True):
    """``response.output_item.added`` and ``.done``."""

    type: str
    sequence_number: int = 0
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, kw_only=True):
    """``response.content_part.added`` and ``.done``."""

    type: str
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(msgspec.Struct, kw_only=True):
    type: str = "response.output_text.delta"
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(msgspec.Struct, kw_only=True):
    type: str = "response.output_text.done"
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(msgspec.Struct, kw_only=True):
    type: str = "response.reasoning_text.delta"
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(msgspec.Struct, kw_only=True):
    type: str = "response.reasoning_text.done"
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(msgspec.Struct, kw_only=True):
    type: str = "response.function_call_arguments.delta"
    sequence_number: int = 0
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, kw_only=True):
    type: str = "response.function_call_arguments.done"
    sequence_number: int = 0
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDelta(msgspec.Struct, kw_only=True):
    type: str = "response.custom_tool_call_input.delta"
    sequence_number: int = 0
    item_id: str
    output_index: int
    delta: str


class InputDone(msgspec.Struct, kw_only=True):
    type: str = "response.custom_tool_call_input.done"
    sequence_number: int = 0
    item_id: str
    output_index: int
    input: str


OutputEvent = (ItemEvent | PartEvent | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta
               | ArgumentsDone | InputDelta | InputDone)


def whole_output(heard: Heard, status: Status, response_id: str) -> list[OutputItem]:
    """The items that an ``OutputWriter`` would have of ``heard``, the whole answer. ``status``: of the
    last item."""
    items: list[OutputItem] = []
    if heard.reasoning:
        items.append(OutputReasoning(id=item_id("reasoning", response_id, "o", 0), status="completed",
                                     content=[ReasoningText(text=heard.reasoning)]))
    if heard.content or not (items or heard.calls):
        items.append(OutputMessage(id=item_id("message", response_id, "o", len(items)), status="completed",
                                   content=[OutputText(text=heard.content)]))
    for call in calls_of(heard.calls):
        item = _call_item(call.call_id, call.name, response_id, len(items), is_custom=call.is_custom)
        item.status = "completed"
        if isinstance(item, OutputCustomCall):
            item.input = call.arguments
        else:
            item.arguments = call.arguments
        items.append(item)
    items[-1].status = status
    return items


class OutputWriter:
    """``items``: the output so far; those that are complete have their whole text."""

    def __init__(self, response_id: str) -> None:
        self.items: list[OutputItem] = []
        self._response_id = response_id
        self._open: OutputItem | None = None
        self._parts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._undecided: list[ChatTokenLogprob] = []

    def write(self, heard: Heard, logprobs: list[ChatTokenLogprob]) -> Iterator[OutputEvent]:
        """The events of one piece of the answer."""
        self._undecided += logprobs
        if heard.reasoning:
            if not isinstance(self._open, OutputReasoning):
                yield from self._begin(OutputReasoning(id=self._next_id("reasoning")))
            self._undecided = []
            self._parts.append(heard.reasoning)
            yield ReasoningDelta(item_id=self._id, output_index=self._index, delta=heard.reasoning)
        if heard.content:
            if not isinstance(self._open, OutputMessage):
                yield from self._begin(OutputMessage(id=self._next_id("message")))
            decided, self._undecided = _covering(self._undecided, heard.content), []
            self._parts.append(heard.content)
            self._logprobs += decided
            yield TextDelta(item_id=self._id, output_index=self._index, delta=heard.content, logprobs=decided)
        for call in heard.calls:
            if call.name is not None and call.call_id is not None:
                yield from self._begin(_call_item(call.call_id, call.name, self._response_id,
                                                  len(self.items), is_custom=call.is_custom))
            self._undecided = []
            if call.arguments:
                self._parts.append(call.arguments)
                delta = InputDelta if call.is_custom else ArgumentsDelta
                yield delta(item_id=self._id, output_index=self._index, delta=call.arguments)

    def end(self, status: Status) -> Iterator[OutputEvent]:
        """The answer is over. ``status`` of the item that is open; an empty answer is an empty message."""
        if not self.items:
            yield from self._begin(OutputMessage(id=self._next_id("message")))
        yield from self._close(status)

    @property
    def _id(self) -> str:
        assert self._open is not None
        return self._open.id

    def _next_id(self, kind: str) -> str:
        return item_id(kind, self._response_id, "o", len(self.items))

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _begin(self, item: OutputItem) -> Iterator[OutputEvent]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item)
        self._parts, self._logprobs = [], []
        yield ItemEvent(type="response.output_item.added", output_index=self._index, item=item)
        if not isinstance(item, OutputCall | OutputCustomCall):
            part = OutputText() if isinstance(item, OutputMessage) else ReasoningText()
            yield PartEvent(type="response.content_part.added", item_id=item.id, output_index=self._index,
                            part=part)

    def _close(self, status: Status) -> Iterator[OutputEvent]:
        item, text, at = self._open, "".join(self._parts), self._index
        if item is None:
            return
        self._open, item.status = None, status
        part: OutputText | ReasoningText
        if isinstance(item, OutputCall):
            item.arguments = text
            yield ArgumentsDone(item_id=item.id, output_index=at, name=item.name, arguments=text)
        elif isinstance(item, OutputCustomCall):
            item.input = text
            yield InputDone(item_id=item.id, output_index=at, input=text)
        elif isinstance(item, OutputMessage):
            part = OutputText(text=text, logprobs=self._logprobs)
            item.content = [part]
            yield TextDone(item_id=item.id, output_index=at, text=text, logprobs=self._logprobs)
            yield PartEvent(type="response.content_part.done", item_id=item.id, output_index=at, part=part)
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            yield ReasoningDone(item_id=item.id, output_index=at, text=text)
            yield PartEvent(type="response.content_part.done", item_id=item.id, output_index=at, part=part)
        yield ItemEvent(type="response.output_item.done", output_index=at, item=item)


def _call_item(call_id: str, name: str, response_id: str, at: int, *, is_custom: bool
               ) -> OutputCall | OutputCustomCall:
    if is_custom:
        return OutputCustomCall(id=item_id("custom_tool_call", response_id, "o", at), call_id=call_id,
                                name=name)
    return OutputCall(id=item_id("function_call", response_id, "o", at), call_id=call_id, name=name)


def _covering(logprobs: list[ChatTokenLogprob], text: str) -> list[ChatTokenLogprob]:
    """The last of ``logprobs`` whose tokens have at least the bytes of ``text``."""
    missing, first = len(text.encode(errors="replace")), len(logprobs)
    while missing > 0 and first > 0:
        first -= 1
        missing -= len(logprobs[first].bytes)
    return logprobs[first:]
