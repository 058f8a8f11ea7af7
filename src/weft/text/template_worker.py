"""The worker of templates: it renders an untrusted chat template (``weft.text.workers``).

    start:  TemplateStart -> TemplateFacts or Refused
    job:    a conversation (marshal) -> ChatPrompt or Refused

    messages --render--> text --render shorter conversations--> ends, marks

    {"role": "system", "content": [
        {"type": "text", "text": HANDBOOK, "cache_control": {"type": "ephemeral"}},      after this part
        {"type": "text", "text": "Today is Monday."}]}
    {"role": "user", "content": "...", "cache_control": {"type": "ephemeral"}}            after this message
    {"type": "function", "function": {...}, "cache_control": {"type": "ephemeral"}}       after this tool

Everything that runs the template runs here: compiling it, where constants are folded (``10**(10**9)``), rendering it,
and the further renderings that find boundaries in the text. So a conversation costs one round trip. Characters are
counted while the template writes. A conversation arrives in marshal, which is fast: the sender is trusted. Answers are
in msgpack, because the template is not trusted.

``cache_control`` asks to keep the prefix up to it for requests with the same beginning. It becomes a position, at which
a snapshot is kept with priority (``schedule.snapshots``). The position is found like a boundary: the conversation is
rendered again with another text after the mark, and the two texts are equal up to the mark. So if the template leaves
out the marked part, or moves it, the position is at the latest where the two texts differ. ``ttl`` is accepted and
ignored.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError, WeftError
from weft.text.chat import MARK, ChatMessage, ChatTemplate, common_length, with_parsed_arguments
from weft.text.control_tokens import NO_CONTROL, ControlTexts, Quoting
from weft.text.tools.formats import NONE, tool_format

CACHE_CONTROLS_MAX = 8
"""Most marks in one conversation: each costs a rendering or two (law L11)."""
_SAID = ("reasoning", "reasoning_content")
_NAMED = ("name", "tool_call_id", "tool_calls")
_OTHER_TOOL = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {}}}


def marked_characters(
    template: ChatTemplate,
    messages: list[ChatMessage],
    text: str,
    *,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
) -> list[int]:
    """Return characters of ``text``, which ``template`` made of ``messages`` and ``variables``, at which the client set
    a mark; ascending. ``tools``: as the client sent them; the template reads them from ``variables``. Raise
    RequestError for an invalid ``cache_control``, or more than CACHE_CONTROLS_MAX of them."""
    marks = [*_in_tools(tools), *_in_messages(messages)]
    if len(marks) > CACHE_CONTROLS_MAX:
        raise RequestError(
            f"cache_control is set in {len(marks)} places; the limit is {CACHE_CONTROLS_MAX} "
            "in a request. cache_boundaries takes more, as positions in tokens",
            param="cache_control",
        )
    positions = set()
    for tool, message, part in marks:
        if message is None:
            shown = {**(variables or {}), "tools": [*without_marks(tools[: tool + 1]), _OTHER_TOOL]}
            positions.add(common_length(template.beginning(messages, shown), text))
        else:
            positions.add(_behind(template, messages, message, part, text, variables))
    return sorted(positions - {0})


def without_marks(tools: Sequence[Any]) -> list[Any]:
    """Return ``tools`` without their marks, as the template sees them."""
    return [
        {name: value for name, value in tool.items() if name != "cache_control"} if isinstance(tool, dict) else tool
        for tool in tools
    ]


def _in_tools(tools: Sequence[Any]) -> Iterator[tuple[int, None, None]]:
    for index, tool in enumerate(tools):
        if isinstance(tool, dict) and _is_mark(tool.get("cache_control"), f"tools[{index}]"):
            yield index, None, None


def _in_messages(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, int, int | None]]:
    """Yield (0, message, part or None) of each mark in ``messages``."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        for part_at, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, dict) and _is_mark(part.get("cache_control"), f"{where}.content[{part_at}]"):
                yield 0, index, part_at
        if _is_mark(message.cache_control, where):
            yield 0, index, None


