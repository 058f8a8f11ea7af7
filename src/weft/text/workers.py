"""Workers: processes that run functions on untrusted input, within bounds.

    parent                                       child: weft.text.worker_main
    BoundedWorker(JobFunction, start)  ------->  function(start) -> (first answer, job)      once
      .send(body) -> number  (number, body) -->  job(body)                                   each job
      .receive(number)       <-- (number, bytes)

    in place     jobs run one after another in the child: templates, large bodies
    forks=N      each job runs in a fork of the child, N at once: grammars

Time and memory of a job are limited. A child that runs jobs in place has a limit of memory, and the parent kills it
when a job is late. A fork has its own limits of CPU time, memory and stack, and leaves nothing in the child.

The child imports little, and has no terminal signals and no secret of the environment. A worker ends with its stdin, so
it never outlives the parent. When it ends, every open job fails with BrokenPipeError. A ``WorkerLane`` is one or two
workers of an event loop; a worker is replaced after a job that was late or killed it.

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
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import msgspec

from weft.environment import worker_variables
from weft.errors import EngineUnavailableError
from weft.shares import KeyShares
from weft.tasks import begin_task
from weft.text.worker_main import HEAD, JobFunction

_PART_BYTES = 64 << 10
"""Bytes of one read: the capacity of a pipe. A larger buffer would be allocated from the system each time."""
_PIPE_BYTES = 32 << 10
"""Most bytes that are written on the event loop; a larger body is written in a thread."""
_PATIENCE_S = 0.001
_TURN_S = 0.01
"""Seconds that a thread reads for all threads that wait for the same worker, before another takes its turn."""
_LINE_S = 0.005
"""Most seconds that queued jobs keep the event loop."""


class BoundedWorker:
    """A child process that runs jobs within bounds. ``start``: the argument of the function; its answer has the number
    0. Without ``start`` the child imports the modules that the function needs, and waits for ``begin``."""

    def __init__(self, function: JobFunction, start: bytes | None = None) -> None:
        # a new session: signals of the terminal reach only the parent
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
        with contextlib.suppress(OSError):  # ``receive`` notices a child that died at once
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
        """Send a job, and return its number. Raise OSError if the child is gone."""
        with self._writing:
            self._numbers += 1
            self._write(self._numbers, body)
            return self._numbers

    def receive(self, number: int, seconds: float) -> bytes | None:
        """Return the answer to the job; None if it has not come in time. Any thread may call this. Raise
        BrokenPipeError if the child has ended."""
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
        """Return the answer as ``receive`` does, on an event loop and without a limit of time."""
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
        """Kill the child. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _write(self, number: int, body: bytes) -> None:
        left = memoryview(HEAD.pack(len(body), number) + body)
        while left:
            left = left[os.write(self._input, left) :]

    def _read(self, seconds: float) -> bool:
        """Read for up to ``seconds``, and return whether the child has written anything. Raise BrokenPipeError."""
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


@dataclass(slots=True, eq=False)
class _Job:
    """A job of a lane. ``number``: the worker's number of the job, 0 if it was not sent."""

    key: str
    body: bytes
    number: int
    result: asyncio.Future[bytes]


