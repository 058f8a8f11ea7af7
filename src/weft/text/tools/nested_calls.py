"""Calls whose parameters are elements: named by their own tags, and nested (MiniMax-M3). A token precedes each tag.

    ]<]minimax[>[<invoke name="plan">                                            {
      ]<]minimax[>[<city>Oslo]<]minimax[>[</city>                                  "city": "Oslo",
      ]<]minimax[>[<days>                                                          "days":
        ]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>2...              [1, 2],
      ]<]minimax[>[</days>
      ]<]minimax[>[<at>]<]minimax[>[<hour>7]<]minimax[>[</hour>...                 "at": {"hour": 7}
    ]<]minimax[>[</invoke>                                                       }

Models write no spaces between tags. The tool's schema says how a value is read: a string as it is written, an array
from the elements inside, whatever their names, an object from their names, and any other value from its text
(``values``). Without a schema, elements that are all called ``item`` are an array. Elements of an object with the same
name become a list, and text between elements its member ``$text``.

*The end of a value.* A value ends at its end tag, not at one that closes an element of the same name inside. If the
answer ends without it, the value ended where a call ends or begins, or another parameter begins; a string also at an
end tag with another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from weft.text.choices import may_become
from weft.text.tools.formats import ITEM, Tags
from weft.text.tools.json_calls import CallDelta
from weft.text.tools.tag_calls import NO_END, TagCalls
from weft.text.tools.values import Parameters, inner_schema, read_value, to_json, types_of

_DEPTH_MAX = 100
_TEXT = "$text"
"""Name of the text between the elements of a value."""


class NestedCalls(TagCalls):
    """A reader of calls of nested elements."""

    def __init__(self, close: str | None, opens: Sequence[str], parameters: Parameters, tags: Tags) -> None:
        super().__init__(close, opens, parameters, tags)
        token = tags.parameter.removesuffix("<")
        self._marks, self._mark = (token,), re.compile(re.escape(token))
        self._tag = re.compile(re.escape(token) + "<(/?)([^<>]{1,256})>")
        self._tag_beginning = re.compile(re.escape(token) + "(?:<[^<>]{0,256})?")
        self._ends = tuple(mark for mark in (tags.function_end, close, *self._next_calls) if mark)
        self._element, self._depth = "", 0
        """The open parameter, as its tag spells it, and the number of elements inside with the same name."""
        self._sent: list[str] = []
        """The arguments of the call so far, JSON text."""

    def _read(self, last: bool) -> list[CallDelta]:
        deltas = super()._read(last)
        for delta in deltas:
            if delta.name is not None:
                self._sent.clear()
            self._sent.append(delta.arguments)
            if delta.complete:
                sent = "".join(self._sent)
                collected = to_json(json.loads(sent, object_pairs_hook=_object))
                if collected != to_json(json.loads(sent)):
                    delta.arguments, delta.instead = collected, True
        return deltas

    def _inside(self, rest: str, deltas: list[CallDelta], last: bool) -> bool:
        tag = self._tag.match(rest)
        if rest.startswith(self._ends) or (not rest and self.may_lack_ends):
            end = self._tags.function_end
            self._end_call(deltas, len(end) if rest.startswith(end) else 0)
        elif tag is not None and tag[1]:  # an end of nothing
            self._at += tag.end()
        elif not last and self._may_be_tag(rest if tag is None else rest[tag.end() :]):
            return False
        elif tag is None:
            self.broken = True
        else:
            self._element, self._depth = tag[2], 0
            inner = self._tag.match(rest, tag.end())
            self._begin_value(tag[2].strip(), tag[0], deltas, has_elements=inner is not None and not inner[1])
            self._value_at = self._scanned = self._shown = self._at + tag.end()
        return True

    def _may_be_tag(self, rest: str) -> bool:
        """Return whether more text could make ``rest`` begin with a tag."""
        return not rest or may_become(rest, self._marks) or self._tag_beginning.fullmatch(rest) is not None

    def _at_mark(self, match: re.Match[str], last: bool) -> tuple[int, int] | None:
        start, tag = match.start(), self._tag.match(self.text, match.start())
        if tag is None:
            return NO_END if last or self._tag_beginning.fullmatch(self.text, start) is None else None
        is_own, is_end = tag[2] == self._element, bool(tag[1])
        if is_own and is_end and not self._depth:
            return tag.span()
        self._depth += is_own * (-1 if is_end else 1)
        others = self._parameters.names(self._function or "") - self._given
        if self.text.startswith(self._ends, start) or (tag[2] in others and not is_end):
            self._possible_end = self._possible_end or (start, start)
        elif is_end and (is_own or self._is_text):
            self._possible_end = self._possible_end or tag.span()
        return NO_END

    def _typed(self, text: str) -> str:
        root, position = self._parameters.root(self._function or ""), 0
        elements = [_Element(self._element, self._parameters.schema(self._function or "", self._parameter or ""))]

        def close() -> str:
            inner = elements.pop()
            elements[-1].members.append((inner.name, inner.value(root)))
            return inner.name

        for tag in self._tag.finditer(text):
            outer = elements[-1]
            outer.text, position = outer.text + text[position : tag.start()], tag.end()
            if not tag[1]:
                elements.append(_Element(tag[2], inner_schema(outer.schema, root, tag[2], len(outer.members))))
            elif any(element.name == tag[2] for element in elements[1:]):
                while close() != tag[2]:  # the end of an element ends those inside
                    pass
            if len(elements) > _DEPTH_MAX:
                return to_json(text)
        elements[-1].text += text[position:]
        while len(elements) > 1:
            close()
        return to_json(elements[0].value(root))


class _Element:
    """An element of a value that is being read. ``members``: names and values of the elements inside."""

    def __init__(self, name: str, schema: Any) -> None:
        self.name, self.schema, self.text = name, schema, ""
        self.members: list[tuple[str, Any]] = []

    def value(self, root: Any) -> Any:
        types = types_of(self.schema, root)
        is_array, is_object = "array" in types, "object" in types
        if not self.members:
            is_empty = not self.text.strip() and (is_array or is_object) and "string" not in types
            return ([] if is_array else {}) if is_empty else read_value(self.text, types)
        members = [*self.members, *([(_TEXT, self.text)] if self.text.strip() else [])]
        is_list = all(name == ITEM for name, _ in members) if is_array == is_object else is_array
        return [value for _, value in members] if is_list else _object(members)


def _object(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of ``members``; those with the same name are a list."""
    listed: dict[str, list[Any]] = {}
    for name, value in members:
        listed.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in listed.items()}
