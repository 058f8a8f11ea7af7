"""Calls written as tags, with a tag for each parameter.

    <function=get_weather>                  <invoke name="get_weather">              get_weather
    <parameter=city>                        <parameter name="city" string="true">    <arg_key>city</arg_key>
    Paris                                   Paris</parameter>                        <arg_value>Paris</arg_value>
    </parameter>                            </invoke>                                (the end of the envelope)
    </function>
    Qwen3-Coder, Qwen3.5, Nemotron 3, ZAYA1    GigaChat 3.5; MiniMax-M2: no string=  GLM, Ling 3; no line ends: too

    <|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris...   Kimi K3

A value in tags is text; the tool's schema gives its type (``values``). A string is emitted while it comes; values of
other types are read when they are complete. GLM also writes ``get_weather{"city": "Paris"}``.

*The end of a value.* A value ends at its end tag, if another tag or the end of the envelope follows. In calls of an
offered tool, end tags may be missing: the value ends where another parameter of the schema begins, and at the end of
the function or of the envelope, if another call or the end of the answer follows. An end tag followed by other text may
be a part of the value. The rest of the answer decides: if a proper end follows before another call begins, the tag was
a part; otherwise the value ended there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from weft.text.choices import held_characters, may_become
from weft.text.tools.formats import Tags
from weft.text.tools.json_calls import HEAD_WORDS_MAX, BodyReader, CallDelta, ObjectScanner
from weft.text.tools.values import Parameters, is_object, parse_json, read_value, to_json

_NAME_CHARS_MAX = 256
_BARE_NAME = re.compile(r"[\w.:/-]+")
NO_END = (-1, -1)
"""Ends of a value and of its tag, where a mark ends no value."""


@lru_cache
def _named(attribute: str) -> re.Pattern[str]:
    return re.compile(rf"""\s{attribute}=(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+))""")


@lru_cache
def _tag_end(tags: Tags) -> re.Pattern[str]:
    """Return the pattern of the text that follows the name of a parameter. A model may leave out the tag that opens the
    value (GLM)."""
    first, *more = re.split(r"\s+", tags.named)
    return re.compile(rf"\s*{re.escape(first)}" + "".join(rf"(?:\s*{re.escape(part)})?" for part in more))


class TagCalls(BodyReader):
    """A reader of calls in tags. ``opens``: markers of envelopes; a call without an end ends before one of these."""

    def __init__(self, close: str | None, opens: Sequence[str], parameters: Parameters, tags: Tags) -> None:
        super().__init__(close)
        self._parameters, self._tags = parameters, tags
        self._next_calls = tuple(mark for mark in (*opens, tags.function) if mark)
        marks = (tags.parameter_end, tags.parameter, tags.function_end, close, *self._next_calls)
        self._marks = tuple(sorted((mark for mark in set(marks) if mark), key=len, reverse=True))
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._at = 0
        self._function: str | None = None
        self._given: set[str] = set()
        """Names of the call's parameters so far."""
        self._object: ObjectScanner | None = None
        self._parameter: str | None = None
        self._types: set[str] = set()
        self._is_text = self._is_begun = False
        """Whether the value is a string by its type, and whether the line end before it was read."""
        self._value_at = self._scanned = self._shown = 0
        """Positions: the beginning of the value; the end of the searched text; the end of the emitted text."""
        self._possible_end: tuple[int, int] | None = None
        """Ends of the value and of its tag, if no proper end follows."""

    def _read(self, last: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        moved = True
        while moved and self.end is None and not self.broken:
            if self._parameter is not None:
                moved = self._value(deltas, last)
                continue
            while self._at < len(self.text) and self.text[self._at].isspace():
                self._at += 1
            rest = self.text[self._at :]
            if self._object is not None:
                moved = self._json_arguments(deltas, last)
            else:
                moved = (self._between if self._function is None else self._inside)(rest, deltas, last)
        return deltas

    @property
    def _is_offered(self) -> bool:
        return self._function is not None and self._parameters.has(self._function)

    def _between(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        """Read between two values, and return whether any text was consumed."""
        tags = self._tags
        if self.close is not None and rest.startswith(self.close):
            self.end = self._at + len(self.close)
            return True
        doubled = tags.function_end if self.call_count else ""
        if not last and (not rest or may_become(rest, [mark for mark in (self.close, tags.function, doubled) if mark])):
            return False
        if doubled and rest.startswith(doubled):
            self._at += len(doubled)
            return True
        if not tags.function and not self.call_count:
            return self._bare_name(rest, deltas, last)
        if tags.function and rest.startswith(tags.function) and (self.close is not None or not self.call_count):
            end = re.compile(">") if tags.heads is None else _tag_end(tags)
            name, length = self._tag_name(rest, tags.function, end, tags.heads is None or last)
            if name is not None:
                self._begin(name, length, deltas)
            return name is not None
        if self.call_count:
            self.end = self.whole
        else:
            self.broken = True
        return True

    def _bare_name(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        match = _BARE_NAME.match(rest)
        behind = rest[match.end() :].lstrip(" \t") if match else ""
        if match is None or len(match[0]) > _NAME_CHARS_MAX or (behind and behind[0] not in "\n<>{"):
            self.broken = True
        elif behind or last:
            self._begin(match[0], len(rest) - len(behind) + behind.startswith(">"), deltas)
        return behind != "" or last or self.broken

    def _begin(self, name: str, length: int, deltas: list[CallDelta]) -> None:
        self._function, self._given = self._parameters.offered(name), set()
        self._at += length
        self.emitted = self._at
        deltas.append(CallDelta(name=name))

    def _inside(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        tags = self._tags
        ends = [mark for mark in (tags.function_end, self.close, *self._next_calls) if mark]
        if rest.startswith(tags.parameter):
            name, length = self._tag_name(rest, tags.parameter, _tag_end(tags), last)
            if name is not None:
                self._begin_value(name, rest[:length], deltas)
                self._value_at = self._scanned = self._shown = self._at + length
            return name is not None
        if tags.function_end and rest.startswith(tags.function_end):
            self._end_call(deltas, len(tags.function_end))
        elif rest.startswith(tags.parameter_end) and self._given:
            self._at += len(tags.parameter_end)
        elif not tags.function and rest.startswith("{") and not self._given:
            self._object = ObjectScanner(self._at)
        elif not last and (not rest or may_become(rest, (*ends, tags.parameter, tags.parameter_end))):
            return False
        elif self._may_end(rest, ends):
            self._end_call(deltas, 0)
        else:
            self.broken = True
        return True

    def _may_end(self, rest: str, ends: Sequence[str]) -> bool:
        """Return whether a call without an end may end before ``rest``."""
        by_envelope = not self._tags.function_end and self._given
        return (rest.startswith(tuple(ends)) or (not rest and self.may_lack_ends)) and bool(
            by_envelope or self._is_offered
        )

    def _end_call(self, deltas: list[CallDelta], length: int) -> None:
        deltas.append(CallDelta(arguments="}" if self._given else "{}", complete=True))
        self._at += length
        self._function = None
        self._completed(self._at)
        if self.close is None:
            self.end = self._at

    def _json_arguments(self, deltas: list[CallDelta], last: bool) -> bool:
        scanner = self._object
        assert scanner is not None
        scanner.scan(self.text)
        if scanner.end is None:
            return False
        text = self.text[scanner.start : scanner.end]
        rest = self.text[scanner.end :].lstrip()
        ends = [mark for mark in (self.close, *self._next_calls) if mark]
        if not last and (not rest or may_become(rest, ends)):
            return False
        self.broken = not is_object(text) or not (rest.startswith(tuple(ends)) or (not rest and self.may_lack_ends))
        if not self.broken:
            deltas.append(CallDelta(arguments=to_json(parse_json(text)), complete=True))
            self._function = self._object = None
            self._at = scanner.end
            self._completed(self._at)
        return True

    def _tag_name(self, rest: str, tag: str, end: re.Pattern[str], last: bool) -> tuple[str | None, int]:
        """Return the name in a tag (None while the tag is incomplete) and the length of the tag."""
        match = end.search(rest, len(tag))
        opens_value = self._tags.named.rpartition("\n")[2]
        if match and not match[0].endswith(opens_value) and not last:
            behind = rest[match.end() :].lstrip()
            if not behind or may_become(behind, (opens_value,)):
                return None, 0
        name = rest[len(tag) : match.start() if match else None]
        if self._tags.quoted and match:
            attribute = _named(self._tags.attributes[tag != self._tags.function]).search(name)
            name = next(filter(None, attribute.groups()), "") if attribute else ""
        if not match:
            name = name.partition("<")[0]
        is_prose = tag == self._tags.function and len(name.split()) > HEAD_WORDS_MAX
        if is_prose or "\n" in name.strip() or len(name) > _NAME_CHARS_MAX or (match and not name.strip()):
            self.broken = True
            return None, 0
        return (name.strip(), match.end()) if match else (None, 0)

    def _begin_value(self, name: str, tag: str, deltas: list[CallDelta], *, has_elements: bool = False) -> None:
        """Begin a value. ``has_elements``: whether it begins with another tag, and so is not text if its type is
        unknown."""
        assert self._function is not None
        name = self._parameters.parameter(self._function, name)
        if self._tags.says_type:
            self._is_text = self._tags.text_type in tag
        else:
            self._types = self._parameters.types(self._function, name)
            self._is_text = self._types == {"string"} or not (self._types or has_elements)
        begun = f"{', ' if self._given else '{'}{to_json(name)}: " + '"' * self._is_text
        self._parameter, self._possible_end, self._is_begun = name, None, not self._tags.padded
        self._given.add(name)
        deltas.append(CallDelta(arguments=begun))

    def _value(self, deltas: list[CallDelta], last: bool) -> bool:
        """Emit more of a string, and return whether the value has ended."""
        if not self._is_begun and self._value_at < len(self.text):
            self._value_at += self.text[self._value_at] == "\n"
            self._shown = self._scanned = self._value_at
            self._is_begun = True
        ends = self._value_end(last)
        if ends is None and last:
            if self._possible_end is None:
                self.broken = True
                return True
            ends = self._possible_end
        if ends is None:
            if self._is_text:
                sure = self._scanned if self._possible_end is None else self._possible_end[0]
                self._show(deltas, self._without_line_end(sure))
            return False
        end, self._at = ends
        text_end = self._without_line_end(end) if self._tags.padded or end == self._at else end
        if self._is_text:
            self._show(deltas, text_end)
        deltas.append(CallDelta(arguments='"' if self._is_text else self._typed(self.text[self._value_at : text_end])))
        self._parameter = None
        self.emitted = self._at
        return True

    def _typed(self, text: str) -> str:
        """Return the JSON text of a value."""
        if not self._tags.says_type:
            return to_json(read_value(text, self._types))
        try:
            return to_json(parse_json(text))
        except ValueError:
            return to_json(text)

    def _without_line_end(self, end: int) -> int:
        return end - (end > self._value_at and self.text[end - 1] == "\n")

    def _show(self, deltas: list[CallDelta], until: int) -> None:
        if until > self._shown:
            deltas.append(CallDelta(arguments=to_json(self.text[self._shown : until])[1:-1]))
            self._shown = self.emitted = until

    def _value_end(self, last: bool) -> tuple[int, int] | None:
        """Return the ends of the value and of its end tag. Move ``_scanned`` to the next tag that may be the end."""
        while (match := self._mark.search(self.text, self._scanned)) is not None:
            self._scanned = match.start()
            ends = self._at_mark(match, last)
            if ends != NO_END:
                return ends
            self._scanned = match.end()
        self._scanned = max(self._scanned, len(self.text) - (0 if last else held_characters(self.text, self._marks)))
        return None

    def _at_mark(self, match: re.Match[str], last: bool) -> tuple[int, int] | None:
        """Return the ends of the value and of its tag for a possible end tag; ``NO_END`` if the tag is a part of the
        value, None while that is undecided."""
        mark, here = match[0], match.start()
        if mark == self._tags.parameter_end:
            return self._at_proper_end(match, last)
        names = self._parameters.names(self._function or "")
        if mark in self._next_calls:
            return self._possible_end or NO_END
        if not self._is_offered or self._parameter not in names:
            return NO_END
        if mark != self._tags.parameter:
            return self._at_missing_end(match, last)
        end = _tag_end(self._tags).search(self.text, match.end(), match.end() + _NAME_CHARS_MAX)
        if end is None:
            return None if not last and len(self.text) - match.end() < _NAME_CHARS_MAX else NO_END
        name = self._parameters.parameter(self._function or "", self.text[match.end() : end.start()].strip())
        return (here, here) if name in names and name not in self._given else NO_END

    def _at_proper_end(self, match: re.Match[str], last: bool) -> tuple[int, int] | None:
        tags, rest = self._tags, self.text[match.end() :].lstrip()
        marks = (tags.parameter, tags.parameter_end, tags.function_end, self.close, *self._next_calls)
        followers = tuple(mark for mark in marks if mark)
        if rest.startswith(followers) or (last and not rest):
            return match.start(), match.end()
        if not last and (not rest or may_become(rest, followers)):
            return None
        self._possible_end = self._possible_end or match.span()
        return NO_END

    def _at_missing_end(self, match: re.Match[str], last: bool) -> tuple[int, int] | None:
        """Return the same as ``_at_mark`` for the end of a function or of an envelope."""
        end = self._possible_end or (match.start(), match.start())
        rest = self.text[match.end() :].lstrip()
        closers = tuple(mark for mark in (self._tags.function_end, self.close) if mark)
        while rest.startswith(closers):
            rest = rest[len(next(mark for mark in closers if rest.startswith(mark))) :].lstrip()
        if not last and (not rest or may_become(rest, (*closers, *self._next_calls))):
            return None
        if not rest or rest.startswith(self._next_calls):
            return end
        self._possible_end = end
        return NO_END
