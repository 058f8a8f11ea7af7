"""The process that renders a model's chat template for the server.

    write(messages) --small--> worker 1 \\
                    --large--> worker 2 / --> ChatPrompt | RequestError

A template comes with the weights, from a stranger, and messages come from clients. Either can make a rendering run for
ever. So it runs in a process with limits of time, memory and characters. A worker that exceeds its time is killed; the
next conversation starts another. Small conversations have their own worker, so they never wait for a conversation of
megabytes. Each worker takes one conversation at a time, and its queue is bounded (law L11).
"""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.errors import CheckpointError, RequestError
from weft.text.chat import ChatMessage
from weft.text.control_tokens import NO_CONTROL, ControlTexts
from weft.text.current_request import API_KEY
from weft.text.template_worker import Answer, ChatPrompt, Refused, TemplateFacts, TemplateStart
from weft.text.tools.formats import NONE, ToolFormat
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

_decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
LARGE_BYTES = 256 << 10
"""Bytes from which on a conversation waits in the queue for large ones."""
LINE_MAX = 256
_START_WITHIN_S = 10.0
"""Seconds for the start of Python, which is slow on a busy machine."""


def template_worker(memory_bytes: int) -> BoundedWorker:
    """Return a process that gets its template later. Until then it imports the modules for rendering."""
    return BoundedWorker(JobFunction("weft.text.template_worker:prepare", memory_bytes))


class TemplateSandbox:
    """The process that renders one model's template, within limits. ``source``: the template; ``origin``: where it came
    from. ``worker``: a worker without a template yet. ``control``: tokens that texts of requests can only spell.
    ``calls``: the model's format of calls, if known. Raises CheckpointError if the template cannot be compiled within
    the limits."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        origin: str,
        seconds: float,
        chars_max: int,
        memory_bytes: int,
        worker: BoundedWorker | None = None,
        control: ControlTexts = NO_CONTROL,
        calls: ToolFormat | None = None,
    ) -> None:
        self.source = source
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._start = msgspec.msgpack.encode(
            TemplateStart(source, dict(special_tokens), origin, chars_max, control, calls.name if calls else NONE)
        )
        worker, facts = self._begun(worker or template_worker(memory_bytes))
        self._lanes = tuple(
            WorkerLane(self._worker, seconds, first, workers=2, line_max=LINE_MAX) for first in (worker, None)
        )
        self.variables = frozenset(facts.variables)
        self.reads_tools = facts.reads_tools

    async def write(self, messages: list[ChatMessage], **job: Any) -> ChatPrompt:
        """Render ``messages`` in a worker. ``job``: the arguments of ``weft.text.template_worker.chat_prompt``.

        Raise RequestError for a refusal of the template and for an exceeded limit, and EngineUnavailableError if too
        many conversations wait."""
        try:
            body = marshal.dumps({"messages": msgspec.to_builtins(messages), **job})
        except (RecursionError, ValueError):
            raise RequestError("messages: nested too deeply", param="messages") from None
        lane, key = self._lanes[len(body) >= LARGE_BYTES], API_KEY.get()
        lane.check_line(key, "conversations wait to be rendered")
        try:
            raw = await lane.ask(body, key)
        except TimeoutError:
            raise RequestError(
                f"the chat template takes more than {self._seconds:g} s for these messages (limits.template_seconds)",
                param="messages",
            ) from None
        except OSError:
            raise RequestError("the chat template ended its process on these messages", param="messages") from None
        answer = _decode_answer(raw) if len(raw) < LARGE_BYTES else await asyncio.to_thread(_decode_answer, raw)
        if isinstance(answer, Refused):
            raise RequestError(answer.message, param=answer.param, code=answer.code)
        assert isinstance(answer, ChatPrompt)
        return answer

    def close(self) -> None:
        for lane in self._lanes:
            lane.end()

    def _worker(self) -> BoundedWorker:
        return self._begun(template_worker(self._memory_bytes))[0]

    def _begun(self, worker: BoundedWorker) -> tuple[BoundedWorker, TemplateFacts]:
        """Return the worker, once it has compiled the template. Raise CheckpointError."""
        worker.begin(self._start)
        limit_s = self._seconds + _START_WITHIN_S
        try:
            raw = worker.receive(0, limit_s)
        except OSError:
            raise CheckpointError(
                "the chat template ended the process that compiled it", param="--chat-template"
            ) from None
        if raw is None:
            worker.end()
            raise CheckpointError(
                f"the chat template takes more than {limit_s:g} s to compile", param="--chat-template"
            )
        answer = _decode_answer(raw)
        if isinstance(answer, Refused):
            raise CheckpointError(answer.message, param="--chat-template")
        assert isinstance(answer, TemplateFacts)
        return worker, answer
