"""The output of readers of calls, and calls whose arguments are JSON: objects, lists, and objects after a name.

    CallDelta(name="get_time")                     a call begins
    CallDelta(arguments='{"zone": ')               more of its arguments, JSON text
    CallDelta(arguments='"UTC"}', complete=True)   it is complete

    {"name": "f", "arguments": {"x": 1}}            also "parameters"; also inside {"function": {...}}
    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}                                Command
    {"f": {"x": 1}}                                                                                Apertus
    [{"name": "f", "arguments": {...}}, ...]        also {...}; {...}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                                                 Mistral
    get_weather <line end> {"city": "Paris"}        the name of an offered tool                    GLM 4
    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>

A reader takes the text between the markers of one envelope. It keeps all of that text and counts how much of it has
become calls. Text that turns out not to be a call is shown as content, so no character is lost.

If an object begins with name and arguments, as nearly all do, the arguments are emitted while they come: the text of
the value, with line ends in strings escaped (models forget that), and with Python's constants and trailing commas
changed to JSON's form. An object with another order of keys is read when it is complete. An object that is not a call
makes the body ``broken``; an object that lacks only its last brace, after complete arguments and before the end of the
envelope or the answer, is a call. Kimi's head is the id of the call; the name is between the prefix and the number.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from weft.text.choices import may_become
from weft.text.tools.values import is_object, parse_json, parse_literal, to_json


@dataclass(slots=True)
class CallDelta:
    """A new part of a call. ``name`` is set on the first delta, ``complete`` on the last. ``call_id`` comes with the
    name; it is the model's id if the family writes ids. ``index`` numbers the calls of an answer. With ``is_custom``,
    ``arguments`` is the text of a custom tool. ``instead``: ``arguments`` replace all earlier ones."""

    index: int = -1
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_custom: bool = False
    complete: bool = False
    instead: bool = False


HELD_CHARS = 512
"""Most characters of arguments that a stream holds back while the call is incomplete: a stream cannot take back text,
but the client of a long call should see progress."""


class CallGate:
    """A buffer of a call's deltas, until the call is complete or has more than ``held_chars`` characters of
    arguments."""

    def __init__(self, held_chars: float) -> None:
        self._held_chars = held_chars
        self._held: list[CallDelta] = []
        self.is_open = False
        """Whether the beginning of the current call was emitted."""

    def push(self, delta: CallDelta) -> CallDelta | None:
        if delta.instead:
            self._held = [replace(earlier, arguments="") for earlier in self._held]
        self._held.append(delta)
        arguments = "".join(earlier.arguments for earlier in self._held)
        if not (delta.complete or self.is_open or len(arguments) > self._held_chars):
            return None
        ready = replace(self._held[0], arguments=arguments, complete=delta.complete)
        self._held.clear()
        self.is_open = not delta.complete
        return ready

    def drop(self) -> None:
        """Drop the buffered text, which is not a call."""
        self._held.clear()
        self.is_open = False


class BodyReader(ABC):
    """A reader of the text inside an envelope. ``close``: the marker that ends the envelope; None if no marker ends the
    calls.

    ``whole``: characters that have become complete calls. ``emitted``: characters that were emitted in deltas. ``end``:
    position of the envelope's end, once it is known. ``broken``: whether the text is not a call. ``may_lack_ends``:
    whether the model itself has ended the answer, so that missing end markers are accepted.
    """

    def __init__(self, close: str | None) -> None:
        self.close = close
        self.text = ""
        self.whole = 0
        self.emitted = 0
        self.end: int | None = None
        self.broken = False
        self.call_count = 0
        self.may_lack_ends = False

    def push(self, text: str, *, last: bool = False, is_cut: bool = False) -> list[CallDelta]:
        """Add text and return its deltas. ``last``: whether this is the last text; ``is_cut``: whether a limit of
        tokens ended it. After the last text, ``end`` or ``broken`` is set."""
        self.text += text
        self.may_lack_ends = last and not is_cut
        deltas = self._read(last)
        if last and self.end is None:
            self.broken = True
        return deltas

    @abstractmethod
    def _read(self, last: bool) -> list[CallDelta]:
        """Read on from where the last call of this method stopped."""

    def _completed(self, end: int) -> None:
        self.call_count += 1
        self.whole = self.emitted = end


_HEADER = re.compile(
    r'\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)'
)
_KEYED_HEADER = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\{)')
_ARGUMENTS = ("arguments", "parameters", "args")
_EXTRA_ENDS = re.compile(r"[\s}\]]*[}\]][\s}\]]*")


_HEX_DIGITS = 4
_HEX = re.compile("[0-9a-fA-F]{4}")


_JSON_NAMES = {"True": "true", "False": "false", "None": "null"}


class ObjectScanner:
    """A scanner that finds the end of the JSON object at ``start`` of a growing text; it reads only brackets and
    strings. ``escaped``: the text from ``copy_from`` on as strict JSON: control characters and lone backslashes in
    strings escaped, JSON's constants for Python's, no trailing commas."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.position = start
        self.end: int | None = None
        self.escaped: list[str] = []
        self.copy_from: int | None = None
        self.copy_end: int | None = None
        self._depth = 0
        self._copy_depth = 0
        self._in_string = False
        self._after_backslash = False
        self._comma = self._word = ""
        """Text outside strings that is not copied yet: a comma with the space after it, then a word that may
        continue."""

    def scan(self, text: str, until: int | None = None) -> None:
        """Scan up to ``until``, the end of ``text``, or of the object."""
        until = len(text) if until is None else until
        while self.position < until and self.end is None:
            character = text[self.position]
            if self._after_backslash and character == "u" and self.position + _HEX_DIGITS >= len(text):
                return
            if self.copy_from is not None and self.copy_end is None:
                following = text[self.position + 1 : self.position + 1 + _HEX_DIGITS]
                self.escaped.append(
                    self._escaped(character, following) if self._in_string else self._outside(character)
                )
            self._step(character)
            self.position += 1
            if self._depth == 0:
                self.end = self.position
            if self.copy_from is not None and self._depth == self._copy_depth and self.copy_end is None:
                self.copy_end = self.position

    def _escaped(self, character: str, following: str) -> str:
        """Return the character as strict JSON: models forget to escape line ends and backslashes."""
        raw = json.dumps(character)[1:-1] if self._in_string and character < " " else character
        if not self._after_backslash:
            return raw
        is_escape = character in '"\\/bfnrt' or (character == "u" and _HEX.fullmatch(following) is not None)
        return raw if is_escape else f"\\{raw}"

    def _outside(self, character: str) -> str:
        """Return the text that can be copied now that ``character`` came outside strings."""
        if character.isalpha():
            self._word += character
            return ""
        sure = ""
        if self._word:
            sure = self._comma + _JSON_NAMES.get(self._word, self._word)
            self._comma = self._word = ""
        if character == ",":
            sure, self._comma = sure + self._comma, ","
        elif self._comma and character.isspace():
            self._comma += character
        else:
            sure += ("" if character in "}]" else self._comma) + character
            self._comma = ""
        return sure

    def copy(self, start: int) -> None:
        """Begin to copy the scanned text, with the value at ``start``, which is the position of the scan."""
        assert self.position == start
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
    """A reader of JSON calls; see the module. ``keyed``: whether the name of a function is the key of its arguments."""

    def __init__(self, close: str | None, *, keyed: bool = False) -> None:
        super().__init__(close)
        self._keyed = keyed
        self._at = 0
        self._object: ObjectScanner | None = None
        self._name: str | None = None
        self._given = 0
        self._list: bool | None = None
        """True inside a list, False after it, None without a list."""

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
        """Read between two calls, and return whether any text was consumed."""
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
            return self._read_extra_ends(rest, last)
        else:
            self.broken = True
        return True

    def _read_extra_ends(self, rest: str, last: bool) -> bool:
        """Skip surplus brackets between a call and the envelope's end."""
        extra = _EXTRA_ENDS.match(rest)
        behind = rest[extra.end() :] if extra and self.close else ""
        if extra and self.close and not last and (not behind or may_become(behind, (self.close,))):
            return False
        at_close = self.close is not None and behind.startswith(self.close)
        self.end = len(self.text) - len(behind) + len(self.close or "") if at_close else self.whole
        return True

    def _read_object(self, deltas: list[CallDelta]) -> bool:
        scanner = self._object
        assert scanner is not None
        if self._name is None and scanner.copy_from is None:
            header = (_KEYED_HEADER if self._keyed else _HEADER).match(self.text, scanner.start)
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
        text, copied = self.text[scanner.start : scanner.end], "".join(scanner.escaped)
        call = self._call(text) or self._call(self._as_copied(scanner, text))
        if call is None:
            self.broken = True
            return True
        if self._name is None:
            deltas.append(CallDelta(name=call[0], arguments=call[1], complete=True))
        elif is_object(copied):
            deltas.append(CallDelta(complete=True))
        else:  # Python, whose quotes and numbers differ from JSON's
            deltas.append(CallDelta(arguments=call[1], complete=True, instead=True))
        return self._object_ended(scanner.end)

    def _call(self, text: str) -> tuple[str, str] | None:
        value = parse_literal(text)
        if self._keyed and isinstance(value, dict) and len(value) == 1:
            [(name, arguments)] = value.items()
            value = {"name": name, "arguments": arguments}
        return call_of(value)

    def _as_copied(self, scanner: ObjectScanner, text: str) -> str:
        """Return the text of an object with the copied arguments."""
        if scanner.copy_from is None or scanner.copy_end is None:
            return text
        before, behind = scanner.copy_from - scanner.start, scanner.copy_end - scanner.start
        return text[:before] + "".join(scanner.escaped) + text[behind:]

    def _object_ended(self, end: int | None) -> bool:
        assert end is not None
        self._at = end
        self._object, self._name = None, None
        self._completed(end)
        return True

    def _lacks_only_its_end(self, scanner: ObjectScanner) -> bool:
        """Return whether the envelope or the answer ends directly after the arguments: small models forget the last
        brace."""
        if scanner.copy_end is None or not is_object("".join(scanner.escaped)):
            return False
        rest = self.text[scanner.copy_end :].lstrip()
        return (not rest and self.may_lack_ends) or (self.close is not None and rest.startswith(self.close))

    def _give_copied(self, scanner: ObjectScanner, deltas: list[CallDelta]) -> None:
        fresh = "".join(scanner.escaped[self._given :])
        if fresh:
            deltas.append(CallDelta(arguments=fresh))
            self._given = len(scanner.escaped)
            self.emitted = scanner.position if scanner.copy_end is None else scanner.copy_end


