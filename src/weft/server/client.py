"""The HTTP process's end of the engine: starts it, talks to it, notices its death.

    submit(requests) -> Stream         returns when the engine accepted them, raises what it rejects one with
    stream.events() -> [TokenEvent]    all that came since the last call; waits for at least one
    cancel(request_id, index)          at any time, for anything; unknown ids are ignored

One task reads reports and sorts their events into streams; one task waits for the process to end. Death
has one path: ``_die(reason)`` fails every open stream and every later submit with EngineUnavailableError,
which is a 503 with the reason.

A stream buffers at most the tokens of its answer, so a slow client costs what its answer is long (law
L11), never the engine's time.

The sockets live in a directory of this user's own (mode 0700), so that no other user can talk to the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio

from weft.config import EngineConfig
from weft.engine.sleep_state import AWAKE, Part, SleepState
from weft.engine.stats import EngineStats
from weft.errors import EngineUnavailableError, WeftError
from weft.info import ModelInfo
from weft.memory.prefix.shape import CacheShape
from weft.request import Request, TokenEvent
from weft.server.messages import (
    Cancel,
    Command,
    Fatal,
    Flush,
    Launch,
    Look,
    Progress,
    Ready,
    Report,
    Sleep,
    SleepMode,
    SleepNews,
    StepReport,
    Stop,
    Submit,
    Wake,
)

ASSEMBLE = "weft.assemble:assemble"
_LAST_WORDS_S = 0.5
"""How long after the end of the process its last report may still arrive."""
_SOCKET_PATH_MAX = 90
_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)

State = Literal["starting", "ready", "dead"]
Answer = TypeVar("Answer")


class Stream:
    """Events of one request or of several that belong together, in order. Made by ``submit``."""

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
        taken, self._events = self._events, []
        return taken


class EngineClient:
    """``on_progress`` gets the lines of a starting engine; ``on_step_tokens``, which may be set later, the
    sizes of its steps in tokens. ``record``: file and most bytes of a recording of its traffic."""

    def __init__(self, config: EngineConfig, *, factory: str = ASSEMBLE,
                 record: tuple[str, int] | None = None,
                 on_progress: Callable[[str], None] = lambda text: None) -> None:
        self.state: State = "starting"
        self.progress = "starting the engine"
        self.death: WeftError | None = None
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self.on_step_tokens: Callable[[list[int]], None] = lambda sizes: None
        self._config = config
        self._factory = factory
        self._record = record
        self._on_progress = on_progress
        self._streams: dict[str, Stream] = {}
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._flushes: dict[int, asyncio.Future[None]] = {}
        self._looks: dict[int, asyncio.Future[CacheShape]] = {}
        self._sleeps: dict[int, asyncio.Future[SleepNews]] = {}
        self._question_count = 0
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the process; ``ready`` waits for it."""
        self._folder = _socket_folder()
        context = self._context = zmq.asyncio.Context()
        self._commands, self._events = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        launch = Launch(factory=self._factory, config=dataclasses.asdict(self._config), folder=self._folder,
                        record=self._record)
        self._commands.bind(launch.commands_address)
        self._events.bind(launch.events_address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "weft.server.engine_process", stdin=asyncio.subprocess.PIPE,
            start_new_session=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
        assert self._process.stdin is not None
        body = _encoder.encode(launch)
        self._process.stdin.write(len(body).to_bytes(8, "little") + body)
        self._tasks = [asyncio.create_task(self._read_reports()), asyncio.create_task(self._wait_for_end())]

    async def ready(self) -> ModelInfo:
        """Raises the engine's own error (a UserError where the user can help it) when it cannot start."""
        while self.state == "starting":
            await self._next_change()
        if self.death is not None:
            raise self.death
        assert self.info is not None
        return self.info

    async def died(self) -> WeftError:
        """Waits until the engine is dead, and says why."""
        while self.death is None:
            await self._next_change()
        return self.death

    async def submit(self, requests: list[Request]) -> Stream:
        """All or none: raises what the engine rejects one of them with, or EngineUnavailableError."""
        self.check_alive()
        loop = asyncio.get_running_loop()
        stream = Stream([request.request_id for request in requests])
        answers = []
        for request_id in stream.request_ids:
            self._streams[request_id] = stream
            answers.append(loop.create_future())
            self._answers[request_id] = answers[-1]
        try:
            for request in requests:
                await self._send(Submit(request))
            await asyncio.gather(*answers)
        except BaseException:
            for request_id in stream.request_ids:  # some may have been accepted; the rest are unknown to it
                self.cancel(request_id)
            self.close(stream)
            raise
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Never waits: the command is queued."""
        if self.state == "ready":
            self._spawn(self._send(Cancel(request_id, index)))

    async def flush_cache(self) -> None:
        """Returns when the engine has dropped what its prefix cache held. Raises EngineUnavailableError."""
        await self._ask(self._flushes, Flush)

    async def cache_shape(self) -> CacheShape:
        """What its prefix cache holds. Raises EngineUnavailableError."""
        return await self._ask(self._looks, Look)

    @property
    def sleep_state(self) -> SleepState:
        """As of the engine's last news."""
        return AWAKE if self.stats is None else self.stats.sleep

    async def sleep(self, level: int, mode: SleepMode | None, timeout_s: float) -> SleepNews:
        """Returns when the engine sleeps. Raises what it refuses it with (a BusyError's status is 409), or
        EngineUnavailableError."""
        return await self._ask(self._sleeps, lambda number: Sleep(number, level, mode, timeout_s))

    async def wake_up(self, tags: list[Part] | None) -> SleepNews:
        """Returns when what is asked for is back. Raises what it fails with, or EngineUnavailableError."""
        return await self._ask(self._sleeps, lambda number: Wake(number, tags))

    async def _ask(self, answers: dict[int, asyncio.Future[Answer]],
                   question: Callable[[int], Command]) -> Answer:
        self.check_alive()
        number, self._question_count = self._question_count, self._question_count + 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answers[number] = answer
        try:
            await self._send(question(number))
            return await answer
        finally:
            del answers[number]

    def close(self, stream: Stream) -> None:
        """Events that still come for it are dropped."""
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
            self._answers.pop(request_id, None)

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineUnavailableError(self.death.message)
        if self.state != "ready":
            raise EngineUnavailableError(f"the engine is starting: {self.progress}")

    async def stop(self, reason: str, patience_s: float = 5.0) -> None:
        """Ends the process: asks, then kills. What still runs fails with ``reason``. Idempotent; also after a
        ``start`` that failed."""
        if self._stopping or self._process is None:
            return
        self._stopping = True
        was_ready = self.state == "ready"
        self._die(EngineUnavailableError(reason))
        if self._process.returncode is None:
            with contextlib.suppress(asyncio.TimeoutError):
                if was_ready:
                    await asyncio.wait_for(self._send(Stop()), patience_s)
                    await asyncio.wait_for(self._process.wait(), patience_s)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, command: Command) -> None:
        await self._commands.send(_encoder.encode(command))

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _read_reports(self) -> None:
        while True:
            report = _reports.decode(await self._events.recv())
            if isinstance(report, StepReport):
                self._take(report)
            elif isinstance(report, Progress):
                self.progress = report.text
                self._on_progress(report.text)
            elif isinstance(report, Ready):
                self.info, self.stats, self.state = report.info, report.stats, "ready"
                self._change()
            else:
                self._die(_fatal_error(report))

    def _take(self, report: StepReport) -> None:
        if report.stats is not None:
            self.stats = report.stats
        if report.step_tokens:
            self.on_step_tokens(report.step_tokens)
        for request_id in report.accepted:
            answer = self._answers.pop(request_id, None)
            if answer is not None and not answer.done():
                answer.set_result(None)
        for request_id, refusal in report.rejected:
            answer = self._answers.pop(request_id, None)
            if answer is not None and not answer.done():
                answer.set_exception(refusal.as_error())
        for number in report.flushed:
            done = self._flushes.get(number)
            if done is not None and not done.done():
                done.set_result(None)
        for number, shape in report.shapes:
            look = self._looks.get(number)
            if look is not None and not look.done():
                look.set_result(shape)
        for news in report.sleep:
            slept = self._sleeps.get(news.number)
            if slept is not None and not slept.done():
                if news.refusal is not None:
                    slept.set_exception(news.refusal.as_error())
                else:
                    slept.set_result(news)
        for event in report.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put(event)

    async def _wait_for_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping and self.death is None:
            with contextlib.suppress(asyncio.TimeoutError):  # its last words may still be on the way
                await asyncio.wait_for(self.died(), _LAST_WORDS_S)
        self._die(EngineUnavailableError(_exit_reason(code)))
        self._ended.set()

    def _die(self, error: WeftError) -> None:
        """The first reason is the one that is kept."""
        if self.death is None:
            self.death, self.state = error, "dead"
            if self.stats is not None:  # what ran in it runs no more
                self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0)
        unavailable = EngineUnavailableError(self.death.message)
        for stream in self._streams.values():
            stream.fail(unavailable)
        asked: list[asyncio.Future[Any]] = [*self._answers.values(), *self._flushes.values(),
                                            *self._looks.values(), *self._sleeps.values()]
        for answer in asked:
            if not answer.done():
                answer.set_exception(unavailable)
        self._answers.clear()
        self._change()

    async def _next_change(self) -> None:
        changed = self._changed
        await changed.wait()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _fatal_error(report: Fatal) -> WeftError:
    if report.refusal is not None:
        return report.refusal.as_error()
    return EngineUnavailableError(f"the engine failed: {report.message}")


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"the engine process was ended by {name}{hint}"


def _socket_folder() -> str:
    """Private, and short enough for a socket's path (about 100 bytes in most systems)."""
    folder = tempfile.mkdtemp(prefix="weft-")
    if len(folder) > _SOCKET_PATH_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="weft-", dir="/tmp")
    return folder
