"""The engine's own process: ``python -m weft.server.engine_process``, started by ``weft.server.client``.

    stdin:     one Launch message, then nothing; its end means that the parent is gone
    commands:  zmq PULL, read between two steps without waiting; waited for when there is no work
    events:    zmq PUSH, at most one StepReport per step

        take_commands -> core.step() -> report      while there is work
        (short wait) -> audit -> (wait)             when there is none: no busy loop

Tokenizing, JSON and slow clients live in the other process and never delay a step. Signals of the
terminal do not reach this one (it has a session of its own): the parent decides about Ctrl-C.

It never outlives its parent: a thread waits for the end of stdin, which the kernel delivers however the
parent ended, and leaves at once. It never ends silently: what stops it is sent as Fatal first.

The audit (law L1: recount the memory from its owners) runs once after each busy spell, when the engine
has had nothing to do for a moment; a failed audit is fatal, because memory that does not add up gives
wrong answers.

Rejected: ``multiprocessing`` (its spawn imports the caller's ``__main__`` again, and its children share
the parent's signals); a thread in the HTTP process (the interpreter lock would make each step wait for
JSON).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import zmq

from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.errors import RequestError, UserError, WeftError
from weft.memory.prefix.shape import CacheShape
from weft.request import Request, TokenEvent
from weft.server.grammar_queue import GrammarQueue
from weft.server.messages import (
    Cancel,
    Command,
    Fatal,
    Flush,
    Launch,
    Look,
    Progress,
    Ready,
    Refusal,
    Report,
    Sleep,
    StepReport,
    Submit,
    Wake,
)
from weft.server.sleep_queue import SleepQueue

if TYPE_CHECKING:
    from weft.server.recorder import Recorder

_AUDIT_AFTER_MS = 100
_GRAMMAR_LOOK_MS = 2
"""While a grammar is compiled and nothing else is to do, its thread is looked after so often."""
_STATS_EVERY_S = 0.1
_LINGER_MS = 2000
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)


class EngineLoop:
    """Steps a core until a Stop command. ``commands`` and ``events`` are connected sockets."""

    def __init__(self, core: EngineCore, commands: zmq.Socket[bytes], events: zmq.Socket[bytes],
                 recorder: Recorder | None = None) -> None:
        self._core = core
        self._recorder = recorder
        self._commands = commands
        self._events = events
        self._stopping = False
        self._queue = GrammarQueue(core.grammars, core.sizes.queue_max)
        self._sleep_queue = SleepQueue(core)
        self._accepted: list[str] = []
        self._rejected: list[tuple[str, Refusal]] = []
        self._flushed: list[int] = []
        self._shapes: list[tuple[int, CacheShape]] = []
        self._step_tokens: list[int] = []
        self._stats_due_s = 0.0

    def run(self) -> None:
        """Raises what ended the engine: a failure of the executor, or a failed audit."""
        audited = True
        while not self._stopping:
            self._sleep_queue.look()
            if self._sleep_queue.news and not self._core.has_work:
                self._report([])
            if self._core.has_work:
                self._take_commands()
                computed_before = self._core.computed_tokens
                events = self._core.step()
                computed = self._core.computed_tokens - computed_before
                if computed:  # else the step only gave memory back
                    self._step_tokens.append(computed)
                self._report(events)
                if self._core.failure is not None:
                    raise self._core.failure
                audited = False
                continue
            if self._queue.busy:
                self._commands.poll(_GRAMMAR_LOOK_MS)
            else:
                if not audited and not self._commands.poll(_AUDIT_AFTER_MS):
                    self._core.audit()
                    audited = True
                self._commands.poll()
            self._take_commands()
            if not self._core.has_work and self._has_answers:
                self._report([])
        self._queue.close()

    @property
    def _has_answers(self) -> bool:
        return bool(self._accepted or self._rejected or self._flushed or self._shapes
                    or self._sleep_queue.news)

    def _take_commands(self) -> None:
        for request, refused in self._queue.ready():
            self._submit(request, refused)
        while True:
            try:
                raw = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = _commands.decode(raw)
            if isinstance(command, Submit):
                self._submit(command.request)
            elif isinstance(command, Cancel):
                if self._recorder is not None:
                    self._recorder.cancelled(command.request_id, command.index)
                self._queue.cancel(command.request_id)
                self._core.cancel(command.request_id, command.index)
            elif isinstance(command, Flush):
                self._core.flush_cache()
                self._flushed.append(command.number)
            elif isinstance(command, Look):
                self._shapes.append((command.number, self._core.cache_shape()))
            elif isinstance(command, Sleep | Wake):
                self._sleep_queue.take(command)
            else:
                self._stopping = True

    def _submit(self, request: Request, refused: WeftError | None = None) -> None:
        """``refused``: what was wrong with its grammar."""
        try:
            if refused is not None:
                raise refused
            self._sleep_queue.check_open()
            if self._queue.take(request):
                return
            self._core.submit(request)
        except WeftError as error:
            self._rejected.append((request.request_id, Refusal.of(error)))
        else:
            self._accepted.append(request.request_id)
            if self._recorder is not None:
                self._recorder.accepted(request)

    def _report(self, events: list[TokenEvent]) -> None:
        if self._recorder is not None:
            self._recorder.events(events)
        now = time.monotonic()
        stats = None
        # Whoever saw a request come or end finds it counted: its news and the counters travel together.
        news = bool(self._accepted) or any(event.finish_reason is not None for event in events)
        slept = self._sleep_queue.news
        if news or now >= self._stats_due_s or self._flushed or slept or not self._core.has_work:
            stats = self._core.stats()
            self._stats_due_s = now + _STATS_EVERY_S
        if events or stats is not None or self._has_answers:
            send(self._events, StepReport(accepted=self._accepted, rejected=self._rejected, events=events,
                                          flushed=self._flushed, shapes=self._shapes, sleep=slept,
                                          step_tokens=self._step_tokens, stats=stats))
            self._accepted, self._rejected, self._flushed, self._step_tokens = [], [], [], []
            self._shapes, self._sleep_queue.news = [], []


def start_recording(launch: Launch, made: Any) -> Recorder | None:
    """Raises ConfigError where the file cannot be made."""
    if launch.record is None:
        return None
    from weft.server.recorder import Recorder

    file, limit_bytes = launch.record
    return Recorder(Path(file), made.core, model=made.info.name, clock=time.monotonic,
                    checkpoints=str(launch.config.get("checkpoints", "auto")), limit_bytes=limit_bytes)


def send(socket: zmq.Socket[bytes], report: Report) -> None:
    socket.send(_encoder.encode(report))


def build(launch: Launch, events: zmq.Socket[bytes]) -> Any:
    """What the factory makes: an object with ``core`` (EngineCore) and ``info`` (ModelInfo)."""
    module, _, function = launch.factory.partition(":")
    factory = getattr(importlib.import_module(module), function)
    return factory(EngineConfig(**launch.config), on_progress=lambda text: send(events, Progress(str(text))))


def read_launch(stream: BinaryIO) -> Launch:
    """Eight bytes of length, then msgpack. Raises EOFError when the parent went away before."""
    size = stream.read(8)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(body) < int.from_bytes(size, "little"):
        raise EOFError("the parent process ended before it said what to build")
    return msgspec.msgpack.decode(body, type=Launch)


def die_with_parent(descriptor: int, folder: str) -> None:
    """Leaves the process when the other end of this pipe is closed, whatever else is going on; first the
    folder that the parent can no longer remove."""

    def wait() -> None:
        os.read(descriptor, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    die_with_parent(sys.stdin.fileno(), launch.folder)
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(launch.commands_address)
    events.connect(launch.events_address)
    try:
        made = build(launch, events)
        with contextlib.suppress(RequestError):  # a model that no grammar can follow refuses them by request
            made.core.grammars.warm()
        recorder = start_recording(launch, made)
        send(events, Ready(made.info, made.core.stats()))
        try:
            EngineLoop(made.core, commands, events, recorder).run()
        finally:
            last = made.core.close()
            if recorder is not None:
                recorder.events(last)
                recorder.close()
        return 0
    except UserError as error:
        send(events, Fatal(message=error.message, refusal=Refusal.of(error)))
        return 2
    except BaseException as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        send(events, Fatal(message=f"{type(error).__name__}: {error}", traceback=text))
        return 1
    finally:
        context.destroy(linger=_LINGER_MS)


if __name__ == "__main__":
    _code = main()
    sys.stderr.flush()
    os._exit(_code)  # taking torch apart module by module takes a second or two, and stopping waits for it
