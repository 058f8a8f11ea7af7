"""``cache_control`` in a conversation: which characters of the rendered prompt the client marked.

    {"role": "system", "content": [
        {"type": "text", "text": HANDBOOK, "cache_control": {"type": "ephemeral"}},      behind this part
        {"type": "text", "text": "Today is Monday."}]}
    {"role": "user", "content": "...", "cache_control": {"type": "ephemeral"}}            behind this message
    {"type": "function", "function": {...}, "cache_control": {"type": "ephemeral"}}       behind this tool

The field asks that what comes before it is kept for requests that begin alike. Here it becomes a position,
and the position a checkpoint that goes before all others (``schedule.taps``). A mark is found as a boundary
is: the conversation is rendered again in another way behind the mark, and is the same up to there. So a mark
in a place that the template does not write, or writes elsewhere, is where the two texts part, at the latest.

``ttl`` is taken and means nothing: what is kept goes when its memory is worth more elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.text.chat import MARK, ChatMessage, ChatTemplate, common_length

CACHE_CONTROLS_MAX = 8
"""Marks in one conversation: each costs a rendering or two (law L11)."""
_OTHER_TOOL = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {}}}


def marked_characters(template: ChatTemplate, messages: list[ChatMessage], text: str, *,
                      variables: Mapping[str, Any] | None = None,
                      tools: Sequence[Any] = ()) -> list[int]:
    """Characters of ``text``, which ``template`` made of ``messages`` and ``variables``, behind which the
    client set a mark; ascending. ``tools`` as it sent them; the template reads them from ``variables``.

    Raises RequestError: a ``cache_control`` that is none, or more than CACHE_CONTROLS_MAX of them."""
    marks = [*_in_tools(tools), *_in_messages(messages)]
    if len(marks) > CACHE_CONTROLS_MAX:
        raise RequestError(f"cache_control is set in {len(marks)} places; the limit is {CACHE_CONTROLS_MAX} "
                           "in a request. cache_boundaries takes more, as positions in tokens",
                           param="cache_control")
    positions = set()
    for tool, message, part in marks:
        if message is None:
            shown = {**(variables or {}), "tools": [*without_marks(tools[:tool + 1]), _OTHER_TOOL]}
            positions.add(common_length(_rendered(template, messages, shown), text))
        else:
            positions.add(_behind(template, messages, message, part, text, variables))
    return sorted(positions - {0})


def without_marks(tools: Sequence[Any]) -> list[Any]:
    """``tools`` as a template may show them."""
    return [{name: value for name, value in tool.items() if name != "cache_control"}
            if isinstance(tool, dict) else tool for tool in tools]


def _in_tools(tools: Sequence[Any]) -> Iterator[tuple[int, None, None]]:
    for at, tool in enumerate(tools):
        if isinstance(tool, dict) and _is_mark(tool.get("cache_control"), f"tools[{at}]"):
            yield at, None, None


def _in_messages(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, int, int | None]]:
    """(0, message, part or None) of each mark in ``messages``."""
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        for part_at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, dict) and _is_mark(part.get("cache_control"), f"{where}.content[{part_at}]"):
                yield 0, at, part_at
        if _is_mark(message.cache_control, where):
            yield 0, at, None


def _is_mark(value: Any, where: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise RequestError(f"{where}.cache_control must be {{\"type\": \"ephemeral\"}}, got {value!r}",
                           param=f"{where}.cache_control")
    return True


def _behind(template: ChatTemplate, messages: list[ChatMessage], message: int, part: int | None, text: str,
            variables: Mapping[str, Any] | None) -> int:
    """Where ``messages[message]``, or its content up to ``part``, ends in ``text``."""
    if part is None:
        beginning = _rendered(template, messages[:message + 1], variables)
        if beginning and text.startswith(beginning):
            return len(beginning)
    marked = list(messages)
    marked[message] = msgspec.structs.replace(messages[message], content=_with_mark(messages[message], part))
    return common_length(_rendered(template, marked, variables), text)


def _with_mark(message: ChatMessage, part: int | None) -> str | list[Any]:
    content = message.content
    if not isinstance(content, list):
        return (content or "") + MARK
    last = len(content) - 1 if part is None else part
    shown = content[last] if content else ""
    said = shown if isinstance(shown, str) else shown.get("text") or shown.get("refusal") or ""
    return [*content[:last], said + MARK]


def _rendered(template: ChatTemplate, messages: list[ChatMessage],
              variables: Mapping[str, Any] | None) -> str:
    """Empty where the template refuses it."""
    try:
        return template.render(messages, add_generation_prompt=False, variables=variables)
    except RequestError:
        return ""
