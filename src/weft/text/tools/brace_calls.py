"""Calls of Gemma 4 and FunctionGemma: a name and members in braces, with a special quote around texts.

    call:get_weather{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}

A call is translated to JSON while it comes: a bare key becomes a string, and so does a bare word that is neither a
number nor a constant. A text ends at the next quote; nothing inside is escaped. Models also write texts in the quotes
of JSON or Python, leave commas out, and write ``call:get_weather(city=<|"|>Paris<|"|>)``.
"""

from __future__ import annotations

import re

from weft.text.choices import held_characters, may_become
from weft.text.tools.json_calls import BodyReader, CallDelta
from weft.text.tools.values import Parameters, is_object, parse_json, to_json

_HEAD = re.compile(r"\s*(?:call:)?\s*([\w.:/-]{1,256})\s*([{(])")
_HEAD_BEGINNING = re.compile(r"\s*[\w.:/-]{0,256}\s*(?:[\w.:/-]{0,256})\s*")
_BARE = re.compile(r"[^,:{}\[\]]*")
_BARE_IN_CALL = re.compile(r"[^,:={}\[\])]*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PYTHON_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'(?=\s*[,}\])])", re.DOTALL)
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}


class BraceCalls(BodyReader):
    """A reader of calls in braces. ``quote`` comes before and after a text."""

    def __init__(self, close: str, quote: str, parameters: Parameters) -> None:
        super().__init__(close)
        self._quote, self._parameters = quote, parameters
        self._at = 0
        self._function = ""
        self._open: list[str] = []
        """Brackets that are open."""
        self._json: list[str] = []
        """The arguments so far."""
        self._key = ""
        """The current parameter, after its name and before its value."""
        self._in_text = False
        self._comma = ""
        """A comma before the next item, if one follows."""
        self._is_after_value = self._has_parentheses = False

    def _read(self, last: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.end is None and not self.broken:
            begun = len(self._json) if self._open else 0
            moved = self._inside(last) if self._open else self._between(deltas, last)
            if len(self._json) > begun and self._function:
                deltas.append(CallDelta(arguments="".join(self._json[begun:])))
                self.emitted = self._at
            if not moved:
                break
            if self._function and not self._open:
                self._end_call(deltas)
        return deltas

    def _between(self, deltas: list[CallDelta], last: bool) -> bool:
        """Read between two values, and return whether any text was consumed."""
        assert self.close is not None
        rest = self.text[self._at :].lstrip()
        head = _HEAD.match(rest)
        if rest.startswith(self.close):
            self.end = len(self.text) - len(rest) + len(self.close)
        elif head is not None:
            self._at = len(self.text) - len(rest) + head.end()
            self._function = self._parameters.offered(head[1])
            self._has_parentheses, self._is_after_value = head[2] == "(", False
            self._open, self._json = ["{"], ["{"]
            deltas.append(CallDelta(name=head[1]))
        elif not last and (not rest or may_become(rest, (self.close,)) or _HEAD_BEGINNING.fullmatch(rest)):
            return False
        elif self.call_count:
            self.end = self.whole
        else:
            self.broken = True
        return True

    def _inside(self, last: bool) -> bool:
        if self._in_text:
            return self._text(last)
        assert self.close is not None
        while self._at < len(self.text) and self.text[self._at].isspace():
            self._at += 1
        rest = self.text[self._at :]
        if not last and (not rest or may_become(rest, (self._quote, self.close))):
            return False
        is_call = self._has_parentheses and len(self._open) == 1
        lacks_end = rest.startswith(self.close) or (not rest and self.may_lack_ends)
        if rest.startswith(self._quote):
            self._take(len(self._quote), '"')
            self._in_text = True
        elif rest[:1] in ("{", "["):
            self._take(1, rest[0])
            self._open.append(rest[0])
            self._is_after_value = False
        elif rest[:1] in ("}", "]") or (is_call and rest.startswith(")")):
            self._close_bracket("}" if rest[0] == ")" else rest[0])
        elif rest.startswith(":") or (is_call and rest.startswith("=")):
            self._is_after_value = False
            self._take(1, ": ")
        elif rest.startswith(",") and not self._comma:
            self._at += 1
            self._comma = ", "
        elif lacks_end and len(self._open) == 1:
            self._close_bracket("}")
            self._at -= 1
        else:
            return self._bare(rest, last, _BARE_IN_CALL if is_call else _BARE)
        return True

    def _take(self, length: int, json: str) -> None:
        if self._is_after_value and not self._comma:  # the model omitted the comma
            self._comma = ", "
        self._is_after_value = False
        self._at += length
        self._json.append(self._comma + json)
        self._comma = ""

    def _close_bracket(self, bracket: str) -> None:
        if {"}": "{", "]": "["}[bracket] != self._open.pop():
            self.broken = True
        self._comma, self._is_after_value = "", False  # a surplus comma before the end
        self._take(1, bracket)
        self._is_after_value = True

    def _text(self, last: bool) -> bool:
        """Read a quoted text as far as it has come, and return whether any text was consumed."""
        end = self.text.find(self._quote, self._at)
        until = len(self.text) - held_characters(self.text, (self._quote,)) if end < 0 else end
        if until > self._at:
            self._take(until - self._at, to_json(self.text[self._at : until])[1:-1])
        if end >= 0:
            self._take(len(self._quote), '"')
            self._in_text, self._is_after_value = False, True
        self.broken = end < 0 and last
        return end >= 0

    def _bare(self, rest: str, last: bool, pattern: re.Pattern[str]) -> bool:
        """Read a key, a number, a constant or a text in other quotes, and return whether any text was consumed."""
        assert self.close is not None
        python = _PYTHON_STRING.match(rest)
        if rest.startswith("'") and python is None and not last and self.close not in rest:
            return False
        match = python or (_JSON_STRING if rest.startswith('"') else pattern).match(rest)
        if match is None or (match.end() == len(rest) and not last):
            return False
        word = to_json(match[1].replace("\\'", "'")) if python else match[0].strip()
        behind = rest[match.end() :].lstrip()
        if not word or not behind:
            self.broken = True
            return True
        is_key = self._open[-1] == "{" and behind.startswith((":", "="))
        self._take(match.end(), self._key_of(word) if is_key else self._value_of(word))
        self._is_after_value = True
        return True

    def _key_of(self, word: str) -> str:
        key = to_json(parse_json(word) if word.startswith('"') else word)
        if len(self._open) == 1:
            self._key = key
        return key

    def _value_of(self, word: str) -> str:
        """Return the JSON of a bare word: a string if the schema says so, or if the word has no other type."""
        is_text = len(self._open) == 1 and self._parameters.types(self._function, self._key[1:-1]) == {"string"}
        if word.startswith('"') or not is_text:
            try:
                return to_json(parse_json(_CONSTANTS.get(word, word)))
            except ValueError:
                pass
        return to_json(word)

    def _end_call(self, deltas: list[CallDelta]) -> None:
        self._function = ""
        if self.broken or not is_object("".join(self._json)):
            self.broken = True
            return
        self._json = []
        deltas.append(CallDelta(complete=True))
        self._completed(self._at)
