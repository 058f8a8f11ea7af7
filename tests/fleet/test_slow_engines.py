"""An engine that is stopped and goes on, and one that is slow: no answer fails, none differs."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fleet.test_join import stopped
from tests.fleet.test_replicas import engine_pids, replicas, sung, until_both_work
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import SONG, write_model_directory
from weft.costs.fit import STEPS_MIN

LONG = 1900
ANSWERS = 6


def answer(server: RunningServer, seed: int) -> list[str]:
    return asyncio.run(sung(server, 1, first_seed=seed, max_tokens=LONG))


def test_the_other_replica_serves_while_one_is_stopped_whose_streams_stay_there(model_directory: Path) -> None:
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
            assert eventually(lambda: sum(one.done() for one in answers) == ANSWERS // 2, 60)
            again = asyncio.run(sung(server, 2, first_seed=1, max_tokens=LONG))
            assert again == undisturbed[1:3]
            assert [row["sequences"] for row in replicas(server)] == [0, ANSWERS // 2]
            time.sleep(max(until_s - time.monotonic(), 0.0))
            assert sum(one.done() for one in answers) == ANSWERS // 2
        assert [text for one in answers for text in one.result(60)] == undisturbed
        assert engine_pids(server) == engines
        assert [row["restarts"] for row in replicas(server)] == [0, 0]
        assert asyncio.run(sung(server, 2, max_tokens=LONG)) == undisturbed[:2]


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
