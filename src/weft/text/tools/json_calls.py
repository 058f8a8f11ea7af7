"""Calls written as JSON: one object, several, or a list of them.

    {"name": "f", "arguments": {"x": 1}}            also "parameters"; also inside {"function": {...}}
    [{"name": "f", "arguments": {...}}, ...]
    {...}; {...}

Where an object begins with its name and its arguments, as nearly all do, the arguments are given out while
they come: the text of the value itself, with line ends inside strings escaped, as models forget to. Any other
order of the keys is read when the object is complete. An object that is no call is broken.
"""

from __future__ import annotations

import json
import re
from typing import Any

from weft.text.stop_strings import may_become
from weft.text.tools.body_reader import BodyReader, CallDelta

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
        rest = text[self._at:]
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
        if scanner.end is None:
            return False
        call = read_call(self.text[scanner.start:scanner.end])
        if call is None:
            self.broken = True
            return True
        if self._name is None:
            deltas.append(CallDelta(name=call[0], arguments=call[1], complete=True))
        else:
            deltas.append(CallDelta(complete=True))
        self._at = scanner.end
        self._object, self._name = None, None
        self._completed(self._at)
        return True

    def _give_copied(self, scanner: ObjectScanner, deltas: list[CallDelta]) -> None:
        fresh = "".join(scanner.escaped[self._given:])
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
