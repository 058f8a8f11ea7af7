"""An answer as a stream of blocks: stretches of reasoning, of text, and calls of tools.

    start(reasoning)   delta "hm"   delta " so"            stop
    start(text)        delta "I look."                     stop
    start(call)        delta '{"city": '  delta '"Rome"}'  stop

A block begins with the first piece of its kind and ends when another one begins, or with the answer. All APIs
are written from these events, and a whole answer is the blocks of the same events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from weft.text.tools.json_calls import CallDelta

BlockKind = Literal["reasoning", "text", "call", "custom_call"]


@dataclass(slots=True, eq=False)
class AnswerBlock:
    """``index`` numbers the blocks of an answer, ``call_index`` its calls. ``is_complete`` is set when the
    block stops: an answer that was cut may have half a text, or half of the arguments of a call."""

    kind: BlockKind
    index: int
    call_index: int = -1
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """So far. Of a function call: its arguments as JSON text; of a custom call: the text for the tool."""
        return "".join(self.parts)

    @property
    def is_call(self) -> bool:
        return self.call_index >= 0


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """``block`` may be further than its event: at its start it may have text already."""

    phase: Literal["start", "delta", "stop"]
    block: AnswerBlock
    delta: str = ""


class BlockWriter:
    """One per answer. ``blocks``: all so far; ``take`` gives each event out once."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.call_count = 0
        """Complete calls."""
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
        """``is_cut``: the answer reached its limit of tokens in this block."""
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


def text_of(blocks: Iterable[AnswerBlock], kind: BlockKind) -> str:
    """Of all blocks of this kind."""
    return "".join(block.text for block in blocks if block.kind == kind)
