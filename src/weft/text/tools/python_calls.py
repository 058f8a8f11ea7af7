"""Calls written as Python (LFM2, LFM2.5, OLMo 3): parsed here, never run.

    [get_weather(city="Paris", days=3), get_time()]           a list
    get_weather(city="Paris")                                 one per line
    [{"name": "get_weather", "arguments": {...}}]             LFM2 writes this too

The syntax is wider than Python's: names and parameters may have dashes, dots and colons and be keywords, strings may
have line ends, and JSON's true, false and null are values. Only literals are values. The calls are read when the
envelope is complete, since an unfinished expression is ambiguous.

Templates of these families write texts between single quotes without escapes, and so do the models: ``say(text='It's
fine')``. If the calls cannot be read as Python, a quote ends a text only where an argument may end.
"""

from __future__ import annotations

import json
import re
from typing import Any

from weft.text.tools.json_calls import BodyReader, CallDelta, call_of
from weft.text.tools.values import parse_json, to_json

_NAME = re.compile(r"[A-Za-z_][\w.:/-]*")
_BEGIN = re.compile(r"\s*\[?\s*(?:[\]{]|[A-Za-z_][\w.:/-]*\s*(?:\(|\Z)|\Z)")
"""Possible beginning of calls: a stream does not hold back a text that only mentions the marker."""
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?(?![\w.])")
_QUOTES = ('"""', "'''", '"', "'")
_NAMES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_AFTER_ARGUMENT = re.compile(r"\s*(?:,\s*[A-Za-z_][\w.:/-]*\s*=|\)\s*(?:[,\]\n]|\Z))")
_AFTER_ITEM = re.compile(r"\s*(?:,\s*[\"'\d\[{(+\-A-Z]|[\]})])")
_AFTER_KEY = re.compile(r"\s*:")
_DEPTH_MAX = 100


class _Unfinished(ValueError):
    """The text ends inside a string, so the envelope's end may be a part of the string."""


class PythonCalls(BodyReader):
    """A reader of calls in Python; see the module."""

    def __init__(self, close: str | None) -> None:
        super().__init__(close)
        self._searched = 0

    def _read(self, last: bool) -> list[CallDelta]:
        while self.close is not None and (position := self.text.find(self.close, self._searched)) >= 0:
            try:
                return self._calls(self.text[:position], position + len(self.close), lacks_end=True)
            except _Unfinished:
                self._searched = position + len(self.close)
            except ValueError:
                self.broken = True
                return []
        self._searched = max(self._searched, len(self.text) - len(self.close or ""))
        if not last:
            self.broken = _BEGIN.match(self.text) is None
            return []
        try:
            return self._calls(self.text, len(self.text), lacks_end=self.may_lack_ends)
        except ValueError:
            self.broken = True
            return []

    def _calls(self, body: str, end: int, *, lacks_end: bool) -> list[CallDelta]:
        calls = read_python_calls(body, lacks_end=lacks_end)
        self.end = self.whole = self.emitted = end
        self.call_count = len(calls)
        return [CallDelta(name=name, arguments=arguments, complete=True) for name, arguments in calls]


def read_python_calls(text: str, *, lacks_end: bool = False) -> list[tuple[str, str]]:
    """Return (name, arguments as JSON text) of each call. Raise ValueError for anything but calls. ``lacks_end``:
    whether the closing bracket may be missing."""
    listed = _json_calls(text)
    if listed is None:
        try:
            listed = _Parser(text).calls(lacks_end=lacks_end)
        except ValueError as error:
            try:
                listed = _Parser(text, loose=True).calls(lacks_end=lacks_end)
            except ValueError:
                raise error from None
    if not listed:
        raise ValueError("no call")
    return listed


def _json_calls(text: str) -> list[tuple[str, str]] | None:
    """Return calls in JSON; None when ``text`` is not JSON. Raise ValueError for JSON that is not calls."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
    valid = [call for call in calls if call is not None]
    if len(valid) < len(calls):
        raise ValueError("an item is not a call")
    return valid


class _Parser:
    """A parser of calls. ``loose``: whether a quote ends a text only where an argument, an item or a key may end."""

    def __init__(self, text: str, *, loose: bool = False) -> None:
        self._text, self._at, self._loose = text, 0, loose
        self._depth = 0

    def calls(self, *, lacks_end: bool) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []
        while not self._is_over():
            if self._take("["):
                while not self._take("]"):
                    calls.append(self._call())
                    if not self._take(","):
                        if not (lacks_end and self._is_over()):
                            self._need("]")
                        break
            else:
                calls.append(self._call())
            self._take(",", ";")
        return calls

    def _call(self) -> tuple[str, str]:
        name = self._name()
        self._need("(")
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            if arguments:
                self._need(",")
                if self._take(")"):
                    break
            key = self._name()
            self._need("=")
            arguments[key] = self._value(_AFTER_ARGUMENT)
        return name, to_json(arguments)

    def _value(self, after: re.Pattern[str]) -> Any:
        self._space()
        character = self._text[self._at : self._at + 1]
        if character in ("'", '"'):
            return self._string(after)
        if character in ("[", "(", "{"):
            self._depth += 1
            if self._depth > _DEPTH_MAX:
                raise ValueError("nested too deeply")
            value = self._object() if character == "{" else self._items({"[": "]", "(": ")"}[character])
            self._depth -= 1
            return value
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            plain = number[0].replace("_", "").removeprefix("+")
            return parse_json(plain) if _is_json_number(plain) else float(plain)
        name = _NAME.match(self._text, self._at)
        if name is None or name[0] not in _NAMES:
            raise ValueError("not a literal")
        self._at = name.end()
        return _NAMES[name[0]]

    def _items(self, end: str) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while not self._take(end):
            if items:
                self._need(",")
                if self._take(end):
                    break
            items.append(self._value(_AFTER_ITEM))
        return items

    def _object(self) -> dict[str, Any]:
        self._at += 1
        members: dict[str, Any] = {}
        while not self._take("}"):
            if members:
                self._need(",")
                if self._take("}"):
                    break
            self._space()
            key = self._string(_AFTER_KEY)
            self._need(":")
            members[key] = self._value(_AFTER_ITEM)
        return members

    def _string(self, after: re.Pattern[str]) -> str:
        quote = next((quote for quote in _QUOTES if self._text.startswith(quote, self._at)), None)
        if quote is None:
            raise ValueError("not a text")
        start = self._at = self._at + len(quote)
        while True:
            end = self._text.find(quote, self._at)
            if end < 0:
                raise _Unfinished("a text does not end")
            backslash = self._text.find("\\", self._at, end)
            if backslash >= 0:
                self._at = backslash + 2
                continue
            if not self._loose or after.match(self._text, end + len(quote)):
                self._at = end + len(quote)
                return _ESCAPE.sub(_unescaped, self._text[start:end])
            self._at = end + 1

    def _name(self) -> str:
        self._space()
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise ValueError("not a name")
        self._at = name.end()
        return name[0]

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _is_over(self) -> bool:
        self._space()
        return self._at >= len(self._text)

    def _take(self, *characters: str) -> bool:
        """Take the next character if it is one of ``characters``, and return whether it was."""
        self._space()
        is_next = self._text.startswith(characters, self._at)
        self._at += is_next
        return is_next

    def _need(self, character: str) -> None:
        if not self._take(character):
            raise ValueError(f"no {character}")


def _is_json_number(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code <= 0x10FFFF else match[0]
    return _ESCAPED.get(escape, match[0])
