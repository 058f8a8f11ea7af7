"""Two engine processes behind one address: killed, drained, restarted, asleep. Clients see no error.

The router is the one that counts, so that both replicas surely work; ``test_router`` has the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.running import RunningServer, eventually, running_server
from weft.cli.main import main

SUNG = {
    "model": "default",
    "prompt": "sing",
    "max_tokens": 1200,
    "temperature": 1.0,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[RunningServer]:
    with running_server(
        "build_paced",
        engine={"model": str(model_directory)},
        server={"replicas": "2", "restarts": 20, "router": "least-loaded"},
    ) as running:
        yield running


async def sung(server: RunningServer, count: int, *, first_seed: int = 0, **more: Any) -> list[str]:
    client = server.async_client()
    answers = await asyncio.gather(
        *(client.completions.create(**{**SUNG, "seed": seed, **more}) for seed in range(first_seed, first_seed + count))
    )
    return [answer.choices[0].text for answer in answers]


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[str]:
    return asyncio.run(sung(server, 6))


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.get("/v1/replicas").json()["data"]
    return rows


def engine_pids(server: RunningServer) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(server.process.pid).children()
        if "engine_process" in " ".join(child.cmdline())
    ]


def all_ready(server: RunningServer) -> bool:
    return eventually(lambda: [row["state"] for row in replicas(server)] == ["ready", "ready"], 30)


async def until_they_have(server: RunningServer, sequences: list[int]) -> None:
    """A row of a replica is as old as its last report, so it may lag behind the requests."""
    for _ in range(300):
        rows = [row["sequences"] for row in await asyncio.to_thread(replicas, server)]
        if rows == sequences:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{rows} and not {sequences}")


async def until_both_work(server: RunningServer) -> None:
    for _ in range(300):
        if all(row["sequences"] for row in await asyncio.to_thread(replicas, server)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the requests did not spread")


async def test_requests_spread_and_those_of_a_killed_replica_go_on_at_the_other(
    server: RunningServer, undisturbed: list[str]
) -> None:
    singing = asyncio.create_task(sung(server, 6))
    await until_they_have(server, [3, 3])
    os.kill(engine_pids(server)[0], signal.SIGKILL)
    assert eventually(lambda: server.get("/health").json()["status"] == "degraded")
    assert await sung(server, 1, max_tokens=20) == [undisturbed[0][:20]]
    assert await singing == undisturbed
    metrics = server.get("/metrics").text
    assert 'weft:engine_up{engine="1",model_name="scripted"} 1.0' in metrics
    assert 'weft:generation_tokens_total{engine="1",model_name="scripted"}' in metrics
    assert metrics.count("# TYPE weft:generation_tokens_total counter") == 1
    assert all_ready(server)
    assert server.get("/health").json() == {"status": "ok"}


async def test_a_replica_is_drained_and_started_again(
    server: RunningServer, undisturbed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert all_ready(server)
    restarts = replicas(server)[1]["restarts"]
    singing = asyncio.create_task(sung(server, 6))
    await until_both_work(server)
    assert await asyncio.to_thread(main, ["drain", "1", "--timeout", "0", "--url", server.url]) == 0
    assert "replica 1  drained" in capsys.readouterr().out
    assert len(engine_pids(server)) == 1
    assert server.get("/health").json() == {"status": "ok"}
    assert await singing == undisturbed
    drained = replicas(server)[1]
    assert (drained["sequences"], drained["running"], drained["waiting"]) == (0, 0, 0), drained
    assert main(["drain", "0", "--url", server.url]) == 2
    assert "the last one that serves; restart it (weft drain 0 --restart)" in capsys.readouterr().err
    assert main(["drain", "7", "--url", server.url]) == 2
    assert "0 to 1" in capsys.readouterr().err
    assert main(["drain", "1", "--start", "--url", server.url]) == 0
    assert [row["state"] for row in replicas(server)] == ["ready", "ready"]
    assert replicas(server)[1]["restarts"] == restarts


async def test_a_rolling_restart_changes_no_answer(server: RunningServer, undisturbed: list[str]) -> None:
    assert all_ready(server)
    before = engine_pids(server)
    singing = asyncio.create_task(sung(server, 6))
    await until_both_work(server)
    rolled = await asyncio.to_thread(main, ["drain", "all", "--restart", "--timeout", "0.2", "--url", server.url])
    assert rolled == 0
    assert await singing == undisturbed
    assert not set(before) & set(engine_pids(server))
    assert len(engine_pids(server)) == 2


async def test_the_cache_is_shown_by_replica_and_all_replicas_sleep(server: RunningServer) -> None:
    assert all_ready(server)
    await sung(server, 4, max_tokens=100)
    cache = server.get("/v1/cache").json()
    assert [row["replica"] for row in cache["replicas"]] == [0, 1]
    assert cache["bytes"] == sum(row["bytes"] for row in cache["replicas"])
    assert {"tree", "counts", "states"} <= cache["replicas"][1].keys()
    assert server.post("/sleep?level=1").json()["status"] == "sleeping"
    assert server.get("/is_sleeping").json()["is_sleeping"]
    assert server.post("/v1/completions", {"prompt": "a"}).json()["error"]["code"] == "asleep"
    os.kill(engine_pids(server)[1], signal.SIGKILL)
    assert eventually(lambda: server.get("/health").json()["status"] == "degraded")
    assert server.get("/v1/cache").json()["replicas"], "its form does not change with who answers"
    assert all_ready(server)
    assert server.get("/health").json()["status"] == "sleeping", "the new process sleeps too"
    assert server.post("/wake_up").json()["status"] == "awake"
    assert len(await sung(server, 4, max_tokens=5)) == 4


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/replicas/0/drain?timeout=soon", 400, "timeout is 'soon'"),
        ("/v1/replicas/0/drain?restart=perhaps", 400, "restart is 'perhaps'"),
        ("/v1/replicas/0/start", 409, "only a drained or dead one"),
        ("/v1/replicas/2/drain", 404, "no replica 2"),
        ("/v1/replicas/one/start", 404, "no replica 'one'"),
    ],
)
def test_a_drain_that_cannot_be_is_refused(server: RunningServer, path: str, status: int, said: str) -> None:
    refused = server.post(path)
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
