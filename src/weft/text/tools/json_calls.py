"""What readers of calls give out, and calls whose arguments are JSON: objects, lists, and objects behind a
name.

    CallDelta(name="get_time")                     a call begins
    CallDelta(arguments='{"zone": ')               more of its arguments, JSON text
    CallDelta(arguments='"UTC"}', complete=True)   it is whole

    {"name": "f", "arguments": {"x": 1}}            also "parameters"; also inside {"function": {...}}
    [{"name": "f", "arguments": {...}}, ...]        also {...}; {...}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                                                 Mistral
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>

A reader takes the text between the markers of one envelope. It keeps all of that text and counts how much of
it has become calls. Text that turns out to be no call is shown as content, so no character is lost.

Where an object begins with its name and its arguments, as nearly all do, the arguments are given out while
they come: the text of the value itself, with line ends inside strings escaped, as models forget to. Any other
order of the keys is read when the object is complete. An object that is no call is broken; one that lacks its
last brace alone, behind whole arguments and before the envelope's end, is a call. Kimi's head is the
id of the call; the name is what stands between its prefix and its number.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from weft.text.choices import may_become


@dataclass(slots=True)
class CallDelta:
    """What a call gained. ``name`` is set on its first delta, ``complete`` on its last. ``call_id`` comes
    with the name: the model's own where its family writes ids. ``index`` numbers the calls of an answer.
    With ``is_custom``, ``arguments`` is the text of a custom tool."""

    index: int = -1
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_custom: bool = False
    complete: bool = False


class BodyReader(ABC):
    """``close`` is the marker that ends the envelope, or None where the calls end by themselves.

    ``whole``: how many characters have become complete calls. ``emitted``: how many have been given out
    in deltas. ``end``: where the envelope ended, once it has. ``broken``: what comes is not a call.
    """

    def __init__(self, close: str | None) -> None:
        self.close = close
        self.text = ""
        self.whole = 0
        self.emitted = 0
        self.end: int | None = None
        self.broken = False
        self.call_count = 0

    def push(self, text: str, *, last: bool = False) -> list[CallDelta]:
        """``last``: nothing will follow. After it, ``end`` is set or ``broken`` is."""
        self.text += text
        deltas = self._read(last)
        if last and self.end is None:
            self.broken = True
        return deltas

    @abstractmethod
    def _read(self, last: bool) -> list[CallDelta]:
        """Go on where the last call stopped."""

    def _completed(self, at: int) -> None:
        self.call_count += 1
        self.whole = self.emitted = at


_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ARGUMENTS = ("arguments", "parameters")


class ObjectScanner:
    """Follows the JSON object that begins at ``start`` of a growing text to its end: brackets and strings,
    nothing else. ``escaped`` is what was scanned from ``copy_from`` on, with control characters in strings
    escaped."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.at = start
        self.end: int | None = None
        self.escaped: list[str] = []
        self.copy_from: int | None = None
        self.copy_end: int | None = None
        self._depth = 0
        self._copy_depth = 0
        self._in_string = False
        self._after_backslash = False

    def scan(self, text: str, until: int | None = None) -> None:
        """Up to ``until``, the end of ``text``, or of the object."""
        until = len(text) if until is None else until
        while self.at < until and self.end is None:
            character = text[self.at]
            if self.copy_from is not None and self.copy_end is None:
                raw = self._in_string and character < " "
                self.escaped.append(json.dumps(character)[1:-1] if raw else character)
            self._step(character)
            self.at += 1
            if self._depth == 0:
                self.end = self.at
            if self.copy_from is not None and self._depth == self._copy_depth and self.copy_end is None:
                self.copy_end = self.at

    def copy(self, start: int) -> None:
        """From here on what is scanned is kept: the value that begins at ``start``, where the scan stands."""
        assert self.at == start
        self.copy_from, self._copy_depth = start, self._depth

    def _step(self, character: str) -> None:
        if self._in_string:
            if self._after_backslash:
                self._after_backslash = False
            elif character == "\\":
                self._after_backslash = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


