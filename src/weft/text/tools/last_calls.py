"""Calls at the end of a reasoning that the model forgot to close.

    <think> I look it up. <tool_call>{"name": "get_time", ...}</tool_call>            a call
    <think> I look it up. <tool_call>{...}</tool_call></think>                        a call
    <think> Perhaps <tool_call>{...}</tool_call>? No. </think> It is noon.            reasoning, word for word

A model that means a call ends its turn behind it, closed or not. A model that only considers one goes on. So
a call in a reasoning counts where nothing follows but other calls and whitespace. Until that is sure the text
of such calls is held back, from their first marker on; as soon as anything else follows it is reasoning.

Rejected: a call ends the reasoning (a call that was only considered would be run); the text of a call as
reasoning and as a call (markers in the reasoning, and the next prompt would have the call twice).
"""

from __future__ import annotations

from weft.text.stop_strings import first_marker, held_characters, may_become
from weft.text.tools.body_reader import CallDelta
from weft.text.tools.formats import ToolFormat
from weft.text.tools.reader import ToolCallReader

_SPACE_CHARS_MAX = 64
"""So much whitespace is looked through for the beginning of a call."""


class LastCalls:
    """One per answer with reasoning and tools. ``held``: text that may be calls, and whitespace before it."""

    def __init__(self, row: ToolFormat, reader: ToolCallReader) -> None:
        self._opens = row.opens
        self._envelopes = {envelope.open: envelope for envelope in row.envelopes}
        self._reader = reader
        self._looked_at: int | None = None
        """Where the last envelope in ``held`` opens."""
        self.held = ""

    def push(self, reasoning: str) -> str:
        """The reasoning that is sure to be no call at its end."""
        if not reasoning:
            return ""
        self.held += reasoning
        shown = []
        while (length := self._sure()) > 0:
            shown.append(self.held[:length])
            self.held, self._looked_at = self.held[length:], None
        return "".join(shown)

    def release(self) -> str:
        """Something followed: what was held is reasoning."""
        held, self.held = self.held, ""
        return held

    def calls(self) -> list[str | CallDelta]:
        """The answer is over: the calls in ``held``, empty if it is anything else than calls."""
        parsed = [*self._reader.push(self.held.strip()), *self._reader.finish()]
        return [] if any(isinstance(part, str) for part in parsed) else parsed

    def _sure(self) -> int:
        """How much of ``held`` is reasoning, whatever follows."""
        held = self.held
        if self._looked_at is None:
            match = first_marker(held, self._opens)
            if match is None:
                return len(held[:len(held) - held_characters(held, self._opens)].rstrip())
            self._looked_at = match[0]
            if before := len(held[:match[0]].rstrip()):
                return before
        while True:
            open = max((one for one in self._opens if held.startswith(one, self._looked_at)), key=len)
            envelope, inside = self._envelopes[open], self._looked_at + len(open)
            body = held[inside - len(open) * envelope.keeps_open:inside + _SPACE_CHARS_MAX].lstrip()
            firsts = (open, *(first for first, _ in envelope.bodies))
            if body and not body.startswith(firsts) and not may_become(body, (open,)):
                return inside  # a marker that the model only mentions
            end = -1 if envelope.close is None else held.find(envelope.close, inside)
            if envelope.close is None or end < 0:
                return 0
            behind = held[end:]
            while behind.startswith(envelope.close):  # some models write it twice
                behind = behind[len(envelope.close):].lstrip()
            if not behind or may_become(behind, (*self._opens, envelope.close)):
                return 0
            self._looked_at = len(held) - len(behind)
            if not behind.startswith(self._opens):
                return self._looked_at
