"""Prefill apart from decode over real processes: the tokens of one engine, whichever of the two is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_resume import ASKED, TEMPLATE, all_answered, same
from tests.server.running import RunningServer, eventually, running_server

ENGINE = {"memory": "64MB", "threads": 1, "max_model_len": 1024, "max_num_batched_tokens": 128}
PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(700)]


@contextlib.contextmanager
def split(name: str, roles: str = "1p1d", **server: Any) -> Iterator[RunningServer]:
    """A server that splits every prompt that may be, as ``debug.router split`` does."""
    with running_server(
        "",
        engine={"model": str(checkpoint(name)), **ENGINE},
        server={"roles": roles, "router": "split", "restarts": 1000, **server},
    ) as one:
        yield one


def counted(server: RunningServer, metric: str, engine: int = 0) -> int:
    [line] = [
        line
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(f'weft:{metric}{{engine="{engine}"')
    ]
    return int(float(line.rpartition(" ")[2]))


def pids(server: RunningServer, module: str) -> list[int]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it may end between two calls
            if module in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def engine_pids(server: RunningServer) -> list[int]:
    return pids(server, "engine_process")


def engines(server: RunningServer, known: dict[str, int]) -> dict[str, int]:
    """Process of the engine of each role. ``known``: as they were before one of them died, or empty."""
    found = engine_pids(server)
    assert len(found) == 2
    if not known:
        return dict(zip(("prefill", "decode"), sorted(found), strict=True))
    [new] = set(found) - set(known.values())
    return {role: pid if pid in found else new for role, pid in known.items()}


def tokens(server: RunningServer, length: int, **more: Any) -> list[list[int]]:
    answer = server.post(
        "/v1/completions",
        {
            "model": "default",
            "prompt": PROMPT[:length],
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": length,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        },
    )
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def is_split(server: RunningServer) -> bool:
    """Whether a request is split: it is not while the two replicas are not paired, after a death or a start."""
    before = counted(server, "request_handoffs_total")
    tokens(server, 300, cache_salt=f"split {next(SALTS)}")
    return counted(server, "request_handoffs_total") > before


LENGTHS = (5, 64, 300, 601)
SALTS = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningServer]:
    """With two HTTP processes: the requests of both meet in the fleet, which knows the roles."""
    with split("qwen3_5", chat_template=str(TEMPLATE), http_workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def processes(pair: RunningServer, undisturbed: dict[str, Any]) -> dict[str, int]:
    """The engine process of each role, as they are now."""
    return engines(pair, {})


@pytest.fixture
def real(pair: RunningServer, processes: dict[str, int]) -> RunningServer:
    """Two engines, whichever a test has drained."""
    rows = pair.get("/v1/replicas").json()["data"]
    for drained in (row["replica"] for row in rows if row["state"] == "drained"):
        assert pair.post(f"/v1/replicas/{drained}/start").status_code == 200
        processes.update(engines(pair, processes))
        assert eventually(lambda: is_split(pair), 60)
    return pair


@pytest.fixture(scope="module")
def undisturbed(pair: RunningServer) -> dict[str, Any]:
    """Answers of one engine that computes all: the other one is drained, and back for the tests."""
    handoffs = counted(pair, "request_handoffs_total")
    assert pair.post("/v1/replicas/1/drain?timeout=5").status_code == 200
    answers = asyncio.run(all_answered(pair)) | {"tokens": [tokens(pair, length) for length in LENGTHS]}
    assert pair.post("/v1/replicas/1/start").status_code == 200
    assert counted(pair, "request_handoffs_total") == handoffs, "something was split"
    assert pair.post("/v1/cache/flush").status_code == 200
    return answers


def test_every_kind_of_answer_is_the_same_when_it_is_split(real: RunningServer, undisturbed: dict[str, Any]) -> None:
    def moved() -> list[int]:
        return [counted(real, "handoff_received_bytes_total", 1), counted(real, "handoff_sent_bytes_total")]

    before, moved_before = counted(real, "request_handoffs_total"), moved()
    answers = asyncio.run(all_answered(real))
    for kind in ASKED:
        assert same(answers[kind], undisturbed[kind]), kind
    assert counted(real, "request_handoffs_total") == before + len(ASKED)
    received, sent = (now - earlier for now, earlier in zip(moved(), moved_before, strict=True))
    assert received == sent > 0


def test_the_engine_that_goes_on_computes_no_token_of_the_prompt_again(real: RunningServer) -> None:
    before = [counted(real, f"{kind}_tokens_total", 1) for kind in ("generation", "computed")]
    tokens(real, 650, cache_salt="alone")
    after = [counted(real, f"{kind}_tokens_total", 1) for kind in ("generation", "computed")]
    assert [one - other for one, other in zip(after, before, strict=True)] == [23, 23]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_answers_go_on_when_either_side_is_killed(
    real: RunningServer, processes: dict[str, int], undisturbed: dict[str, Any], side: str
) -> None:
    """kill -9 while the prompt is computed, while its records travel, and while the answer is."""
    chance = random.Random(side)
    for number, length in enumerate(LENGTHS[1:], 1):
        assert eventually(lambda: real.get("/health").json() == {"status": "ok"}, 60)
        salt = f"{side} {number}"  # nothing of it is cached
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(tokens, real, length, cache_salt=salt)
            assert eventually(lambda asked=asked: real.running() > 0 or asked.done(), 60)
            time.sleep(chance.uniform(0.0, 0.06))
            os.kill(processes[side], signal.SIGKILL)
            assert asked.result(60) == undisturbed["tokens"][number], (side, length)
        assert eventually(lambda: len(set(engine_pids(real)) - {processes[side]}) == 2, 60)
        processes.update(engines(real, processes))
    assert eventually(lambda: real.running() == 0, 60)
    assert eventually(lambda: real.get("/health").json() == {"status": "ok"}, 60)


def test_each_replica_says_its_role(real: RunningServer) -> None:
    rows = real.get("/v1/replicas").json()["data"]
    assert [row["role"] for row in rows] == ["prefill", "decode"]


def test_split_requests_whose_http_processes_are_killed_leave_nothing_in_either_engine(
    real: RunningServer, undisturbed: dict[str, Any]
) -> None:
    """kill -9 while prompts are computed, records travel, and answers are."""
    assert eventually(lambda: real.get("/health").json() == {"status": "ok"}, 60)
    assert eventually(lambda: is_split(real), 60)
    workers = pids(real, "workers.process")
    assert len(workers) == 2

    def ask(number: int) -> None:
        with contextlib.suppress(httpx.TransportError):  # what a client sees, unless it was done before
            httpx.post(
                f"{real.url}/v1/completions",
                timeout=60,
                json={
                    "model": "default",
                    "prompt": PROMPT[: 700 - number],
                    "max_tokens": 300,
                    "ignore_eos": True,
                    "cache_salt": f"gone {number}",
                },
            )

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, number) for number in range(8)]
        assert eventually(lambda: real.running() > 0 or all(one.done() for one in asked), 60)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for one in asked:
            one.result(60)

    def serves() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return not set(workers) & set(pids(real, "workers.process")) and real.running() == 0
        return False

    assert eventually(serves, 60)
    assert tokens(real, LENGTHS[3], cache_salt="after") == undisturbed["tokens"][3]

    def held() -> list[int]:
        memory = [replica["memory_bytes"] for replica in real.get("/v1/cache").json()["replicas"]]
        return [one[kind] for one in memory for kind in ("running_kv", "running_states")]

    # A sequence's memory is free from the plan after its end: an engine may report in between.
    assert eventually(lambda: not any(held())), held()


def test_without_a_partner_requests_are_served_whole(real: RunningServer, undisturbed: dict[str, Any]) -> None:
    """Without the one for answers they were, in ``undisturbed``."""
    assert eventually(lambda: real.get("/health").json() == {"status": "ok"}, 60)
    handoffs = counted(real, "request_handoffs_total")
    assert real.post("/v1/replicas/0/drain?timeout=5").status_code == 200
    assert tokens(real, LENGTHS[2]) == undisturbed["tokens"][2]
    assert counted(real, "request_handoffs_total") == handoffs
