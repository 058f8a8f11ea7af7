"""The process that renders a chat template of a stranger: ``python -m weft.text.template_worker``.

    stdin:   TemplateStart, then conversations (marshal); its end means that the server is gone
    stdout:  TemplateFacts or Refused for the start, then ChatPrompt or Refused for each, in order

    messages --render--> text --render shorter conversations--> ends, marks

Everything that runs the template runs here: compiling it, where constants are folded (``10**(10**9)``),
rendering it, and the further renderings that find boundaries in the text. So a conversation costs one round
trip.

The process has a limit of memory. Time is the parent's matter: it kills what takes too long
(``weft.text.template_sandbox``). Characters are counted while the template writes.

A conversation arrives in marshal, which is fast and takes any JSON value; its sender is trusted. Answers go
back in msgpack, since the template is not.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import RequestError, WeftError
from weft.host import trim_heap
from weft.text.cache_marks import marked_characters
from weft.text.chat import ChatMessage, ChatTemplate
from weft.text.worker_process import read_frame, write_frame

_TRIM_ABOVE_BYTES = 1 << 20
"""After a conversation of this size memory goes back to the system."""


class TemplateStart(msgspec.Struct):
    source: str
    special_tokens: dict[str, str]
    origin: str
    chars_max: int
    memory_bytes: int


class TemplateFacts(msgspec.Struct, tag=True):
    """What requests must know of a template: the variables that it reads, and whether it reads tools."""

    variables: list[str]
    reads_tools: bool


class ChatPrompt(msgspec.Struct, tag=True):
    """A conversation as text. ``ends``: characters after which it may differ from another conversation;
    ``marks``: characters behind which the client set a ``cache_control``."""

    text: str
    ends: list[int]
    marks: list[int]


class Refused(msgspec.Struct, tag=True):
    message: str
    param: str | None = None
    code: str | None = None


Answer = TemplateFacts | ChatPrompt | Refused


def chat_prompt(template: ChatTemplate, messages: list[ChatMessage], *, chars_cut: int,
                tools: Sequence[Any] = (), variables: dict[str, Any] | None = None,
                **render: Any) -> ChatPrompt:
    """The text, and the places in it. A text of more than ``chars_cut`` characters gets no places: it is too
    long to be served. Raises RequestError."""
    text = template.render(messages, variables=variables, **render)
    if len(text) > chars_cut:
        return ChatPrompt(text, [], [])
    return ChatPrompt(text, template.boundaries(messages, text, variables=variables),
                      marked_characters(template, messages, text, variables=variables, tools=tools))


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
        return msgspec.msgpack.encode(Refused("the messages have half of a surrogate pair, which is no text",
                                              "messages"))


def _limit_memory(growth_bytes: int) -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = pages * resource.getpagesize() + growth_bytes
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = os.fdopen(0, "rb", buffering=0), sys.stdout.buffer
    frame = read_frame(questions)
    if frame is None:
        return 0
    start = msgspec.msgpack.decode(frame[1], type=TemplateStart)
    _limit_memory(start.memory_bytes)
    try:
        template = ChatTemplate(start.source, special_tokens=start.special_tokens, origin=start.origin,
                                chars_max=start.chars_max)
    except (WeftError, MemoryError, RecursionError, ValueError, OverflowError) as error:
        reason = error.message if isinstance(error, WeftError) else f"{start.origin}: {type(error).__name__}"
        write_frame(answers, 0, msgspec.msgpack.encode(Refused(reason, "--chat-template")))
        return 0
    facts = TemplateFacts(sorted(template.variables), template.reads_tools)
    write_frame(answers, 0, msgspec.msgpack.encode(facts))
    while (frame := read_frame(questions)) is not None:
        number, body = frame
        encoded = _encoded(_answer(template, body))
        write_frame(answers, number, encoded)
        if len(body) + len(encoded) > _TRIM_ABOVE_BYTES:
            del frame, body, encoded
            trim_heap()
    return 0


if __name__ == "__main__":
    sys.exit(main())
