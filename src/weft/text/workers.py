"""Workers: processes that run functions on input of strangers, within bounds.

    parent                                       child: weft.text.worker_main
    BoundedWorker(JobFunction, start)  ------->  function(start) -> (first answer, job)      once
      .send(body) -> number  (number, body) -->  job(body)                                   each job
      .receive(number)       <-- (number, bytes)

    in place     jobs run one after another in the child: templates, large bodies
    forks=N      each job runs in a fork of the child, N at once: grammars

A job has seconds, bytes and a function. A child in place has a limit of memory, and the parent kills it when
a job is late. A fork has limits of CPU time, memory and stack of its own, and leaves nothing behind.

The child imports little, and has no terminal signals and no secret of the environment. It ends when its stdin
ends, so it never outlives its parent. When it ends, every open job fails with BrokenPipeError. A ``WorkerLane``
is one worker of an event loop, replaced after a job that was late or deadly.

The lane waits for a millisecond before it yields. Most conversations are rendered in a tenth of that. A
future, a task and a thread for each cost more than the rendering did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from weft.environment import worker_variables
from weft.text.worker_main import HEAD, JobFunction

_PART_BYTES = 64 << 10
"""All that a pipe holds. More would be memory of its own from the system, for each read."""
_PIPE_BYTES = 32 << 10
"""A pipe takes this much at once; a larger body is written in a thread."""
_PATIENCE_S = 0.001
_TURN_S = 0.01
"""Threads that wait for one worker read in turns."""
_LINE_S = 0.005
"""A line of jobs keeps the event loop for so long."""


class BoundedWorker:
    """``start`` goes to the function. The answer to it has the number 0. Without ``start`` the child imports
    what the function needs, and waits for ``begin``."""

    def __init__(self, function: JobFunction, start: bytes | None = None) -> None:
        # A session of its own: signals of the terminal are for the parent alone.
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", "from weft.text.worker_main import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**worker_variables(os.environ), "MALLOC_ARENA_MAX": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._unread = bytearray()
        self._answers: dict[int, bytes] = {}
        self._numbers = 0
        with contextlib.suppress(OSError):  # a child that died at once is seen by ``receive``
            self._write(0, msgspec.msgpack.encode(function))
        if start is not None:
            self.begin(start)

    def begin(self, start: bytes) -> None:
        with contextlib.suppress(OSError):
            self._write(0, start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def send(self, body: bytes) -> int:
        """The number of the job. Raises OSError if the child is gone."""
        with self._writing:
            self._numbers += 1
            self._write(self._numbers, body)
            return self._numbers

    def receive(self, number: int, seconds: float) -> bytes | None:
        """The answer to the job, None if it has not come in time. Any thread. Raises BrokenPipeError when the
        child has ended."""
        deadline_s = time.monotonic() + seconds
        while True:
            with self._reading:
                answer = self._answers.pop(number, None)
                left_s = deadline_s - time.monotonic()
                if answer is None and self._read(max(0.0, min(left_s, _TURN_S))):
                    answer = self._answers.pop(number, None)
                if answer is not None or left_s <= 0:
                    return answer

    async def receive_later(self, number: int) -> bytes:
        """Like ``receive``, on an event loop and without a limit of time."""
        loop = asyncio.get_running_loop()
        while (answer := self.receive(number, 0.0)) is None:
            readable = asyncio.Event()
            loop.add_reader(self._output, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._output)
        return answer

    def end(self) -> None:
        """Kills the child. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _write(self, number: int, body: bytes) -> None:
        left = memoryview(HEAD.pack(len(body), number) + body)
        while left:
            left = left[os.write(self._input, left) :]

    def _read(self, seconds: float) -> bool:
        """Takes what the child has written by then; whether it was something. Raises BrokenPipeError."""
        if not self._poll.poll(seconds * 1e3):
            return False
        part = os.read(self._output, _PART_BYTES)
        if not part:
            raise BrokenPipeError
        self._unread += part
        while len(self._unread) >= HEAD.size:
            size, number = HEAD.unpack_from(self._unread)
            end = HEAD.size + size
            if len(self._unread) < end:
                break
            self._answers[number] = bytes(self._unread[HEAD.size : end])
            del self._unread[:end]
        return True


class WorkerLane:
    """A worker of the event loop that takes one job at a time, each within ``seconds``. ``waiting``: jobs
    that wait or run.

    A turn of a busy loop takes as long as tens of jobs. With one job a turn, the line grows while the worker
    has nothing to do. So those that wait are answered in one turn, up to _LINE_S."""

    def __init__(self, start: Callable[[], BoundedWorker], seconds: float, worker: BoundedWorker | None = None) -> None:
        self.waiting = 0
        self._start = start
        self._seconds = seconds
        self._worker = worker
        self._line: deque[tuple[bytes, int, asyncio.Future[bytes]]] = deque()
        self._serving: asyncio.Task[None] | None = None

    async def ask(self, body: bytes) -> bytes:
        """Raises TimeoutError for a job that takes too long, OSError for one that ends its process, and what
        ``start`` raises."""
        number = 0
        if self._worker is not None and not self.waiting and len(body) < _PIPE_BYTES:
            with contextlib.suppress(OSError):  # a child that has died since is replaced below
                number = self._worker.send(body)
            try:
                if number and (answer := self._worker.receive(number, _PATIENCE_S)) is not None:
                    return answer
            except OSError:
                self.end()
                raise
        self.waiting += 1
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._line.append((body, number, result))
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._serve())
        # A client that goes away must not leave half a question in the pipe: the job goes on without it.
        return await asyncio.shield(result)

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    async def _serve(self) -> None:
        """Answers those in the line, and returns."""
        try:
            began_s = time.monotonic()
            while self._line:
                body, number, result = self._line.popleft()
                try:
                    result.set_result(await self._answer(body, number))
                except Exception as error:
                    result.set_exception(error)
                self.waiting -= 1
                if time.monotonic() - began_s > _LINE_S:
                    await asyncio.sleep(0)
                    began_s = time.monotonic()
        finally:
            self._serving = None

    async def _answer(self, body: bytes, number: int) -> bytes:
        """``number``: of the job, 0 if it was not sent."""
        if self._worker is None or self._worker.gone:
            self._worker = await asyncio.to_thread(self._start)
            number = 0
        try:
            async with asyncio.timeout(self._seconds):
                if not number and len(body) < _PIPE_BYTES:
                    number = self._worker.send(body)
                    if (answer := self._worker.receive(number, _PATIENCE_S)) is not None:
                        return answer
                number = number or await asyncio.to_thread(self._worker.send, body)
                return await self._worker.receive_later(number)
        except OSError:  # TimeoutError is one
            self.end()
            raise
