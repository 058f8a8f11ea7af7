"""A machine joins over a network that is cut: its streams go on elsewhere, with the tokens of an undisturbed
run, and it comes back with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fleet.cut_network import CutNetwork, cut_network
from tests.fleet.test_replicas import sung as sung_at_length
from tests.server.running import ROOT, RunningServer, eventually, running_server, started_again
from tests.server.scripted_engine import write_model_directory
from tests.support.child_path import child_path

TOKENS = 400
STOPPED_S = float(os.environ.get("WEFT_TEST_STOPPED_S", "2"))
"""Tests wait for the notice of a stop. After it, no clock of a fleet ends before the 10 minutes of a machine
that is forgotten. WEFT_TEST_STOPPED_S=20 stops processes for longer."""
NOTICED_S = 30.0
"""A machine that vanishes is noticed within 5 s of its server's own ticks (test_link). A test machine that is
busy with other tests makes these ticks late."""


async def sung(server: RunningServer, count: int) -> list[str]:
    return await sung_at_length(server, count, max_tokens=TOKENS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "token"


@pytest.fixture(scope="module")
def server(model_directory: Path, token: Path) -> Iterator[RunningServer]:
    # The router of the default may send repeated prompts to one replica, which has their prefixes.
    settings = {
        "replicas": "1",
        "restarts": 20,
        "stall_after": 5.0,
        "token": str(token),
        "router": "least-loaded",
        "listen_engines": f"127.0.0.1:{free_port()}",
    }
    with running_server("build_paced", engine={"model": str(model_directory)}, server=settings) as running:
        yield running


@pytest.fixture(scope="module")
def network(server: RunningServer) -> Iterator[CutNetwork]:
    with cut_network(joining_port(server)) as network:
        yield network


@contextlib.contextmanager
def joining(port: int, token: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": child_path(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "join", f"127.0.0.1:{port}", "--token", str(token), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def machines(server: RunningServer, network: CutNetwork, token: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    with started_again(lambda: joining(network.port, token), lambda one: one.poll() is not None) as current:
        yield current


@pytest.fixture
def machine(machines: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    return machines()


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[str]:
    return asyncio.run(sung(server, 4))


def joining_port(server: RunningServer) -> int:
    match = re.search(r"weft join HOST:(\d+)", server.output)
    assert match is not None, server.output
    return int(match.group(1))


def states(server: RunningServer) -> dict[int, str]:
    return {row["replica"]: row["state"] for row in server.get("/v1/replicas").json()["data"]}


def both_ready(server: RunningServer) -> bool:
    return eventually(lambda: states(server) == {0: "ready", 1: "ready"}, 40)


def engine_of(machine: subprocess.Popen[str]) -> psutil.Process:
    [engine] = psutil.Process(machine.pid).children()
    return engine


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[float]:
    """Processes that are stopped until the end of the block. When they have been for STOPPED_S."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic() + STOPPED_S
    finally:
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def until_it_computes(server: RunningServer) -> None:
    for _ in range(300):
        rows: list[dict[str, Any]] = (await asyncio.to_thread(server.get, "/v1/replicas")).json()["data"]
        if rows[1]["running"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no request reached the joined replica")


async def until_noticed(server: RunningServer) -> None:
    """Until the replica is not ready any more."""
    began_s = time.monotonic()
    while (await asyncio.to_thread(states, server))[1] == "ready":
        assert time.monotonic() - began_s < NOTICED_S
        await asyncio.sleep(0.05)


async def test_a_joined_replica_serves_and_is_shown(
    server: RunningServer, undisturbed: list[str], machine: subprocess.Popen[str]
) -> None:
    assert both_ready(server)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    assert await singing == undisturbed
    rows = server.get("/v1/replicas").json()["data"]
    assert [row["host"] for row in rows] == ["", socket.gethostname()]
    assert 'weft:engine_up{engine="1",model_name="scripted"} 1.0' in server.get("/metrics").text
    assert [row["replica"] for row in server.get("/v1/cache").json()["replicas"]] == [0, 1]


@pytest.mark.parametrize("ways", [("there", "back"), ("there",), ("back",)])
async def test_a_cut_network_is_noticed_and_its_streams_go_on(
    server: RunningServer,
    undisturbed: list[str],
    machine: subprocess.Popen[str],
    network: CutNetwork,
    ways: tuple[str, ...],
) -> None:
    assert both_ready(server)
    engine = engine_of(machine)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    network.cut(*ways)
    try:
        await until_noticed(server)
        assert await singing == undisturbed
        assert server.get("/health").json()["status"] == "degraded"
    finally:
        network.heal()
    assert both_ready(server)
    assert engine_of(machine) == engine, "the engine outlives the session, with its cache"
    assert await sung(server, 4) == undisturbed


@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_engine_on_a_joined_machine_is_replaced(
    server: RunningServer, undisturbed: list[str], machine: subprocess.Popen[str], ending: signal.Signals
) -> None:
    assert both_ready(server)
    engine = engine_of(machine)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    engine.send_signal(ending)
    await until_noticed(server)
    assert await singing == undisturbed
    assert both_ready(server)
    assert engine_of(machine) != engine


async def test_a_reset_connection_is_opened_again(
    server: RunningServer, undisturbed: list[str], machine: subprocess.Popen[str], network: CutNetwork
) -> None:
    assert both_ready(server)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    network.reset()
    assert await singing == undisturbed
    assert both_ready(server)


async def test_requests_go_on_elsewhere_while_a_machine_is_stopped_and_then_it_serves_with_its_engine(
    server: RunningServer, undisturbed: list[str], machine: subprocess.Popen[str]
) -> None:
    assert both_ready(server)
    engine = engine_of(machine)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    with stopped(machine.pid, engine.pid) as until_s:
        await until_noticed(server)
        assert await singing == undisturbed
        assert await sung(server, 4) == undisturbed, "the other replica serves"
        assert server.get("/health").json()["status"] == "degraded"
        await asyncio.sleep(max(until_s - time.monotonic(), 0.0))
        assert states(server) == {0: "ready", 1: "away"}
        # The engine goes on first: its late events reach its agent before the agent goes on.
    assert both_ready(server)
    assert engine_of(machine) == engine
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    assert await singing == undisturbed, "late events are dropped"


def test_another_token_is_refused(server: RunningServer, tmp_path: Path) -> None:
    other = tmp_path / "token"
    other.write_text("x" * 43)
    other.chmod(0o600)
    with joining(joining_port(server), other) as process:
        assert process.wait(20) == 2
        assert process.stdout is not None
        assert "refuses the token" in process.stdout.read()


def test_another_model_is_refused_on_both_sides(server: RunningServer, token: Path, tmp_path: Path) -> None:
    other, before = write_model_directory(tmp_path, markers=("<|more|>",)), set(states(server))
    with joining(joining_port(server), token, "--model", str(other)) as process:
        assert process.wait(20) == 2
        assert process.stdout is not None
        assert "would give other answers: tokenizer is" in process.stdout.read()
    assert set(states(server)) == before


async def test_an_interrupted_machine_is_drained(
    server: RunningServer, undisturbed: list[str], machine: subprocess.Popen[str]
) -> None:
    assert both_ready(server)
    singing = asyncio.create_task(sung(server, 4))
    await until_it_computes(server)
    machine.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(machine.wait, 20) == 0
    assert await singing == undisturbed
    assert states(server) == {0: "ready"}
    assert server.get("/health").json() == {"status": "ok"}
