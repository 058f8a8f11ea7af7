"""Separation of tool calls from the text around them, while both arrive in pieces.

    "I look it up. "  "<tool_" "call> {'na" "me': ..."          pieces, cut anywhere
          |                |
       content        held back, then an envelope: a BodyReader takes over until the envelope ends

    <think> I look it up. <tool_call>{"name": "get_time", ...}</tool_call>            a call
    <think> I look it up. <tool_call>{...}</tool_call></think>                        a call
    <think> Perhaps <tool_call>{...}</tool_call>? No. </think> It is noon.            reasoning, word for word

A call is emitted when it is complete, and text that turns out not to be a call is content, unchanged. A stream cannot
take back text, so it has the blocks of a complete answer, with one exception: with ``eager``, a call with more than
HELD_CHARS characters of arguments is emitted from its beginning on, as it comes. If such a call breaks off, the sent
part remains, and the rest is content. Under a grammar (``is_sure``) no call breaks off, and each is emitted as it
comes. Only the markers of real calls and the whitespace around them are dropped. Repeated markers, and surplus markers
after a call, are skipped. With ``single`` only the first call is emitted, as ``parallel_tool_calls: false`` requests.

``LastCalls``: a model that wants a call ends its turn after the call, even if it forgot to close the reasoning; a model
that only considers a call goes on writing. So a call in the reasoning counts only if nothing but other calls and
whitespace follows. Until then the text is held back; as soon as anything else follows, it is reasoning.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

from weft.text.choices import first_marker, held_characters, may_become
from weft.text.tools.brace_calls import BraceCalls
from weft.text.tools.definitions import Tool
from weft.text.tools.formats import Body, Envelope, ToolFormat
from weft.text.tools.json_calls import HELD_CHARS, BodyReader, CallDelta, CallGate, HeadedCalls, JsonCalls
from weft.text.tools.nested_calls import NestedCalls
from weft.text.tools.python_calls import PythonCalls
from weft.text.tools.tag_calls import TagCalls
from weft.text.tools.values import Parameters


class ToolCallReader:
    """A reader of one answer. It emits content (text) and deltas of calls, in the order of the answer."""

    def __init__(
        self, row: ToolFormat, tools: Sequence[Tool], *, eager: bool, single: bool = False, is_sure: bool = False
    ) -> None:
        self._row = row
        self._names = tuple(tool.name for tool in tools)
        self._parameters = Parameters({tool.name: tool.parameters for tool in tools})
        self._gate = CallGate(math.inf if not eager else -1 if is_sure else HELD_CHARS)
        self._single = single
        self._text = ""
        """Text that is not yet assigned to content or to a body."""
        self._space = ""
        """Trailing whitespace: it is content if content comes before or after it."""
        self._after_call = False
        self._envelope: Envelope | None = None
        self._opening = ""
        """The text that opened the envelope; it is content if no call follows."""
        self._is_cut = False
        self._ends: tuple[str, ...] = ()
        """Markers that are skipped after the last call."""
        self._body: BodyReader | None = None
        self._begun = False
        """Whether text other than whitespace has come."""
        self._parsed: list[str | CallDelta] = []
        self._index = -1

    def push(self, text: str) -> list[str | CallDelta]:
        self._text += text
        while self._advance(last=False):
            pass
        parsed, self._parsed = self._parsed, []
        return parsed

    def finish(self, *, is_cut: bool = False) -> list[str | CallDelta]:
        """End the answer. ``is_cut``: whether a limit of tokens ended it."""
        self._is_cut = is_cut
        while self._advance(last=True):
            pass
        if self._envelope is not None:  # an empty envelope
            self._give_back(self._opening)
        content, self._text = self._text, ""
        if not (is_cut and self._ends and may_become(content.lstrip(), self._ends)):  # a cut end marker
            self._show(content)
        if self._space and not self._after_call:
            self._parsed.append(self._space)
        self._space = ""
        return self._parsed

    def _advance(self, *, last: bool) -> bool:
        """Process one part of the text, and return whether there may be more to do with the rest."""
        if self._envelope is None:
            return self._look_for_envelope()
        if self._body is None:
            return self._begin_body(last)
        return self._read_body(last)

    def _look_for_envelope(self) -> bool:
        bare = self._text.lstrip()
        at_start = next((e for e in self._row.envelopes if not e.open), None)
        if bare and not self._begun and at_start and bare.startswith(tuple(first for first, _ in at_start.bodies)):
            before = self._text[: len(self._text) - len(bare)]
            self._envelope, self._opening, self._text, self._begun = at_start, before, bare, True
            return True
        if self._ends and bare.startswith(self._ends):
            self._text = bare[len(next(end for end in self._ends if bare.startswith(end))) :]
            return True
        self._begun = self._begun or bool(bare)
        match = first_marker(self._text, self._row.opens)
        if match is None:
            if self._ends and may_become(bare, self._ends):
                return False
            safe = len(self._text) - held_characters(self._text, self._row.opens)
            self._show(self._text[:safe])
            self._text = self._text[safe:]
            return False
        position, marker = match
        self._show(self._text[:position])
        self._envelope = next(envelope for envelope in self._row.envelopes if envelope.open == marker)
        self._opening, self._text = marker, self._text[position + len(marker) :]
        return True

    def _begin_body(self, last: bool) -> bool:
        envelope = self._envelope
        assert envelope is not None
        text = envelope.open + self._text if envelope.keeps_open else self._text
        bare = text.lstrip()
        if not bare:
            return False
        if envelope.close and bare.startswith(envelope.open):
            twice = len(text) - len(bare) + len(envelope.open)
            self._opening, self._text = self._opening + text[:twice], text[twice:]
            return True
        if envelope.close and may_become(bare, (envelope.open,)) and not last:
            return False
        body = next((body for first, body in envelope.bodies if bare.startswith(first)), None)
        if body is None:
            self._give_back(self._opening)
            return True
        self._body = self._reader(body, envelope.close)
        self._text = text
        return True

    def _reader(self, body: Body, close: str | None) -> BodyReader:
        if body == "json":
            return JsonCalls(close, keyed=not self._row.writes.key)
        if body in ("xml", "nested"):
            reader = TagCalls if body == "xml" else NestedCalls
            return reader(close, self._row.opens, self._parameters, self._row.tags)
        if body == "python":
            return PythonCalls(close)
        if body == "braces":
            return BraceCalls(close or "", self._row.quote, self._parameters)
        head = self._row.head
        assert head is not None
        arguments, behind = head.arguments.strip() or head.arguments, head.behind.strip()  # any whitespace may follow
        return HeadedCalls(
            close,
            before=head.before,
            arguments=arguments,
            behind=behind,
            numbered=head.numbered,
            names=self._names if head.offered else None,
        )

    def _read_body(self, last: bool) -> bool:
        body, envelope = self._body, self._envelope
        assert body is not None
        assert envelope is not None
        text, self._text = self._text, ""
        if not text and not last:
            return False
        for delta in body.push(text, last=last, is_cut=self._is_cut):
            if delta.instead and self._gate.is_open:  # the sent arguments differ
                body.broken = True
                break
            self._take(delta)
        if body.broken:
            done = max(body.whole, body.emitted if self._gate.is_open else 0)
            self._text, self._body, self._envelope = body.text[done:], None, None
            self._gate.drop()
            if not done:  # the marker is content and must not be matched again
                self._show(self._opening)
                self._text = self._text[len(envelope.open) if envelope.keeps_open else 0 :]
            return True
        if body.end is not None:
            self._text, self._body, self._envelope = body.text[body.end :], None, None
            if not body.call_count:  # "<tool_call></tool_call>"
                self._show(self._opening + body.text[: body.end])
            return bool(self._text)
        return False

    def _give_back(self, marker: str) -> None:
        self._envelope = None
        self._show(marker)

    def _show(self, content: str) -> None:
        """Emit content. Whitespace at its end waits for the next text."""
        if not content:
            return
        self._begun = self._begun or bool(content.strip())
        bare = content.rstrip()
        if not bare:
            self._space += content
            return
        self._after_call, self._ends = False, ()
        self._parsed.append(self._space + bare)
        self._space = content[len(bare) :]

    def _take(self, delta: CallDelta) -> None:
        ready = self._gate.push(delta)
        if ready is None:
            return
        self._space, self._after_call, self._ends = "", True, self._row.ends
        if ready.name is not None:
            self._index += 1
            ready.name = self._parameters.offered(ready.name)
            ready.call_id = ready.call_id or self._row.new_id(uuid.uuid4().hex, ready.name, self._index)
        if not (self._single and self._index > 0):
            ready.index = self._index
            self._parsed.append(ready)


_SPACE_CHARS_MAX = 64
"""Most characters of whitespace before the beginning of a call."""


class LastCalls:
    """Calls at the end of the reasoning of one answer with tools. ``pending``: text that may be calls, and whitespace
    before it."""

    def __init__(self, row: ToolFormat, reader: ToolCallReader) -> None:
        self._opens = row.opens
        self._envelopes = {envelope.open: envelope for envelope in row.envelopes}
        self._reader = reader
        self._looked_at: int | None = None
        """Index in ``pending`` at which the last envelope opens."""
        self.pending = ""

    def push(self, reasoning: str) -> str:
        """Return the part of the reasoning that certainly does not end with a call."""
        if not reasoning:
            return ""
        self.pending += reasoning
        shown = []
        while (length := self._sure()) > 0:
            shown.append(self.pending[:length])
            self.pending, self._looked_at = self.pending[length:], None
        return "".join(shown)

    def release(self) -> str:
        """Return the pending text as reasoning, because other text followed."""
        text, self.pending = self.pending, ""
        return text

    def calls(self, *, is_cut: bool = False) -> list[str | CallDelta]:
        """End the answer, and return the calls in ``pending``; empty if it has anything but calls."""
        parsed = [*self._reader.push(self.pending.strip()), *self._reader.finish(is_cut=is_cut)]
        return [] if any(isinstance(part, str) for part in parsed) else parsed

    def _sure(self) -> int:
        """Return the number of characters of ``pending`` that are reasoning, whatever follows."""
        pending = self.pending
        if self._looked_at is None:
            match = first_marker(pending, self._opens)
            if match is None:
                return len(pending[: len(pending) - held_characters(pending, self._opens)].rstrip())
            self._looked_at = match[0]
            if before := len(pending[: match[0]].rstrip()):
                return before
        while True:
            open = max((opening for opening in self._opens if pending.startswith(opening, self._looked_at)), key=len)
            envelope, inside = self._envelopes[open], self._looked_at + len(open)
            body = pending[inside - len(open) * envelope.keeps_open : inside + _SPACE_CHARS_MAX].lstrip()
            firsts = (open, *(first for first, _ in envelope.bodies))
            if body and not body.startswith(firsts) and not may_become(body, (open,)):
                return inside  # a marker that the model only mentions
            end = -1 if envelope.close is None else pending.find(envelope.close, inside)
            if envelope.close is None or end < 0:
                return 0
            behind = pending[end:]
            while behind.startswith(envelope.close):  # some models write it twice
                behind = behind[len(envelope.close) :].lstrip()
            if not behind or may_become(behind, (*self._opens, envelope.close)):
                return 0
            self._looked_at = len(pending) - len(behind)
            if not behind.startswith(self._opens):
                return self._looked_at
