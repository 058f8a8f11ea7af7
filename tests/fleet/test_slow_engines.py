"""An engine that is stopped and goes on, and one that is slow: no answer fails, none differs.

The stop begins with the first test that needs it. The tests between pass its time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_join import stopped
from tests.fleet.test_replicas import engine_pids, replicas, sung, until_both_work
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import SONG, write_model_directory
from weft.costs.fit import STEPS_MIN

LONG = 1900
ANSWERS = 6


@dataclass
class Stopped:
    """A server of two replicas; the second is stopped until ``until_s``, and has some of the requests."""

    server: RunningServer
    undisturbed: list[str]
    engines: list[int]
    answers: list[Future[list[str]]]
    until_s: float

    def go_on(self) -> None:
        os.kill(self.engines[1], signal.SIGCONT)


def answer(server: RunningServer, seed: int) -> list[str]:
    return asyncio.run(sung(server, 1, first_seed=seed, max_tokens=LONG))


@pytest.fixture(scope="module")
def half_stopped(model_directory: Path) -> Iterator[Stopped]:
    with (
        running_server(
            "build_paced",
            engine={"model": str(model_directory)},
            server={"replicas": "2", "router": "least-loaded", "stall_after": 300.0},
        ) as server,
        ThreadPoolExecutor(ANSWERS) as threads,
    ):
        undisturbed = asyncio.run(sung(server, ANSWERS, max_tokens=LONG))
        engines = engine_pids(server)
        answers = [threads.submit(answer, server, seed) for seed in range(ANSWERS)]
        asyncio.run(until_both_work(server))
        with stopped(engines[1]) as until_s:
            yield Stopped(server, undisturbed, engines, answers, until_s)


def test_the_other_replica_serves_while_one_is_stopped(half_stopped: Stopped) -> None:
    assert eventually(lambda: sum(one.done() for one in half_stopped.answers) == ANSWERS // 2, 60)
    again = asyncio.run(sung(half_stopped.server, 2, first_seed=1, max_tokens=LONG))
    assert again == half_stopped.undisturbed[1:3]
    assert [row["sequences"] for row in replicas(half_stopped.server)] == [0, ANSWERS // 2]


async def test_the_router_leaves_a_slow_engine_alone(tmp_path: Path) -> None:
    """A step of the slow engine takes 50 ms, one of the other 1 ms. The router learns it from both engines'
    reports: before an engine has measured STEPS_MIN prefills, it counts as fast as the other."""
    directory = write_model_directory(tmp_path)
    with running_server("build_uneven", engine={"model": str(directory)}, server={"replicas": "2"}) as server:
        slow = engine_pids(server).index(int((directory / "slow").read_text()))
        texts: list[str] = []
        async with server.async_client() as client:

            async def ask(count: int) -> None:
                answers = await asyncio.gather(
                    *(
                        client.completions.create(
                            model="default", prompt=f"{len(texts) + number} times", max_tokens=2, temperature=0
                        )
                        for number in range(count)
                    )
                )
                texts.extend(answer.choices[0].text for answer in answers)

            def requests() -> list[int]:
                rows: list[dict[str, Any]] = server.get("/v1/cache").json()["replicas"]
                return [row["router"]["requests"] for row in rows]

            while requests()[slow] < STEPS_MIN:
                await ask(2)
                assert len(texts) < 200, f"the slow engine got too few to measure itself: {requests()}"
            before = requests()
            for _ in range(12):
                await ask(2)
            share = [after - earlier for after, earlier in zip(requests(), before, strict=True)]
        assert set(texts) == {SONG.encode()[:2].decode(errors="replace")}
        assert sum(share) == 24
        assert share[slow] <= 4, f"replica {slow} is the slow one: {share}"


def test_streams_of_an_engine_that_stops_and_goes_on_stay_there(half_stopped: Stopped) -> None:
    server = half_stopped.server
    time.sleep(max(half_stopped.until_s - time.monotonic(), 0.0))
    assert sum(one.done() for one in half_stopped.answers) == ANSWERS // 2
    half_stopped.go_on()
    assert [text for one in half_stopped.answers for text in one.result(60)] == half_stopped.undisturbed
    assert engine_pids(server) == half_stopped.engines
    assert [row["restarts"] for row in replicas(server)] == [0, 0]
    assert asyncio.run(sung(server, 2, max_tokens=LONG)) == half_stopped.undisturbed[:2]
