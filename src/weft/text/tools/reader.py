"""Calls of tools told apart from the text around them, while both arrive in pieces.

    "I look it up. "  "<tool_" "call>\\n{\\"na" "me\\": ..."     pieces, cut anywhere
          |                |
       content        held back, then an envelope: a BodyReader takes over until the envelope ends

``eager`` gives a call out in parts as it comes, for streams. Without it a call is given out when it is
complete, and what turns out to be none is content, word for word. An eager stream cannot take back what it
has sent: of a call that breaks off, the part that was sent stays sent, and the rest is content. Either way no
character is lost but the markers of real calls and the whitespace around them.

With ``single`` the first call is the only one that is given out, as ``parallel_tool_calls: false`` asks.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.text.markers import first_marker, held_characters
from weft.text.tools.call_deltas import CallDelta
from weft.text.tools.call_parts import BodyReader, CallPart
from weft.text.tools.definitions import Tool
from weft.text.tools.formats import Body, Envelope, ToolFormat
from weft.text.tools.headed_calls import HeadedCalls
from weft.text.tools.json_calls import JsonCalls
from weft.text.tools.python_calls import PythonCalls
from weft.text.tools.xml_calls import XmlCalls


@dataclass(slots=True)
class Read:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallReader:
    """One per answer."""

    def __init__(self, row: ToolFormat, tools: Sequence[Tool], *, eager: bool, single: bool = False) -> None:
        self._row = row
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._eager = eager
        self._single = single
        self._text = ""
        """What came and is neither content nor in the body yet."""
        self._space = ""
        """Whitespace that came last: it is content when content follows, or stood before it."""
        self._after_call = False
        self._envelope: Envelope | None = None
        self._body: BodyReader | None = None
        self._begun = False
        """Something other than whitespace came."""
        self._pending: list[CallPart] = []
        self.call_count = 0
        """Calls that are complete."""
        self._index = -1

    def push(self, text: str) -> Read:
        read = Read()
        self._text += text
        while self._advance(read, last=False):
            pass
        return read

    def finish(self) -> Read:
        """The answer is over."""
        read = Read()
        while self._advance(read, last=True):
            pass
        if self._envelope is not None:  # an envelope that ended where it began
            self._give_back(read, self._envelope.open)
        content, self._text = self._text, ""
        self._show(read, content)
        if not self._after_call:
            read.content += self._space
        self._space = ""
        return read

    def _advance(self, read: Read, *, last: bool) -> bool:
        """One thing at a time: whether there may be more to do with the text at hand."""
        if self._envelope is None:
            return self._look_for_envelope(read)
        if self._body is None:
            return self._begin_body(read, last)
        return self._read_body(read, last)

    def _look_for_envelope(self, read: Read) -> bool:
        bare = self._text.lstrip()
        at_start = next((e for e in self._row.envelopes if not e.open), None)
        begins = bool(bare) and at_start is not None and bare[0] in dict(at_start.bodies)
        if begins and not self._begun:
            self._envelope, self._text, self._begun = at_start, bare, True
            return True
        self._begun = self._begun or bool(bare)
        match = first_marker(self._text, self._row.opens)
        if match is None:
            safe = len(self._text) - held_characters(self._text, self._row.opens)
            self._show(read, self._text[:safe])
            self._text = self._text[safe:]
            return False
        at, marker = match
        self._show(read, self._text[:at])
        self._envelope = next(envelope for envelope in self._row.envelopes if envelope.open == marker)
        self._text = self._text[at + len(marker):]
        return True

    def _begin_body(self, read: Read, last: bool) -> bool:
        envelope = self._envelope
        assert envelope is not None
        text = envelope.open + self._text if envelope.keeps_open else self._text
        bare = text.lstrip()
        if not bare:
            return False
        body = next((body for first, body in envelope.bodies if bare.startswith(first)), None)
        if body is None:
            self._give_back(read, envelope.open)
            return True
        self._body = self._reader(body, envelope.close)
        self._text = text
        return True

    def _reader(self, body: Body, close: str | None) -> BodyReader:
        if body == "json":
            return JsonCalls(close)
        if body == "xml":
            return XmlCalls(close, self._schemas)
        if body == "python":
            return PythonCalls(close)
        head = self._row.head
        assert head is not None
        return HeadedCalls(close, before=head.before, arguments=head.arguments, behind=head.behind)

    def _read_body(self, read: Read, last: bool) -> bool:
        body, envelope = self._body, self._envelope
        assert body is not None
        assert envelope is not None
        text, self._text = self._text, ""
        if not text and not last:
            return False
        for part in body.push(text, last=last):
            self._take(read, part)
        if body.broken:
            done = max(body.whole, body.emitted if self._eager else 0)
            self._text, self._body, self._envelope = body.text[done:], None, None
            self._pending.clear()
            if not done:  # the marker is content, and must not be taken for one again
                self._show(read, envelope.open)
                self._text = self._text[len(envelope.open) if envelope.keeps_open else 0:]
            return True
        if body.end is not None:
            self._text, self._body, self._envelope = body.text[body.end:], None, None
            if not body.call_count:  # "<tool_call></tool_call>"
                self._show(read, envelope.open + body.text[:body.end])
            return bool(self._text)
        return False

    def _give_back(self, read: Read, marker: str) -> None:
        self._envelope = None
        self._show(read, marker)

    def _show(self, read: Read, content: str) -> None:
        """Content, but for the whitespace at its end, which waits for what follows."""
        if not content:
            return
        self._begun = self._begun or bool(content.strip())
        bare = content.rstrip()
        if not bare:
            self._space += content
            return
        self._after_call = False
        read.content += self._space + bare
        self._space = content[len(bare):]

    def _take(self, read: Read, part: CallPart) -> None:
        if self._eager:
            self._give(read, part)
            return
        self._pending.append(part)
        if part.complete:
            for waiting in self._pending:
                self._give(read, waiting)
            self._pending.clear()

    def _give(self, read: Read, part: CallPart) -> None:
        self._space, self._after_call = "", True
        if part.name is not None:
            self._index += 1
        self.call_count += part.complete
        if self._single and self._index > 0:
            return
        delta = CallDelta(self._index, arguments=part.arguments)
        if part.name is not None:
            delta.name = part.name
            delta.call_id = part.call_id or self._row.new_id(uuid.uuid4().hex, part.name, self._index)
        if delta.name is not None or delta.arguments:
            read.calls.append(delta)