def _is_mark(value: Any, where: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise RequestError(
            f'{where}.cache_control must be {{"type": "ephemeral"}}, got {value!r}', param=f"{where}.cache_control"
        )
    return True


def _behind(
    template: ChatTemplate,
    messages: list[ChatMessage],
    message: int,
    part: int | None,
    text: str,
    variables: Mapping[str, Any] | None,
) -> int:
    """Return the position in ``text`` at which ``messages[message]``, or its content up to ``part``, ends."""
    if part is None:
        beginning = template.beginning(messages[: message + 1], variables)
        if beginning and text.startswith(beginning):
            return len(beginning)
    marked = list(messages)
    marked[message] = msgspec.structs.replace(messages[message], content=_with_mark(messages[message], part))
    return common_length(template.beginning(marked, variables), text)


def _with_mark(message: ChatMessage, part: int | None) -> str | list[Any]:
    content = message.content
    if not isinstance(content, list):
        return (content or "") + MARK
    last = len(content) - 1 if part is None else part
    shown = content[last] if content else ""
    said = shown if isinstance(shown, str) else shown.get("text") or shown.get("refusal") or ""
    return [*content[:last], said + MARK]


class ShownPicture(msgspec.Struct, frozen=True):
    """A picture in a rendered prompt. ``spans``: (first character, characters, rows) of the image tokens of each
    tile."""

    digest: bytes
    data: bytes
    spans: list[tuple[int, int, int]]


class TemplateStart(msgspec.Struct):
    """The start of a worker. ``calls``: the name of the model's format of calls."""

    source: str
    special_tokens: dict[str, str]
    origin: str
    chars_max: int
    control: ControlTexts = NO_CONTROL
    calls: str = NONE


class TemplateFacts(msgspec.Struct, tag=True):
    """Facts of a template for requests: the variables that it reads, and whether it reads tools."""

    variables: list[str]
    reads_tools: bool


class ChatPrompt(msgspec.Struct, tag=True):
    """A conversation as text. All positions are in characters. ``ends``: positions after which another conversation may
    differ; ``marks``: positions at which the client set a ``cache_control``. ``pictures``: pictures in the text, which
    the template does not see. ``quoted``: positions at which a text of the request spells a control token
    (``weft.text.control_tokens``)."""

    text: str
    ends: list[int]
    marks: list[int]
    pictures: list[ShownPicture] = []
    quoted: list[int] = []

    def last(self, text: str) -> ChatPrompt:
        """Return the prompt of ``text``, which is an end of this prompt's text, with the positions in it. It must have
        no pictures."""
        before = len(self.text) - len(text)
        ends, marks = ([place - before for place in places if place > before] for places in (self.ends, self.marks))
        return ChatPrompt(text, ends, marks, quoted=[place - before for place in self.quoted if place >= before])


class Refused(msgspec.Struct, tag=True):
    message: str
    param: str | None = None
    code: str | None = None


Answer = TemplateFacts | ChatPrompt | Refused


def chat_prompt(
    template: ChatTemplate,
    messages: list[ChatMessage],
    *,
    chars_cut: int,
    tools: Sequence[Any] = (),
    variables: dict[str, Any] | None = None,
    **render: Any,
) -> ChatPrompt:
    """Return the text, and the positions in it. A text of more than ``chars_cut`` characters is too long to be served
    and gets no positions. Raise RequestError."""
    messages = [_with_objects(message) for message in messages]
    quoting = template.control.quoting(variables, *map(_texts_of, messages))
    if quoting is not None:
        messages = [_quoted(message, quoting) for message in messages]
        variables, tools = quoting.marked(variables), quoting.marked(tools)
    text = template.render(messages, variables=variables, **render)
    ends, marks = [], []
    if len(text) <= chars_cut:
        ends = template.boundaries(messages, text, variables=variables)
        marks = marked_characters(template, messages, text, variables=variables, tools=tools)
    if quoting is None:
        return ChatPrompt(text, ends, marks)
    restored = quoting.restored(text)
    return ChatPrompt(restored, ends, marks, quoted=quoting.quoted(text, restored))


def _with_objects(message: ChatMessage) -> ChatMessage:
    """Return ``message`` with the arguments of its calls as objects: a JSON text may spell a string in several ways."""
    if not message.tool_calls:
        return message
    return msgspec.structs.replace(message, tool_calls=[with_parsed_arguments(call) for call in message.tool_calls])


def _texts_of(message: ChatMessage) -> list[Any]:
    return [getattr(message, name) for name in ("content", *_SAID, *_NAMED)]


def _quoted(message: ChatMessage, quoting: Quoting) -> ChatMessage:
    said = {name: quoting.said(getattr(message, name), message.role) for name in ("content", *_SAID)}
    return msgspec.structs.replace(message, **said, **{name: quoting.marked(getattr(message, name)) for name in _NAMED})


def _answer(template: ChatTemplate, body: bytes) -> Answer:
    try:
        job = marshal.loads(body)
        job["messages"] = msgspec.convert(job["messages"], list[ChatMessage])
        return chat_prompt(template, **job)
    except RequestError as error:
        return Refused(error.message, error.param, error.code)
    except (MemoryError, RecursionError) as error:
        return Refused(f"the chat template failed on these messages: {type(error).__name__}", "messages")


def _encoded(answer: Answer) -> bytes:
    try:
        return msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(
            Refused("the messages have half of a surrogate pair, which is not text", "messages")
        )


def prepare(start: bytes) -> tuple[bytes, Callable[[bytes], bytes] | None]:
    """Return the facts of the template, and the job that renders it."""
    settings = msgspec.msgpack.decode(start, type=TemplateStart)
    try:
        template = ChatTemplate(
            settings.source,
            special_tokens=settings.special_tokens,
            origin=settings.origin,
            chars_max=settings.chars_max,
            control=settings.control,
            calls=tool_format(settings.calls, settings.source),
        )
    except (WeftError, MemoryError, RecursionError, ValueError, OverflowError) as error:
        reason = error.message if isinstance(error, WeftError) else f"{settings.origin}: {type(error).__name__}"
        return _encoded(Refused(reason, "--chat-template")), None
    facts = TemplateFacts(sorted(template.variables), template.reads_tools)
    return _encoded(facts), lambda body: _encoded(_answer(template, body))