class JobLine:
    """Waiting jobs, first come first served within an API key. ``next`` takes a job of the key that used the fewest
    seconds."""

    def __init__(self) -> None:
        self._shares = KeyShares()
        self._by_key: dict[str, deque[_Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def count(self, key: str) -> int:
        return len(self._by_key.get(key, ()))

    def add(self, job: _Job) -> None:
        if job.key not in self._by_key:
            self._shares.arrive(job.key, self._by_key)
            self._by_key[job.key] = deque()
        self._by_key[job.key].append(job)

    def next(self, barred: Container[str]) -> _Job | None:
        """Take the next job of a key that is not ``barred``."""
        keys = [key for key in self._by_key if key not in barred]
        if not keys:
            return None
        key = min(keys, key=lambda key: self._shares.used_s.get(key, 0.0))
        job = self._by_key[key].popleft()
        self._end(key)
        return job

    def drop(self, job: _Job) -> bool:
        """Remove ``job`` from the line, and return whether it was there."""
        if job not in self._by_key.get(job.key, ()):
            return False
        self._by_key[job.key].remove(job)
        self._end(job.key)
        return True

    def charge(self, key: str, seconds: float) -> None:
        self._shares.charge({key: seconds})

    def _end(self, key: str) -> None:
        if not self._by_key[key]:
            del self._by_key[key]


class WorkerLane:
    """Workers of the event loop, each of which takes one job at a time, within ``seconds``. ``waiting``: jobs that wait
    or run, at most ``line_max``. ``workers``: their greatest number; each is started when it is needed. One of several
    workers is left free for other API keys.

    A turn of a busy event loop takes as long as tens of jobs. With one job a turn, the queue would grow while the
    worker is idle, so waiting jobs are answered in one turn, for at most _LINE_S. Keys take turns, and a job whose
    client has left is not started."""

    def __init__(
        self,
        start: Callable[[], BoundedWorker],
        seconds: float,
        worker: BoundedWorker | None = None,
        *,
        workers: int = 1,
        line_max: int = 0,
    ) -> None:
        self.waiting = 0
        self._start = start
        self._seconds = seconds
        self._line_max = line_max
        self._workers: list[BoundedWorker | None] = [worker, *[None] * (workers - 1)]
        self._idle = list(range(workers))
        """Indices into ``_workers``."""
        self._line = JobLine()
        self._running: Counter[str] = Counter()
        self._serving: set[asyncio.Task[None]] = set()

    def check_line(self, key: str, what: str) -> None:
        """Raise EngineUnavailableError if ``line_max`` jobs wait, or half of that number from this API key. ``what``: a
        name of the jobs for the message."""
        own, half = self._line.count(key) + self._running[key], self._line_max // 2
        for count, limit in ((self.waiting, self._line_max), *(((own, half),) if key else ())):
            if count >= limit:
                whose = " of your API key" if limit == half else ""
                raise EngineUnavailableError(f"{count} {what}{whose}; the limit is {limit}. Try again later")

    async def ask(self, body: bytes, key: str = "") -> bytes:
        """Return the answer to a job. ``key``: the API key of the request. Raise TimeoutError for a job that takes too
        long, OSError for a job that kills its process, and the errors of ``start``."""
        number, worker = 0, self._workers[0]
        if worker is not None and 0 in self._idle and not len(self._line) and len(body) < _PIPE_BYTES:
            with contextlib.suppress(OSError):  # a child that has died meanwhile is replaced below
                number = worker.send(body)
            try:
                if number and (answer := worker.receive(number, _PATIENCE_S)) is not None:
                    return answer
            except OSError:
                self._end(0)
                raise
        self.waiting += 1
        job = _Job(key, body, number, asyncio.get_running_loop().create_future())
        if number:
            self._idle.remove(0)
            self._serve_at(0, job)
        else:
            self._line.add(job)
            self._serve_waiting()
        try:
            # A client that leaves must not leave half a job in the pipe: a job that has begun is finished.
            return await asyncio.shield(job.result)
        except asyncio.CancelledError:
            self.waiting -= self._line.drop(job)
            raise

    def end(self) -> None:
        for place in range(len(self._workers)):
            self._end(place)

    def _end(self, place: int) -> None:
        worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.end()

    def _next(self) -> _Job | None:
        most = max(1, len(self._workers) - 1)
        return self._line.next({key for key, count in self._running.items() if key and count >= most})

    def _serve_waiting(self) -> None:
        while self._idle and (job := self._next()) is not None:
            self._serve_at(self._idle.pop(0), job)

    def _serve_at(self, place: int, job: _Job) -> None:
        self._running[job.key] += 1
        begin_task(self._serve(place, job), self._serving)

    async def _serve(self, place: int, job: _Job | None) -> None:
        """Answer ``job`` and the jobs in the queue, and return."""
        began_s = time.monotonic()
        while job is not None:
            job_began_s = time.monotonic()
            try:
                job.result.set_result(await self._answer(place, job))
            except Exception as error:
                job.result.set_exception(error)
            now_s = time.monotonic()
            self._line.charge(job.key, now_s - job_began_s)
            self._running[job.key] -= 1
            if not self._running[job.key]:
                del self._running[job.key]
            self.waiting -= 1
            if now_s - began_s > _LINE_S:
                await asyncio.sleep(0)
                began_s = time.monotonic()
            job = self._next()
            if job is not None:
                self._running[job.key] += 1
        self._idle.append(place)
        self._idle.sort()
        self._serve_waiting()

    async def _answer(self, place: int, job: _Job) -> bytes:
        worker, number = self._workers[place], job.number
        if worker is None or worker.gone:
            worker = await asyncio.to_thread(self._start)
            self._workers[place] = worker
            number = 0
        try:
            async with asyncio.timeout(self._seconds):
                if not number and len(job.body) < _PIPE_BYTES:
                    number = worker.send(job.body)
                    if (answer := worker.receive(number, _PATIENCE_S)) is not None:
                        return answer
                number = number or await asyncio.to_thread(worker.send, job.body)
                return await worker.receive_later(number)
        except OSError:  # TimeoutError is an OSError
            self._end(place)
            raise
