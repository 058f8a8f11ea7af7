"""Calls written as a name, a marker, and the arguments as a JSON object: Mistral and Kimi.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>

Kimi's head is the id of the call; the name is what stands between its prefix and its number.
"""

from __future__ import annotations

import json
import re

from weft.text.stop_strings import may_become
from weft.text.tools.body_reader import BodyReader, CallDelta
from weft.text.tools.json_calls import ObjectScanner

_NUMBERED = re.compile(r"(?:functions\.)?(.+):\d+")
_HEAD_CHARS_MAX = 256


class HeadedCalls(BodyReader):
    """``before`` and ``behind`` stand around each call, ``arguments`` between its name and its arguments;
    ``before`` may be empty, and ``behind`` may."""

    def __init__(self, close: str | None, *, before: str, arguments: str, behind: str) -> None:
        super().__init__(close)
        self._before, self._marker, self._behind = before, arguments, behind
        self._at = 0
        self._object: ObjectScanner | None = None
        self._given = 0

    def _read(self, last: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.end is None and not self.broken:
            if not (self._head(deltas, last) if self._object is None else self._arguments(deltas)):
                break
        return deltas

    def _head(self, deltas: list[CallDelta], last: bool) -> bool:
        """Whether it got anywhere."""
        while self._at < len(self.text) and self.text[self._at].isspace():
            self._at += 1
        rest = self.text[self._at:]
        if self.close is not None and rest.startswith(self.close):
            self.end = self._at + len(self.close)
            return True
        if self.call_count and (self.close is None or (last and not rest)):
            self.end = self.whole
            return True
        waits_for = [marker for marker in (self.close, self._before) if marker]
        if not last and (not rest or may_become(rest, waits_for)):
            return False
        if not rest.startswith(self._before):
            self.broken = True
            return True
        head, marker, behind = rest[len(self._before):].partition(self._marker)
        if not marker or not behind.lstrip():
            self.broken = self.broken or len(head) > _HEAD_CHARS_MAX + len(self._marker)
            return False
        start = self._at + len(rest) - len(behind.lstrip())
        if self.text[start] != "{" or not head.strip():
            self.broken = True
            return True
        head = head.strip()
        numbered = _NUMBERED.fullmatch(head)
        deltas.append(CallDelta(name=head) if numbered is None
                     else CallDelta(name=numbered.group(1), call_id=head))
        self._object = ObjectScanner(start)
        self._object.copy(start)
        self._given = 0
        return True

    def _arguments(self, deltas: list[CallDelta]) -> bool:
        scanner = self._object
        assert scanner is not None
        scanner.scan(self.text)
        fresh = "".join(scanner.escaped[self._given:])
        if fresh:
            deltas.append(CallDelta(arguments=fresh))
            self._given, self.emitted = len(scanner.escaped), scanner.at
        if scanner.end is None:
            return False
        try:
            json.loads(self.text[scanner.start:scanner.end], strict=False)
        except (ValueError, RecursionError):
            self.broken = True
            return True
        rest = self.text[scanner.end:].lstrip()
        if self._behind and not rest.startswith(self._behind):
            if not may_become(rest, (self._behind,)):
                self.broken = True
            return self.broken
        deltas.append(CallDelta(complete=True))
        self._at = len(self.text) - len(rest) + len(self._behind)
        if not self._behind:
            self._at = scanner.end
        self._object = None
        self._completed(self._at)
        return True