class JsonCalls(BodyReader):
    """See the module."""

    def __init__(self, close: str | None) -> None:
        super().__init__(close)
        self._at = 0
        self._object: ObjectScanner | None = None
        self._name: str | None = None
        self._given = 0
        self._list: bool | None = None
        """True inside a list, False behind it, None where there was none."""

    def _read(self, last: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.end is None and not self.broken:
            if self._object is not None:
                if not self._read_object(deltas):
                    break
            elif not self._read_between(last):
                break
        return deltas

    def _read_between(self, last: bool) -> bool:
        """Whether it got anywhere."""
        text = self.text
        separators = " \n\t\r,;" if self.call_count else " \n\t\r"
        while self._at < len(text) and text[self._at] in separators:
            self._at += 1
        rest = text[self._at :]
        if self.close is not None and rest.startswith(self.close):
            self.end = self._at + len(self.close)
        elif not rest or (self.close is not None and may_become(rest, (self.close,)) and not last):
            if last and self.call_count and self._list is not True:
                self.end = self.whole
            return False
        elif rest[0] == "{" and self._list is not False:
            self._object = ObjectScanner(self._at)
        elif rest[0] == "[" and self._list is None and not self.call_count:
            self._list = True
            self._at += 1
        elif rest[0] == "]" and self._list:
            self._list = False
            self._at += 1
            self.whole = self.emitted = self._at
            if self.close is None:
                self.end = self._at
        elif self.call_count and not self._list:
            self.end = self.whole
        else:
            self.broken = True
        return True

    def _read_object(self, deltas: list[CallDelta]) -> bool:
        scanner = self._object
        assert scanner is not None
        if self._name is None and scanner.copy_from is None:
            header = _HEADER.match(self.text, scanner.start)
            if header is not None and header.end() < len(self.text):
                scanner = self._object = ObjectScanner(scanner.start)
                scanner.scan(self.text, header.end())
                scanner.copy(header.end())
                self._name = json.loads(header.group(1), strict=False)
                deltas.append(CallDelta(name=self._name))
                self._given = 0
        scanner.scan(self.text)
        if scanner.copy_from is not None:
            self._give_copied(scanner, deltas)
        if self._lacks_only_its_end(scanner):
            deltas.append(CallDelta(complete=True))
            return self._object_ended(scanner.copy_end)
        if scanner.end is None:
            return False
        call = read_call(self.text[scanner.start : scanner.end])
        if call is None:
            self.broken = True
            return True
        if self._name is None:
            deltas.append(CallDelta(name=call[0], arguments=call[1], complete=True))
        else:
            deltas.append(CallDelta(complete=True))
        return self._object_ended(scanner.end)

    def _object_ended(self, at: int | None) -> bool:
        assert at is not None
        self._at = at
        self._object, self._name = None, None
        self._completed(at)
        return True

    def _lacks_only_its_end(self, scanner: ObjectScanner) -> bool:
        """Whether the envelope closes right behind the arguments: small models forget the last brace."""
        if self.close is None or scanner.copy_end is None:
            return False
        return self.text[scanner.copy_end :].lstrip().startswith(self.close)

    def _give_copied(self, scanner: ObjectScanner, deltas: list[CallDelta]) -> None:
        fresh = "".join(scanner.escaped[self._given :])
        if fresh:
            deltas.append(CallDelta(arguments=fresh))
            self._given = len(scanner.escaped)
            self.emitted = scanner.at if scanner.copy_end is None else scanner.copy_end


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a JSON object that is a call, else None."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return call_of(value)


def call_of(value: Any) -> tuple[str, str] | None:
    """The same for a decoded value."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


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
        rest = self.text[self._at :]
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
        head, marker, behind = rest[len(self._before) :].partition(self._marker)
        if not marker or not behind.lstrip():
            self.broken = self.broken or len(head) > _HEAD_CHARS_MAX + len(self._marker)
            return False
        start = self._at + len(rest) - len(behind.lstrip())
        if self.text[start] != "{" or not head.strip():
            self.broken = True
            return True
        head = head.strip()
        numbered = _NUMBERED.fullmatch(head)
        deltas.append(CallDelta(name=head) if numbered is None else CallDelta(name=numbered.group(1), call_id=head))
        self._object = ObjectScanner(start)
        self._object.copy(start)
        self._given = 0
        return True

    def _arguments(self, deltas: list[CallDelta]) -> bool:
        scanner = self._object
        assert scanner is not None
        scanner.scan(self.text)
        fresh = "".join(scanner.escaped[self._given :])
        if fresh:
            deltas.append(CallDelta(arguments=fresh))
            self._given, self.emitted = len(scanner.escaped), scanner.at
        if scanner.end is None:
            return False
        try:
            json.loads(self.text[scanner.start : scanner.end], strict=False)
        except (ValueError, RecursionError):
            self.broken = True
            return True
        rest = self.text[scanner.end :].lstrip()
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
