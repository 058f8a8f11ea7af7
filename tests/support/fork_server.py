"""A fork server: processes that tests start often are forked from one that has already imported their modules.

    worker of pytest                                  fork server: python -m tests.support.fork_server
    start(module, arguments)  --- names, stdout, pipe --->  fork
                                                              |- child: `python -m MODULE ARGUMENTS`, by runpy
    wait(), poll()            <------- exit code -----------  '- waits for it

A child has a session, arguments and output of its own. Its environment is that of the fork server, because imported
modules may have read it: each environment has a fork server. The server has one thread at a fork. It reaps a child at
once, and ends with its worker, or with the last child if that ends later.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_BYTES_MAX = 1 << 18
"""A test's server has a thousand adapters in its arguments."""
CODE_BYTES = 4


class ForkedProcess:
    """A forked child, with the methods of ``subprocess.Popen`` that tests use. ``stdout``: text, with the errors."""

    def __init__(self, pid: int, stdout: TextIO, code_pipe: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._code_pipe = code_pipe

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raise subprocess.TimeoutExpired, and EOFError if the fork server has ended."""
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._code_pipe, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            code = os.read(self._code_pipe, CODE_BYTES)
            if not code:
                raise EOFError("the fork server has ended")
            os.close(self._code_pipe)
            self.returncode = int.from_bytes(code, "little", signed=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A fork server that imports ``modules`` before the first fork, in ``environment``."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, module: str, *arguments: str) -> ForkedProcess:
        """Start ``python -m MODULE ARGUMENTS``. Raise EOFError if the fork server has ended."""
        stdout, their_stdout = os.pipe()
        code, their_code = os.pipe()
        message = json.dumps([module, *arguments]).encode()
        assert len(message) <= MESSAGE_BYTES_MAX
        pid = b""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._connection, [message], [their_stdout, their_code])
            pid = self._connection.recv(CODE_BYTES)
        os.close(their_stdout)
        os.close(their_code)
        if not pid:
            raise EOFError("the fork server has ended")
        return ForkedProcess(int.from_bytes(pid, "little"), os.fdopen(stdout, encoding="utf-8"), code)

    def close(self) -> None:
        """Close the server: it takes no more tasks, and its children go on."""
        self._connection.close()


# ---------------------------------------------------------------------- in the fork server


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a child: ``words`` are a module's name and its arguments."""

    words: list[str]
    stdout: int


def serve(connection: socket.socket) -> Task | None:
    """Serve tasks. Return in a child its task, and in the fork server None once its worker and all children have
    ended.
    """
    children: dict[int, tuple[int, int]] = {}
    """The id of each child and the pipe of its exit code, by a descriptor of the child."""
    with connection, selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell_end(*children.pop(key.fd))
                    continue
                message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 2)
                if not message:
                    selector.unregister(connection)
                    continue
                stdout, pipe = descriptors
                pid = os.fork()
                if pid == 0:
                    for descriptor in (*children, *(each for _, each in children.values()), pipe):
                        os.close(descriptor)
                    return Task(json.loads(message), stdout)
                os.close(stdout)
                ends = os.pidfd_open(pid)
                children[ends] = pid, pipe
                selector.register(ends, selectors.EVENT_READ)
                connection.send(pid.to_bytes(CODE_BYTES, "little"))
    return None


def _tell_end(pid: int, pipe: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(pipe, os.waitstatus_to_exitcode(status).to_bytes(CODE_BYTES, "little", signed=True))
    os.close(pipe)


def run(task: Task) -> None:
    """Run ``python -m MODULE ARGUMENTS`` in a session of its own."""
    os.setsid()
    os.dup2(task.stdout, sys.stdout.fileno())
    os.dup2(task.stdout, sys.stderr.fileno())
    os.close(task.stdout)
    module, *sys.argv[1:] = task.words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    gc.disable()  # a child begins as Python does, and its module says when to collect
    descriptor, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a thread of what was imported would be in no child"
    task = serve(socket.socket(fileno=int(descriptor)))
    if task is not None:
        run(task)


if __name__ == "__main__":
    main()
