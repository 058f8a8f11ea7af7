"""The child of ``weft.text.workers``: it runs jobs in place, or each in a fork.

    stdin:   a JobFunction, its start, then jobs; its end means that the parent is gone
    stdout:  one answer for the start and one for each job, with the job's number

                            fork per job
    start -> function ---------------------> limits -> job(body) -> answer -> exit
             (once, shared)                  '--- may crash, hang or grow ---'

A function for forks has ``failed``: the answer for a fork that ended at a limit. The loop has only one thread, so that
forking is safe. This module imports no torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import selectors
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec

from weft.host import trim_heap

HEAD = struct.Struct("<QQ")
"""Head of a frame: the length of its body, and its number."""
_PART_BYTES = 1 << 20
Limit = Literal["seconds", "memory", "stack"]
_TRIM_ABOVE_BYTES = 1 << 20
"""Size of a job, bytes, above which memory is returned to the system afterwards."""
_WALL_FACTOR = 4
"""Wall-clock limit of a fork, as a multiple of its CPU limit."""
_PRIORITY = 10


class JobFunction(msgspec.Struct, frozen=True):
    """The function of a worker, and its limits. ``name``: "module:function" of the child. ``memory_bytes``: most growth
    of the child, or of a fork; 0: no limit. ``seconds`` of CPU and ``stack_bytes`` bound a fork."""

    name: str
    memory_bytes: int = 0
    forks: int = 0
    seconds: int = 0
    stack_bytes: int = 0


def write_frame(stream: IO[bytes], number: int, body: bytes) -> None:
    stream.write(HEAD.pack(len(body), number) + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[int, bytes] | None:
    """Return (number, body); None at the end of the stream. From an unbuffered stream, read nothing after the frame."""
    head = _read_all(stream, HEAD.size)
    if head is None:
        return None
    size, number = HEAD.unpack(head)
    body = _read_all(stream, size)
    return None if body is None else (number, body)


def _read_all(stream: IO[bytes], count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(min(count, _PART_BYTES))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class ForkedJob(Protocol):
    def __call__(self, body: bytes) -> bytes: ...

    def failed(self, limit: Limit) -> bytes:
        """Return the answer for a job that its fork did not survive."""


def limit_memory(growth_bytes: int) -> None:
    """Limit the growth of this process, bytes (0: no limit), and disable core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if growth_bytes and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + growth_bytes)


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


@dataclass(slots=True)
class _Fork:
    """A job that runs in a fork. ``output``: bytes read from its pipe so far."""

    number: int
    pid: int
    pipe: int
    deadline_s: float
    output: bytes = b""
    late: bool = False


class _Forks:
    """The forks of a worker. ``jobs`` is unbuffered, so that the selector sees unread bytes."""

    def __init__(self, jobs: IO[bytes], function: JobFunction, job: ForkedJob) -> None:
        self._jobs = jobs
        self._function = function
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._selector.register(jobs, selectors.EVENT_READ)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._forks: dict[int, _Fork] = {}
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        while True:
            while self._waiting and len(self._forks) < self._function.forks:
                self._fork(*self._waiting.popleft())
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    frame = read_frame(self._jobs)
                    if frame is None:
                        return
                    self._waiting.append(frame)
                else:
                    self._read(key.data)
            now_s = time.monotonic()
            for fork in self._forks.values():
                if not fork.late and now_s >= fork.deadline_s:
                    fork.late = True
                    os.kill(fork.pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)

    def _patience_s(self) -> float | None:
        if not self._forks:
            return None
        return max(min(fork.deadline_s for fork in self._forks.values()) - time.monotonic(), 0.01)

    def _fork(self, number: int, body: bytes) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run_in_fork(self._function, self._job, body, writing)
        os.close(writing)
        fork = _Fork(number, pid, reading, time.monotonic() + self._function.seconds * _WALL_FACTOR)
        self._forks[pid] = fork
        self._selector.register(reading, selectors.EVENT_READ, fork)

    def _read(self, fork: _Fork) -> None:
        part = os.read(fork.pipe, 1 << 16)
        if part:
            fork.output += part
            return
        self._selector.unregister(fork.pipe)
        os.close(fork.pipe)
        del self._forks[fork.pid]
        _, status = os.waitpid(fork.pid, 0)
        answer = fork.output if status == 0 else self._job.failed(_limit_of(fork, status))
        write_frame(sys.stdout.buffer, fork.number, answer)


def _limit_of(fork: _Fork, status: int) -> Limit:
    """Return the limit at which ``fork`` ended."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if fork.late or number in (signal.SIGXCPU, signal.SIGKILL):
        return "seconds"
    return "memory" if number == signal.SIGABRT or os.WIFEXITED(status) else "stack"


def _run_in_fork(function: JobFunction, job: ForkedJob, body: bytes, pipe: int) -> None:
    """Run ``job`` in this fork, and never return: the fork exits, or dies at one of its limits."""
    code = 1
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        os.nice(_PRIORITY)
        limit_memory(function.memory_bytes)
        _limit(resource.RLIMIT_CPU, function.seconds)
        _limit(resource.RLIMIT_STACK, function.stack_bytes)
        with os.fdopen(pipe, "wb") as stream:
            stream.write(job(body))
        code = 0
    except BaseException:
        code = 1
    os._exit(code)


def _run_in_place(jobs: IO[bytes], job: Callable[[bytes], bytes]) -> None:
    while (frame := read_frame(jobs)) is not None:
        number, body = frame
        answer = job(body)
        write_frame(sys.stdout.buffer, number, answer)
        if len(body) + len(answer) > _TRIM_ABOVE_BYTES:
            del frame, body, answer
            trim_heap()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = os.fdopen(0, "rb", buffering=0)
    named = read_frame(jobs)
    if named is None:
        return
    function = msgspec.msgpack.decode(named[1], type=JobFunction)
    module, _, name = function.name.partition(":")
    prepare = getattr(importlib.import_module(module), name)
    start = read_frame(jobs)  # it may come much later, so import before
    if start is None:
        return
    if not function.forks:
        limit_memory(function.memory_bytes)
    first, job = prepare(start[1])
    write_frame(sys.stdout.buffer, 0, first)
    if job is None:
        return
    if not function.forks:
        _run_in_place(jobs, job)
        return
    forks = _Forks(jobs, function, job)
    try:
        forks.run()
    finally:
        forks.end()
