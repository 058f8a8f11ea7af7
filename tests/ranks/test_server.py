"""``weft serve --tp 2`` with a machine that joins: ranks get kill -9 in a stream, and while nothing runs.

One test, in steps: each start of an engine imports torch in two processes, and the last step counts what the
ones before it did.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_join import free_port, joining, joining_port, states
from tests.fleet.test_resume import resumes
from tests.server.running import RunningServer, eventually, running_server

ASKED = {
    "model": "default",
    "prompt": [(7 * i * i + 3 * i) % 500 for i in range(70)],
    "max_tokens": 200,
    "temperature": 0.8,
    "seed": 11,
    "extra_body": {"return_token_ids": True, "ignore_eos": True},
}
START_S = 120.0
BOTH_READY = {0: "ready", 1: "ready"}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return tmp_path / "token"


@pytest.fixture
def server(token: Path) -> Iterator[RunningServer]:
    engine = {
        "model": str(checkpoint("lfm2")),
        "memory": "32MB",
        "threads": 1,
        "max_model_len": 512,
        "tp": 2,
        "speculate": "off",
    }
    settings = {"restarts": 10, "token": str(token), "listen_engines": f"127.0.0.1:{free_port()}"}
    with running_server("", engine=engine, server=settings) as one:
        yield one


def rank_pids(parent: int) -> list[int]:
    """Of the ranks below the process ``parent``, beside engine processes."""
    pids = []
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            pids += [child.pid] if any("rank_process" in word for word in child.cmdline()) else []
    return pids


def restarts(server: RunningServer, *, replica: int) -> int:
    [count] = [row["restarts"] for row in replicas(server) if row["replica"] == replica]
    return int(count)


def answer(server: RunningServer) -> list[int]:
    tokens: list[int] = server.client().completions.create(**ASKED).choices[0].token_ids
    return tokens


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.get("/v1/replicas").json()["data"]
    return rows


def a_machine_that_joins_starts_its_own_ranks(server: RunningServer, machine: subprocess.Popen[str]) -> None:
    assert eventually(lambda: states(server) == BOTH_READY, START_S), states(server)
    assert len(rank_pids(server.process.pid)) == len(rank_pids(machine.pid)) == 1


def a_stream_goes_on_with_the_same_tokens_on_the_other_machine(
    server: RunningServer, expected: list[int], machine: subprocess.Popen[str]
) -> None:
    """The rank beside the engine that computes is killed: of the server, or of the machine. A stream that was
    through before its kill shows nothing, and is asked for again."""
    before = resumes(server)
    for _ in range(5):
        killed = stream_through_a_kill(server, expected, machine)
        assert eventually(lambda: states(server) == BOTH_READY, START_S), states(server)
        again = [*rank_pids(server.process.pid), *rank_pids(machine.pid)]
        assert len(again) == 2
        assert killed not in again
        if resumes(server) > before:
            break
    assert resumes(server) == before + 1, server.output


def stream_through_a_kill(server: RunningServer, expected: list[int], machine: subprocess.Popen[str]) -> int:
    """The process that was killed."""
    killed, tokens = None, list[int]()
    for chunk in server.client().completions.create(**ASKED, stream=True):
        tokens += chunk.choices[0].token_ids or []
        if len(tokens) > 5 and killed is None:
            busy = [row["replica"] for row in replicas(server) if row["running"]]
            if busy:
                [killed] = rank_pids(machine.pid if busy[0] else server.process.pid)
                os.kill(killed, signal.SIGKILL)
    assert killed is not None, "the stream ended while no replica was seen at work"
    assert tokens == expected
    return killed


def an_idle_engine_notices_at_once(server: RunningServer, expected: list[int]) -> None:
    """No request asks for a step: the watch on the rank's socket ends the engine, and the other serves."""
    before = restarts(server, replica=0)
    [rank] = rank_pids(server.process.pid)
    os.kill(rank, signal.SIGKILL)
    assert eventually(lambda: restarts(server, replica=0) == before + 1, START_S), states(server)
    assert answer(server) == expected


def one_line_is_said_of_each_lost_rank(server: RunningServer) -> None:
    """One line for each, and no traceback."""
    server.interrupt()
    server.exit_code(START_S)
    said = server.rest_of_output()
    assert said.count("rank 1 was ended by SIGKILL") >= 2, said
    assert "Traceback" not in said


def test_ranks_of_a_server_and_of_a_machine_that_joins(server: RunningServer, token: Path) -> None:
    expected = answer(server)
    with joining(joining_port(server), token) as machine:
        a_machine_that_joins_starts_its_own_ranks(server, machine)
        a_stream_goes_on_with_the_same_tokens_on_the_other_machine(server, expected, machine)
        an_idle_engine_notices_at_once(server, expected)
        one_line_is_said_of_each_lost_rank(server)
