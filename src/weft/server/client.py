"""The HTTP process's end of the engine: starts it, talks to it, notices its death.

    submit(requests) -> RequestStream  returns when the engine accepts them, raises when it refuses one
    stream.events() -> [TokenEvent]     all events since the last call; waits for at least one
    cancel(request_id, index)           at any time; unknown ids are ignored

One task reads reports and sorts their events into streams. One task waits for the process to end. One task
watches the heartbeat (``weft.server.heartbeat``). Death has one path: ``_die(reason)`` fails every open
stream, every question and every later submit with EngineUnavailableError, which is a 503 with the reason.

A stream buffers at most the tokens of its answer (law L11). A slow client costs that memory, and never the
engine's time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import msgspec

from weft.config import EngineConfig
from weft.engine.sleep_state import AWAKE, Part, SleepState
from weft.engine.stats import EngineStats
from weft.errors import EngineUnavailableError, WeftError
from weft.info import ModelInfo
from weft.memory.prefix.shape import CacheShape
from weft.request import Request, TokenEvent
from weft.server.config import RecordingTarget
from weft.server.engine_link import EngineLink, PendingReplies, exit_reason
from weft.server.heartbeat import HeartMonitor
from weft.server.messages import (
    Beat,
    Cancel,
    Command,
    Fatal,
    Flush,
    Look,
    Progress,
    Ready,
    Sleep,
    SleepMode,
    SleepOutcome,
    StepReport,
    Stop,
    Submit,
    Wake,
)

ASSEMBLE = "weft.assemble:assemble"
STALL_AFTER_S = 10.0
_LAST_WORDS_S = 0.5
"""How long after the end of the process its last report may still arrive."""

State = Literal["starting", "ready", "dead"]


class RequestStream:
    """Events of one request, or of several that belong together, in order. ``submit`` returns it."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: WeftError | None = None
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._news.set()

    def fail(self, error: WeftError) -> None:
        self._error = error
        self._news.set()

    async def events(self) -> list[TokenEvent]:
        """Raises EngineUnavailableError when the engine died, after the events that came before."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events, self._events = self._events, []
        return events


class EngineClient:
    """``on_progress`` gets the lines of a starting engine; ``on_step_tokens``, which may be set later, the
    sizes of its steps in tokens. ``record``: where a recording of its traffic goes. ``heart``
    knows the seconds since the last sign of life, and a stall after ``stall_after_s`` (0: never)."""

    def __init__(self, config: EngineConfig, *, factory: str = ASSEMBLE,
                 record: RecordingTarget | None = None, stall_after_s: float = STALL_AFTER_S,
                 on_progress: Callable[[str], None] = lambda text: None) -> None:
        self.state: State = "starting"
        self.progress = "starting the engine"
        self.death: WeftError | None = None
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.heart = HeartMonitor(stall_after_s)
        self.on_step_tokens: Callable[[list[int]], None] = lambda sizes: None
        self._config = config
        self._factory = factory
        self._record = record
        self._on_progress = on_progress
        self._link = EngineLink()
        self._streams: dict[str, RequestStream] = {}
        self._replies = PendingReplies()
        self._started, self._died, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the process; ``ready`` waits for it."""
        await self._link.start(factory=self._factory, config=self._config, record=self._record,
                               beat_s=self.heart.beat_s)
        self._tasks = [asyncio.create_task(self._read_reports()), asyncio.create_task(self._wait_for_end())]

    async def ready(self) -> ModelInfo:
        """Raises the engine's own error (a UserError where the user can help it) when it cannot start."""
        await self._started.wait()
        if self.death is not None:
            raise self.death
        assert self.info is not None
        return self.info

    async def died(self) -> WeftError:
        """Waits until the engine is dead, and says why."""
        await self._died.wait()
        assert self.death is not None
        return self.death

    # ------------------------------------------------------------------ requests

    async def submit(self, requests: list[Request]) -> RequestStream:
        """All or none: raises the refusal of the first that the engine refuses, or EngineUnavailableError."""
        self.check_alive()
        stream = RequestStream([request.request_id for request in requests])
        self._streams.update(dict.fromkeys(stream.request_ids, stream))
        try:
            with contextlib.ExitStack() as expected:
                replies = []
                for request in requests:
                    number, reply = expected.enter_context(self._replies.expect())
                    replies.append(reply)
                    await self._link.send(Submit(number, request))
                await asyncio.gather(*replies)
        except BaseException:
            for request_id in stream.request_ids:  # those that were accepted; the engine ignores the others
                self.cancel(request_id)
            self.close(stream)
            raise
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Never waits: the command is queued."""
        if self.state == "ready":
            self._link.post(Cancel(request_id, index))

    def close(self, stream: RequestStream) -> None:
        """Later events of the stream are dropped."""
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)

    # ------------------------------------------------------------------ questions

    async def flush_cache(self) -> None:
        """Returns when the engine has dropped what its prefix cache held. Raises EngineUnavailableError."""
        await self._ask(Flush)

    async def cache_shape(self) -> CacheShape:
        """What its prefix cache holds. Raises EngineUnavailableError."""
        return msgspec.msgpack.decode(await self._ask(Look), type=CacheShape)

    @property
    def sleep_state(self) -> SleepState:
        """By the engine's last report."""
        return AWAKE if self.stats is None else self.stats.sleep

    async def sleep(self, level: int, mode: SleepMode | None, timeout_s: float) -> SleepOutcome:
        """Returns when the engine sleeps. Raises the engine's refusal (the status of a BusyError is 409), or
        EngineUnavailableError."""
        reply = await self._ask(lambda number: Sleep(number, level, mode, timeout_s))
        return msgspec.msgpack.decode(reply, type=SleepOutcome)

    async def wake_up(self, tags: list[Part] | None) -> SleepOutcome:
        """Returns when the parts are back. Raises the error of waking, or EngineUnavailableError."""
        reply = await self._ask(lambda number: Wake(number, tags))
        return msgspec.msgpack.decode(reply, type=SleepOutcome)

    async def _ask(self, question: Callable[[int], Command]) -> msgspec.Raw:
        self.check_alive()
        with self._replies.expect() as (number, reply):
            await self._link.send(question(number))
            return await reply

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineUnavailableError(self.death.message)
        if self.state != "ready":
            raise EngineUnavailableError(f"the engine is starting: {self.progress}")

    # ------------------------------------------------------------------ reports and the end

    async def stop(self, reason: str, patience_s: float = 5.0) -> None:
        """Ends the process: asks, then kills. A process that has stalled is killed at once. Open streams fail
        with ``reason``. Idempotent; also after a ``start`` that failed."""
        if self._stopping or not self._link.started:
            return
        self._stopping = True
        can_answer = self.state == "ready" and self._link.running and self.heart.stall is None
        self._die(EngineUnavailableError(reason))
        if can_answer:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._link.send(Stop()), patience_s)
                await asyncio.wait_for(self._link.wait(), patience_s)
        await self._link.kill()
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        self._link.close()

    async def _read_reports(self) -> None:
        while True:
            report = await self._link.receive()
            self.heart.sign_of_life(report.step_s if isinstance(report, Beat) else 0.0)
            if isinstance(report, StepReport):
                self._take(report)
            elif isinstance(report, Progress):
                self.progress = report.text
                self._on_progress(report.text)
            elif isinstance(report, Ready):
                self.info, self.stats, self.state = report.info, report.stats, "ready"
                self._started.set()
                self._tasks.append(asyncio.create_task(self.heart.watch()))
            elif isinstance(report, Fatal):
                self._die(_fatal_error(report))

    def _take(self, report: StepReport) -> None:
        if report.stats is not None:
            self.stats = report.stats
        if report.step_tokens:
            self.on_step_tokens(report.step_tokens)
        for reply in report.replies:
            self._replies.resolve(reply)
        for event in report.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put(event)

    async def _wait_for_end(self) -> None:
        code = await self._link.wait()
        if not self._stopping and self.death is None:
            with contextlib.suppress(asyncio.TimeoutError):  # its last words may still be on the way
                await asyncio.wait_for(self.died(), _LAST_WORDS_S)
        self._die(EngineUnavailableError(exit_reason(code)))
        self._ended.set()

    def _die(self, error: WeftError) -> None:
        """The first reason stays."""
        if self.death is None:
            self.death, self.state = error, "dead"
            if self.stats is not None:  # nothing runs in it any more
                self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0)
        unavailable = EngineUnavailableError(self.death.message)
        for stream in self._streams.values():
            stream.fail(unavailable)
        self._replies.fail_all(unavailable)
        self._started.set()
        self._died.set()


def _fatal_error(report: Fatal) -> WeftError:
    if report.refusal is not None:
        return report.refusal.as_error()
    return EngineUnavailableError(f"the engine failed: {report.message}")
