"""``weft serve --tp 2`` when a rank gets kill -9: in a stream, and while nothing runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_resume import restarts, resumes
from tests.server.running import RunningServer, eventually, running_server

ASKED = {"model": "default", "prompt": [(7 * i * i + 3 * i) % 500 for i in range(70)], "max_tokens": 200,
         "temperature": 0.8, "seed": 11, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
NOTICE_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("lfm2")), "memory": "32MB", "threads": 1, "max_model_len": 512, "tp": 2}
    with running_server("", engine=engine, server={"restarts": 10}) as one:
        yield one


def rank_pids(server: RunningServer) -> list[int]:
    """Of the ranks beside the engine process."""
    engine = server.engine_pid()
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in children
            if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def answer(server: RunningServer) -> list[int]:
    tokens: list[int] = server.client().completions.create(**ASKED).choices[0].token_ids
    return tokens


def test_a_stream_goes_on_with_the_same_tokens(server: RunningServer) -> None:
    expected, before = answer(server), resumes(server)
    [rank] = rank_pids(server)
    tokens: list[int] = []
    for chunk in server.client().completions.create(**ASKED, stream=True):
        tokens += chunk.choices[0].token_ids or []
        if len(tokens) > 20 and rank:
            os.kill(rank, signal.SIGKILL)
            rank = 0
    assert tokens == expected
    assert resumes(server) == before + 1
    assert eventually(lambda: len(rank_pids(server)) == 1)


def test_an_idle_engine_notices_at_once(server: RunningServer) -> None:
    """No request asks for a step: the watch on the rank's socket ends the engine, with one line."""
    expected, before = answer(server), restarts(server)
    [rank] = rank_pids(server)
    os.kill(rank, signal.SIGKILL)
    assert eventually(lambda: restarts(server) == before + 1, NOTICE_S)
    assert eventually(lambda: server.get("/health").json() == {"status": "ok"}, 30.0)
    [again] = rank_pids(server)
    assert again != rank
    assert answer(server) == expected


def test_what_is_said_of_a_lost_rank(server: RunningServer) -> None:
    """After the tests above: one line for each rank, and no traceback."""
    server.interrupt()
    server.exit_code()
    said = server.rest_of_output()
    assert said.count("rank 1 was ended by signal 9") >= 2
    assert "Traceback" not in said
