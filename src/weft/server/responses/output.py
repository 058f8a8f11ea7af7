"""What an answer is made of in Responses: the blocks of ``weft.text.blocks`` as items, and their events.

    reasoning      output_item.added  content_part.added  reasoning_text.delta ...  reasoning_text.done
                   content_part.done  output_item.done
    message        output_item.added  content_part.added  output_text.delta ...  output_text.done
                   content_part.done  output_item.done
    function_call  output_item.added  function_call_arguments.delta ...  function_call_arguments.done
                   output_item.done
    custom_tool_call, the same with custom_tool_call_input

An answer without blocks is an empty message.

A piece whose text is held back may still become a marker, so its logprobs wait. When content follows, the
last of them that cover its text belong to it; the others were of a marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from weft.server.logprobs import ChatTokenLogprob
from weft.server.responses.items import Item, item_id
from weft.text.blocks import AnswerBlock, BlockEvent, BlockKind

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a kind of block: its item, its events, the field with its text, and the part that has that field."""

    item: str
    events: str
    field: str
    part: str | None = None


_NAMES: dict[BlockKind, _Names] = {
    "reasoning": _Names("reasoning", "response.reasoning_text", "text", "reasoning_text"),
    "text": _Names("message", "response.output_text", "text", "output_text"),
    "call": _Names("function_call", "response.function_call_arguments", "arguments"),
    "custom_call": _Names("custom_tool_call", "response.custom_tool_call_input", "input")}


class OutputWriter:
    """``items``: the output so far; those that are complete have their whole text."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._logprobs: list[ChatTokenLogprob] = []
        self._undecided: list[ChatTokenLogprob] = []

    def write(self, events: Iterable[BlockEvent], logprobs: list[ChatTokenLogprob]) -> Iterator[Item]:
        """The events of one piece of the answer, without their ``sequence_number``."""
        self._undecided += logprobs
        for event in events:
            block, names = event.block, _NAMES[event.block.kind]
            if event.phase == "start":
                yield from self._start(block)
            elif event.phase == "stop":
                yield from self._stop(block)
            else:
                decided, self._undecided = self._undecided, []
                more: Item = {}
                if block.kind == "text":
                    more["logprobs"] = _covering(decided, event.delta)
                    self._logprobs += more["logprobs"]
                yield {"type": f"{names.events}.delta", **self._place(block), "delta": event.delta, **more}

    def empty_message(self, *, is_cut: bool) -> Iterator[Item]:
        """The output of an answer without blocks."""
        block = AnswerBlock("text", 0, is_complete=not is_cut)
        yield from self._start(block)
        yield from self._stop(block)

    def _start(self, block: AnswerBlock) -> Iterator[Item]:
        self._logprobs = []
        self.items.append(self._item(block, "in_progress"))
        yield {"type": "response.output_item.added", "output_index": block.index, "item": self.items[-1]}
        if _NAMES[block.kind].part:
            yield {"type": "response.content_part.added", **self._place(block), "part": _part(block, "", [])}

    def _stop(self, block: AnswerBlock) -> Iterator[Item]:
        names, place, logprobs = _NAMES[block.kind], self._place(block), self._logprobs
        self.items[-1] = item = self._item(block, "completed" if block.is_complete else "incomplete")
        name = {"name": block.name} if block.kind == "call" else {}
        yield {"type": f"{names.events}.done", **place, **name, names.field: block.text,
               **({"logprobs": logprobs} if block.kind == "text" else {})}
        if names.part:
            yield {"type": "response.content_part.done", **place, "part": _part(block, block.text, logprobs)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _place(self, block: AnswerBlock) -> Item:
        part = {"content_index": 0} if _NAMES[block.kind].part else {}
        return {"item_id": self.items[-1]["id"], "output_index": block.index, **part}

    def _item(self, block: AnswerBlock, status: Status) -> Item:
        names, text = _NAMES[block.kind], "" if status == "in_progress" else block.text
        item: Item = {"type": names.item, "id": item_id(names.item, self._response_id, "o", block.index),
                      "status": status}
        if block.is_call:
            return {**item, "call_id": block.call_id, "name": block.name, names.field: text}
        content = [] if status == "in_progress" else [_part(block, text, self._logprobs)]
        return {**item, **({"role": "assistant"} if block.kind == "text" else {"summary": []}),
                "content": content}


def _part(block: AnswerBlock, text: str, logprobs: list[ChatTokenLogprob]) -> Item:
    of_text = {"annotations": [], "logprobs": logprobs} if block.kind == "text" else {}
    return {"type": _NAMES[block.kind].part, "text": text, **of_text}


def _covering(logprobs: list[ChatTokenLogprob], text: str) -> list[ChatTokenLogprob]:
    """The last of ``logprobs`` whose tokens have at least the bytes of ``text``."""
    missing, first = len(text.encode(errors="replace")), len(logprobs)
    while missing > 0 and first > 0:
        first -= 1
        missing -= len(logprobs[first].bytes)
    return logprobs[first:]
