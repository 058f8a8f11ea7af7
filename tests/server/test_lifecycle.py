"""Start, drain, stop, and the death of the engine: with processes, signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from tests.support.child_path import child_path
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.server.config import DEFAULT_PORT, ServerConfig
from weft.server.launch import EXIT_CONFIG, serve
from weft.server.listening import bind

TURN = {"messages": [{"role": "user", "content": "sing"}], "max_tokens": 1500}


class Background:
    """A request in a thread; ``response`` when it is over."""

    def __init__(self, server: RunningServer, **more: Any) -> None:
        self.response: httpx.Response | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(server.url, {**TURN, **more}), daemon=True)
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(20)
        assert self.response is not None, self.error
        return self.response

    def _run(self, url: str, body: Any) -> None:
        try:
            self.response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        except httpx.HTTPError as error:
            self.error = error


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.contextmanager
def slow_server(model_directory: Path, **flags: Any) -> Iterator[RunningServer]:
    with running_server("build_slow", engine={"model": str(model_directory)}, server=flags) as server:
        yield server


def started(server: RunningServer, count: int = 1) -> bool:
    return eventually(lambda: server.running() == count)


def test_ctrl_c_lets_running_requests_finish_and_takes_no_new_ones(model_directory: Path) -> None:
    with slow_server(model_directory) as server:
        running = Background(server, max_tokens=150)
        assert started(server)
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to the whole process group
        assert eventually(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["status"] == "draining"
        refused = server.post("/v1/chat/completions", TURN)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        answer = running.result()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 150
        assert server.exit_code() == 0
        assert "finishing 1 request, at most" in server.rest_of_output()
        assert "Traceback" not in server.output


def test_ctrl_c_with_nothing_running_stops_at_once(model_directory: Path) -> None:
    with slow_server(model_directory) as server:
        pid = server.engine_pid()
        began_s = time.monotonic()
        server.interrupt()
        assert server.exit_code() == 0
        assert time.monotonic() - began_s < 25, "a drain takes 30 s"
        assert not psutil.pid_exists(pid)


def test_sigterm_drains_too_and_the_time_limit_cuts_what_is_left(model_directory: Path) -> None:
    with slow_server(model_directory, drain_timeout=0.3) as server:
        whole, streamed = Background(server), Background(server, stream=True)
        assert started(server, 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["type"] == "service_unavailable"
        events = events_of(streamed.result())
        assert events[-1] == "[DONE]"
        assert "stopped" in events[-2]["error"]["message"]
        assert "limits.drain_timeout" in server.rest_of_output()


def test_ctrl_c_twice_stops_at_once(model_directory: Path) -> None:
    with slow_server(model_directory) as server:
        streamed = Background(server, stream=True)
        assert started(server)
        server.interrupt()
        assert eventually(lambda: server.get("/health").status_code == 503)
        server.interrupt()
        assert server.exit_code() == 130
        assert "error" in events_of(streamed.result())[-2]
        assert "Traceback" not in server.rest_of_output()


@pytest.mark.parametrize("death", ["killed", "crashed"])
def test_the_death_of_the_engine_is_a_503_with_the_reason(model_directory: Path, death: str) -> None:
    with slow_server(model_directory, restarts=0) as server:
        whole, streamed = Background(server), Background(server, stream=True)
        assert started(server, 2)
        if death == "killed":
            os.kill(server.engine_pid(), signal.SIGKILL)
            reason = "SIGKILL"
        else:
            broken = Background(server, messages=[{"role": "user", "content": "crash"}])
            assert broken.result().status_code == 503
            reason = "fell off the bus"
        assert whole.result().status_code == 503
        assert "engine" in whole.result().json()["error"]["message"]
        events = events_of(streamed.result())
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["type"] == "service_unavailable"
        assert server.exit_code() == 1
        assert reason in server.rest_of_output()
        assert "limits.restarts 0" in server.output


def test_a_stall_ends_a_server_without_restarts(model_directory: Path) -> None:
    with slow_server(model_directory, stall_after=1.0, restarts=0) as server:
        running = Background(server)
        assert started(server)
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        assert running.result().status_code == 503
        assert server.exit_code() == 3
        assert "silent for" in server.rest_of_output()
        assert not psutil.pid_exists(pid)


def test_a_long_step_is_no_stall(model_directory: Path) -> None:
    engine = {"model": str(model_directory)}
    with running_server("build_long_steps", engine=engine, server={"stall_after": 0.5}) as server:
        running = Background(server, max_tokens=2)
        assert started(server)
        seen = set()
        while running.response is None and running.error is None:
            seen.add(server.get("/health").json()["status"])
            time.sleep(0.05)
        assert running.result().status_code == 200
        assert seen == {"ok"}


def test_the_engine_dies_with_its_server_and_leaves_no_files(model_directory: Path) -> None:
    with slow_server(model_directory) as server:
        pid = server.engine_pid()
        folder = _socket_folder_of(server.process.pid)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
        server.process.kill()
        assert eventually(lambda: not _alive(pid))
        assert not folder.exists()


def test_while_the_engine_starts_health_says_so(model_directory: Path) -> None:
    with running_server("build_never", engine={"model": str(model_directory)}, wait_for="for ever") as server:
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert "loading for ever" in health.json()["reason"]
        refused = server.post("/v1/chat/completions", TURN)
        assert refused.status_code == 503
        assert "starting" in refused.json()["error"]["message"]
        assert server.get("/v1/models").status_code == 503
        assert server.get("/metrics").status_code == 200
        pid = server.engine_pid()
        server.interrupt()
        assert server.exit_code() == 130
        assert not psutil.pid_exists(pid)


def test_a_checkpoint_that_cannot_be_read_is_said_without_a_traceback(model_directory: Path) -> None:
    engine = {"model": str(model_directory)}
    with running_server("build_broken", engine=engine, wait_for="listening") as server:
        assert server.exit_code() == 2
        said = server.rest_of_output()
    assert "error: model.safetensors ends after 7 bytes" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"metrics_prefix": "a:b"}, "debug.metrics_prefix"),
        ({"port": 99999}, "--port"),
        ({"port": -1}, "--port"),
        ({"drain_timeout": -1.0}, "limits.drain_timeout"),
        ({"stall_after": -1.0}, "limits.stall_after"),
        ({"restarts": -1}, "limits.restarts"),
        ({"api_key": ("",)}, "--api-key"),
        ({"max_body_mb": 0}, "limits.max_body_mb"),
        ({"sse_keep_alive": float("nan")}, "limits.sse_keep_alive"),
        ({"served_model_name": (" ",)}, "--served-model-name"),
        ({"chat_template": "/no/file"}, "--chat-template"),
    ],
)
def test_a_flag_that_cannot_work_is_named(flags: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        ServerConfig(**flags).check()
    assert caught.value.param == flag


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"memory": "1x"}, "--memory '1x' is not a size"),
        ({"memory": "4GiB/s"}, "--memory '4GiB/s' is not a size"),
        ({"store": "/store", "store_size": "9XB"}, "--store-size '9XB' is not a size"),
        ({"store": "/store", "store_write": "0"}, "limits.store_write is '0'; it must be above 0 bytes a second"),
        ({"speculate": "suffix,oracle"}, "'oracle' is not a source of drafts"),
        ({"grammar_seconds": 0}, "limits.grammar_seconds is 0; it must be at least 1"),
        ({"threads": 0}, "--threads is 0"),
    ],
)
def test_a_flag_of_the_engine_that_cannot_work_ends_the_start_before_the_port_is_open(
    capsys: pytest.CaptureFixture[str], flags: dict[str, Any], sentence: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:  # opening it would be another error
        port = busy.getsockname()[1]
        assert serve(EngineConfig(**flags), ServerConfig(port=port)) == EXIT_CONFIG
    printed = capsys.readouterr()
    assert sentence in printed.err + printed.out
    assert "listening" not in printed.out


def test_a_host_that_is_not_ours_is_an_error_that_names_the_flag() -> None:
    for host in ("256.1.1.1", "203.0.113.7"):
        with pytest.raises(ConfigError, match=host) as caught:
            bind(ServerConfig(host=host, port=0))
        assert caught.value.param == "--host"


def test_a_busy_port_is_an_error_when_asked_for_and_the_next_one_is_taken_when_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use.*--port"):
            bind(ServerConfig(port=port))
    with bind(ServerConfig()) as first, bind(ServerConfig()) as second:
        assert DEFAULT_PORT <= first.getsockname()[1] < second.getsockname()[1]


def _socket_folder_of(pid: int) -> Path:
    sockets = psutil.Process(pid).net_connections(kind="unix")
    return next(Path(each.laddr).parent for each in sockets if each.laddr.endswith("/commands"))


def _alive(pid: int) -> bool:
    """A process that has ended and waits to be collected is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_server_whose_output_nobody_reads_any_more_serves_and_stops(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = {
        "factory": "tests.server.scripted_engine:build",
        "engine": {"model": str(write_model_directory(tmp_path))},
        "server": {"port": port, "response_store": "off", "file_store": "off", "name_store": "off"},
    }
    command = [sys.executable, "-m", "tests.server.run_server", json.dumps(arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": child_path()}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does, before the model is ready
        try:
            assert eventually(lambda: is_ready(port)), "it never became ready"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(30)
            finally:
                process.kill()  # a server without its event loop heeds no signal
        assert code == 0, process.stderr.read().decode()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
