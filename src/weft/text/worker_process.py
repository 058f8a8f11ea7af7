"""A child process that answers questions: frames over its stdin and stdout.

    parent                                child: python -m MODULE
    WorkerProcess(module, start)  -----> first frame: how to work
      .ask(body) -> Future[bytes] -----> (number, body)
                                  <----- (number, body), in any order

    frame = 8 bytes of length, 8 bytes of number, body

The child imports little, has no terminal signals, and ends when its stdin ends, so it never outlives its
parent. A thread of the parent reads the answers. When the child ends, every open question fails with
BrokenPipeError. A ``WorkerLane`` bounds the seconds of each job and replaces a child that was late or died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO

_PART_BYTES = 1 << 20
_LARGE_BYTES = 256 << 10
"""A larger body is written to the pipe in a thread."""


def write_frame(stream: IO[bytes], number: int, body: bytes) -> None:
    stream.write(len(body).to_bytes(8, "little") + number.to_bytes(8, "little") + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[int, bytes] | None:
    """None at the end of the stream. On an unbuffered stream it reads nothing behind the frame."""
    head = _read_all(stream, 16)
    if head is None:
        return None
    body = _read_all(stream, int.from_bytes(head[:8], "little"))
    return None if body is None else (int.from_bytes(head[8:], "little"), body)


def _read_all(stream: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(min(count, _PART_BYTES))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class WorkerProcess:
    """``start`` is the first frame, number 0. ``gone`` once the child has ended."""

    def __init__(self, module: str, start: bytes) -> None:
        # A session of its own: signals of the terminal are for the parent alone.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._lock = threading.Lock()
        self.first: Future[bytes] = Future()
        """The answer to ``start``, of a child that gives one."""
        self._questions: dict[int, Future[bytes]] = {0: self.first}
        self._numbers = 0
        self.gone = False
        with contextlib.suppress(OSError):  # a child that died at once is seen by its reader
            write_frame(self._stdin, 0, start)
        threading.Thread(target=self._read, args=(self._process.stdout,), name=f"answers of {module}",
                         daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, body: bytes) -> Future[bytes]:
        """Raises OSError if the child is gone; if it ends later, the future does."""
        with self._lock:
            if self.gone:
                raise BrokenPipeError
            self._numbers += 1
            answer = self._questions[self._numbers] = Future()
            answer.set_running_or_notify_cancel()  # from here on it cannot be cancelled
            number = self._numbers
            write_frame(self._stdin, number, body)
        return answer

    def end(self) -> None:
        """Kills the child. Idempotent."""
        self._process.kill()

    def _read(self, stream: IO[bytes]) -> None:
        while (frame := read_frame(stream)) is not None:
            with self._lock:
                answer = self._questions.pop(frame[0])
            answer.set_result(frame[1])
        self._process.wait()
        with self._lock:
            self.gone = True
            orphans = list(self._questions.values())
            self._questions.clear()
            with contextlib.suppress(OSError):
                self._stdin.close()
        stream.close()
        for answer in orphans:
            answer.set_exception(BrokenPipeError())


class WorkerLane:
    """A worker of the event loop that takes one job at a time, each within ``seconds``. ``waiting``: jobs
    that wait or run."""

    def __init__(self, start: Callable[[], WorkerProcess], seconds: float,
                 worker: WorkerProcess | None = None) -> None:
        self.waiting = 0
        self._start = start
        self._seconds = seconds
        self._worker = worker
        self._lock = asyncio.Lock()

    async def ask(self, body: bytes) -> bytes:
        """Raises TimeoutError for a job that takes too long, OSError for one that ends its process, and what
        ``start`` raises."""
        self.waiting += 1
        # A client that goes away must not leave half a question in the pipe: the task goes on without it.
        return await asyncio.shield(asyncio.ensure_future(self._ask(body)))

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    async def _ask(self, body: bytes) -> bytes:
        try:
            async with self._lock:
                if self._worker is None or self._worker.gone:
                    self._worker = await asyncio.to_thread(self._start)
                try:
                    async with asyncio.timeout(self._seconds):
                        answer = self._worker.ask(body) if len(body) < _LARGE_BYTES else (
                            await asyncio.to_thread(self._worker.ask, body))
                        return await asyncio.wrap_future(answer)
                except OSError:  # TimeoutError is one
                    self.end()
                    raise
        finally:
            self.waiting -= 1
