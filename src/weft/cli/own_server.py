"""A server of one's own for as long as a command runs: started as a child, ready when its /health says so.

    with own_server(config, on_wait=...) as url:   # http://127.0.0.1:PORT
        ...

The child is ``weft serve`` itself, so what chat and eval exercise is what a user would deploy. It is in a
session of its own: Ctrl-C in the terminal stops an answer, not the server. Its log goes to a temporary
file and is shown only when it fails to start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from weft.cli.flags import ENV_PREFIX, arguments_of, variables_of
from weft.config import EngineConfig
from weft.errors import UserError, WeftError

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05
_ERROR_MARK = "error: "
"""How a command's one line on stderr begins (``weft.cli.main.say_error``)."""


@contextmanager
def own_server(
    config: EngineConfig, *, on_wait: Callable[[float], None] = lambda seconds: None
) -> Iterator[str]:
    """Serve ``config`` on a free local port; the value is its URL. ``on_wait`` gets the seconds so far.

    Raises what the server said (UserError, WeftError) when it does not start.
    """
    port = _free_port()
    command = [sys.executable, "-m", "weft", "serve", f"--host={HOST}", f"--port={port}",
               "--log-level=warning", *arguments_of(config)]
    # The config is resolved already: variables must not be applied to it a second time.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)} | variables_of(config)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                 start_new_session=True)
        with _ending_by_exception():
            try:
                _wait_until_ready(child, f"http://{HOST}:{port}", log, on_wait)
                yield f"http://{HOST}:{port}"
            finally:
                _stop(child)


def _wait_until_ready(
    child: subprocess.Popen[bytes], url: str, log: IO[str], on_wait: Callable[[float], None]
) -> None:
    import httpx

    begin = time.monotonic()
    while True:
        if child.poll() is not None:
            raise _failure(child.returncode, log)
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        on_wait(time.monotonic() - begin)
        time.sleep(_POLL_S)


def _failure(code: int, log: IO[str]) -> WeftError:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    said = next((line[len(_ERROR_MARK):] for line in reversed(lines) if line.startswith(_ERROR_MARK)), None)
    if said is not None:
        return (UserError if code == 2 else WeftError)(said)
    last = " | ".join(lines[-3:]) or "no output"
    return WeftError(f"the server ended with code {code} while starting: {last}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """A closed terminal or a SIGTERM unwinds the stack, so that the child is stopped too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Waiting:
    """Call it with the seconds so far, or say what is being done; ``done`` ends it and may come twice."""

    def __init__(self, what: str, status: Status) -> None:
        self._what = what
        self._status = status

    def __call__(self, seconds: float) -> None:
        self._status.update(f"{self._what} ({seconds:.0f} s)")

    def say(self, line: str) -> None:
        self._status.update(escape(line))

    def done(self) -> None:
        self._status.stop()


@contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    with Console(stderr=True).status(what) as status:
        yield Waiting(what, status)
