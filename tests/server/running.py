"""A real server process for a test module: started, read until it is ready, stopped for sure."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

from tests.support.child_path import child_path
from tests.support.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
Started = TypeVar("Started")
IMPORTED = (
    "weft.config",
    "weft.rpc.client",
    "weft.server.config",
    "weft.server.launch",
    "weft.server.http",
    "weft.server.app",
)
"""What a server imports before it serves. It imports the last two when its engine has started."""


@cache
def fork_server(variables: frozenset[tuple[str, str]]) -> ForkServer:
    return ForkServer(IMPORTED, dict(variables))


def server_environment(path: tuple[Path, ...] = (), environment: dict[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a test's server; ``path`` comes first in its PYTHONPATH."""
    variables = {
        **os.environ,
        "PYTHONPATH": child_path(*path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    variables.pop("PYTEST_CURRENT_TEST", None)
    return variables


class RunningServer:
    """``url`` once it serves. ``lines`` is what it printed."""

    def __init__(
        self,
        factory: str,
        engine: dict[str, Any],
        server: dict[str, Any],
        wait_for: str,
        path: tuple[Path, ...] = (),
        models: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        variables = server_environment(path, environment)
        arguments = json.dumps(
            {
                "factory": factory,
                "engine": engine,
                "models": models,
                "server": {"port": 0, "response_store": "off", "file_store": "off", "name_store": "off", **server},
            }
        )
        self._own_forks = ForkServer(IMPORTED, variables) if path or environment else None
        forks = self._own_forks or fork_server(frozenset(variables.items()))
        self.process = forks.start("tests.server.run_server", arguments)
        self.lines: list[str] = []
        self._arriving: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""
        # One of each per server: making one costs more than a request (it reads all certificates).
        self._http = httpx.Client(timeout=60)
        self._openai: openai.OpenAI | None = None
        try:
            self._wait_for_line(wait_for)
        except BaseException:
            self.stop()
            raise

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def client(self, **settings: Any) -> openai.OpenAI:
        if not settings and self._openai is not None:
            return self._openai
        client = openai.OpenAI(**self._client_settings(settings))
        if not settings:
            self._openai = client
        return client

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_settings(settings))

    def _client_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **settings}

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        given = {"json": body} if body is not None else {}
        return self._http.post(self.url + path, **given, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self._http.get(self.url + path, **more)

    def running(self, **more: Any) -> int:
        """Sequences that the engine holds, waiting ones too."""
        load = self.get("/load", **more).json()
        return int(load["running"] + load["waiting"])

    def metric(self, name: str, **more: Any) -> int:
        """Return the sum of the metric ``name`` over engines, models and labels."""
        values = re.findall(rf"^weft:{name}{{.*}} (\S+)$", self.get("/metrics", **more).text, re.M)
        return int(sum(map(float, values)))

    @contextlib.contextmanager
    def ends_early(self, tokens: int, **more: Any) -> Iterator[None]:
        """The requests of the block ask for ``tokens`` tokens, and nothing runs soon after it: assert that fewer were
        generated. A time limit cannot tell a cancelled answer from one that ran to its end on a fast machine."""
        before = self.metric("generation_tokens_total", **more)
        yield
        assert eventually(lambda: self.running(**more) == 0)
        generated = self.metric("generation_tokens_total", **more) - before
        assert generated < tokens, f"all of {tokens} tokens were generated"

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit_code(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)

    def stop(self) -> None:
        self.process.kill()  # the engine follows and removes what is left, as after a real kill
        self.process.wait()
        if self._own_forks is not None:
            self._own_forks.close()
            self._own_forks.process.wait()
        self._http.close()
        if self._openai is not None:
            self._openai.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._arriving.put(line)
        self._arriving.put(None)

    def _wait_for_line(self, wanted: str) -> None:
        limit_s = time.monotonic() + START_LIMIT_S
        while True:
            line = self._arriving.get(timeout=max(limit_s - time.monotonic(), 0.1))
            assert line is not None, f"the server ended before it said {wanted!r}:\n{self.output}"
            self.lines.append(line)
            url = re.search(r'((?:https?://|unix:)[^\s;"]+)', line)
            if url and not self.url:
                self.url = url.group(1)
            if wanted in line:
                return

    def rest_of_output(self) -> str:
        """After the process ended."""
        while (line := self._arriving.get(timeout=60)) is not None:
            self.lines.append(line)
        return self.output


@contextlib.contextmanager
def running_server(
    factory: str,
    *,
    engine: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    wait_for: str = "Ctrl-C finishes",
    path: tuple[Path, ...] = (),
    models: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[RunningServer]:
    """``factory`` "" is the real engine; else a function of tests/server/scripted_engine.py. ``path``: where
    its Python looks first. ``models``: of a server with several. ``environment``: more variables; no server
    of a test reaches a hub unless they say so."""
    running = RunningServer(
        factory and f"tests.server.scripted_engine:{factory}",
        engine or {},
        server or {},
        wait_for,
        path,
        models,
        environment,
    )
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def started_again(
    start: Callable[[], AbstractContextManager[Started]], ended: Callable[[Started], bool]
) -> Iterator[Callable[[], Started]]:
    """Yield a function that returns what ``start`` started: a process of a module, or a new one where a test has ended
    the last. Tests that end it need not be the last ones then."""
    with contextlib.ExitStack() as running:
        started: list[Started] = []

        def current() -> Started:
            if not started or ended(started[-1]):
                running.close()
                started.append(running.enter_context(start()))
            return started[-1]

        yield current


def server_ended(server: RunningServer) -> bool:
    return server.process.poll() is not None


def eventually(holds: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Whether it comes true in time."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True
