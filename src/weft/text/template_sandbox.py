"""The server's end of the processes that render its chat template (``weft.text.template_worker``).

    write(messages) --small--> worker 1 \\
                    --large--> worker 2 / --> ChatPrompt | RequestError

A template comes with the weights, from a stranger, and messages come from clients. Either can make a
rendering endless. So it runs in a process with limits of time, memory and characters. A worker that exceeds
its time is killed; the next conversation starts another.

Small conversations have a worker of their own: they never wait for one of megabytes. Each worker takes one
conversation at a time, and the line before it is bounded (law L11).
"""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.errors import CheckpointError, EngineUnavailableError, RequestError
from weft.text.chat import ChatMessage
from weft.text.template_worker import Answer, ChatPrompt, Refused, TemplateFacts, TemplateStart
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane

LARGE_BYTES = 256 << 10
"""From here on a conversation waits in the line of large ones."""
LINE_MAX = 256
_START_WITHIN_S = 10.0
"""Starting Python takes its time too, on a machine that is busy."""


class TemplateSandbox:
    """``source`` is the template, ``origin`` says where it came from. Raises CheckpointError if it cannot be
    compiled within the limits."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], origin: str, seconds: float,
                 chars_max: int, memory_bytes: int) -> None:
        self.source = source
        self._seconds = seconds
        self._function = JobFunction("weft.text.template_worker:prepare", memory_bytes)
        self._start = msgspec.msgpack.encode(TemplateStart(source, dict(special_tokens), origin, chars_max))
        worker, facts = self._started()
        self._lanes = (WorkerLane(self._worker, seconds, worker), WorkerLane(self._worker, seconds))
        self.variables = frozenset(facts.variables)
        self.reads_tools = facts.reads_tools

    async def write(self, messages: list[ChatMessage], **job: Any) -> ChatPrompt:
        """``job``: the arguments of ``weft.text.template_worker.chat_prompt``.

        Raises RequestError for what the template refuses and for what exceeds the limits, and
        EngineUnavailableError where too many conversations wait."""
        try:
            body = marshal.dumps({"messages": msgspec.to_builtins(messages), **job})
        except (RecursionError, ValueError):
            raise RequestError("messages: nested too deeply", param="messages") from None
        lane = self._lanes[len(body) >= LARGE_BYTES]
        if lane.waiting >= LINE_MAX:
            raise EngineUnavailableError(f"{lane.waiting} conversations wait to be rendered; the limit is "
                                         f"{LINE_MAX}. Try again later")
        try:
            raw = await lane.ask(body)
        except TimeoutError:
            raise RequestError("the chat template takes more than "
                               f"{self._seconds:g} s for these messages (limits.template_seconds)",
                               param="messages") from None
        except OSError:
            raise RequestError("the chat template ended its process on these messages",
                               param="messages") from None
        answer = _decode(raw) if len(raw) < LARGE_BYTES else await asyncio.to_thread(_decode, raw)
        if isinstance(answer, Refused):
            raise RequestError(answer.message, param=answer.param, code=answer.code)
        assert isinstance(answer, ChatPrompt)
        return answer

    def close(self) -> None:
        for lane in self._lanes:
            lane.end()

    def _worker(self) -> BoundedWorker:
        return self._started()[0]

    def _started(self) -> tuple[BoundedWorker, TemplateFacts]:
        """A worker that has compiled the template. Raises CheckpointError."""
        worker = BoundedWorker(self._function, self._start)
        limit_s = self._seconds + _START_WITHIN_S
        try:
            raw = worker.receive(0, limit_s)
        except OSError:
            raise CheckpointError("the chat template ended the process that compiled it",
                                  param="--chat-template") from None
        if raw is None:
            worker.end()
            raise CheckpointError(f"the chat template takes more than {limit_s:g} s to compile",
                                  param="--chat-template")
        answer = _decode(raw)
        if isinstance(answer, Refused):
            raise CheckpointError(answer.message, param="--chat-template")
        assert isinstance(answer, TemplateFacts)
        return worker, answer


def _decode(raw: bytes) -> Answer:
    answer: Answer = msgspec.msgpack.decode(raw, type=Answer)
    return answer