def call_of(value: Any) -> tuple[str, str] | None:
    """Return (name, arguments as JSON text) of a decoded value that is a call; None for any other value."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        return None
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    try:
        if isinstance(arguments, str) and arguments.strip():
            arguments = parse_json(arguments)
        return (name, to_json(arguments or {})) if arguments in (None, "") or isinstance(arguments, dict) else None
    except ValueError:
        return None


_NUMBERED = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")
_HEAD_CHARS_MAX = 256
HEAD_WORDS_MAX = 4
"""Most words of a name with its id. More words are prose that mentions a marker, in which a stream does not wait for a
name."""


class HeadedCalls(BodyReader):
    """A reader of calls with a head. ``before`` and ``behind`` are the texts around a call; ``arguments`` is the text
    between name and arguments, ``numbered`` the text between name and id. All but ``arguments`` may be empty.
    ``names``: the names that a call may have; None for any."""

    def __init__(
        self,
        close: str | None,
        *,
        before: str,
        arguments: str,
        behind: str,
        numbered: str,
        names: Collection[str] | None = None,
    ) -> None:
        super().__init__(close)
        self._before, self._marker, self._behind, self._numbered = before, arguments, behind, numbered
        self._names = names
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
        """Read the head of a call, and return whether any text was consumed."""
        while self._at < len(self.text) and self.text[self._at].isspace():
            self._at += 1
        rest = self.text[self._at :]
        if self.close is not None and rest.startswith(self.close):
            self.end = self._at + len(self.close)
            return True
        if self.call_count and ((self.close is None and not self._may_be_named(rest)) or (last and not rest)):
            self.end = self.whole
            return True
        if rest and self._names is not None and not self._may_be_named(rest):
            self.broken = True
            return True
        waits_for = [marker for marker in (self.close, self._before) if marker]
        if not last and (not rest or may_become(rest, waits_for)):
            return False
        if not rest.startswith(self._before):
            self.broken = True
            return True
        head, marker, behind = rest[len(self._before) :].partition(self._marker)
        bare = behind.lstrip()
        if not marker or not bare or (self._behind and may_become(bare, (self._behind,))):
            is_prose = not marker and len(head.split()) > HEAD_WORDS_MAX + 1  # the last word may become the marker
            self.broken = self.broken or is_prose or len(head) > _HEAD_CHARS_MAX + len(self._marker)
            return False
        name = head.strip()
        if not name or "\n" in name or len(name.split()) > HEAD_WORDS_MAX:
            self.broken = True
            return True
        if self._behind and bare.startswith(self._behind):
            deltas.append(replace(self._named(name), arguments="{}", complete=True))
            self._at = len(self.text) - len(bare) + len(self._behind)
            self._completed(self._at)
            return True
        start = len(self.text) - len(bare)
        if self.text[start] != "{":
            self.broken = True
            return True
        deltas.append(self._named(name))
        self._object = ObjectScanner(start)
        self._object.copy(start)
        self._given = 0
        return True

    def _may_be_named(self, rest: str) -> bool:
        """Return whether ``rest`` begins with one of the names, or may come to."""
        if self._names is None:
            return False
        head, marker, _ = rest.partition(self._marker)
        return head.strip() in self._names or (not marker and may_become(head.rstrip(), self._names))

    def _named(self, head: str) -> CallDelta:
        if self._numbered:
            name, marker, number = head.partition(self._numbered)
            return CallDelta(name=name.strip(), call_id=number.strip() if marker else None)
        numbered = _NUMBERED.fullmatch(head)
        assert numbered is not None
        return CallDelta(name=numbered.group(1), call_id=head if numbered.group(2) else None)

    def _arguments(self, deltas: list[CallDelta]) -> bool:
        scanner = self._object
        assert scanner is not None
        scanner.scan(self.text)
        fresh = "".join(scanner.escaped[self._given :])
        if fresh:
            deltas.append(CallDelta(arguments=fresh))
            self._given, self.emitted = len(scanner.escaped), scanner.position
        if scanner.end is None:
            return False
        if not is_object("".join(scanner.escaped)):
            self.broken = True
            return True
        rest = self.text[scanner.end :].lstrip()
        ends = (self.may_lack_ends and not rest) or (self.close is not None and rest.startswith(self.close))
        if self._behind and not rest.startswith(self._behind) and not ends:
            self.broken = not may_become(rest, [mark for mark in (self._behind, self.close) if mark])
            return self.broken
        deltas.append(CallDelta(complete=True))
        behind = len(self._behind) if rest.startswith(self._behind) else 0
        self._at = len(self.text) - len(rest) + behind if behind else scanner.end
        self._object = None
        self._completed(self._at)
        return True
