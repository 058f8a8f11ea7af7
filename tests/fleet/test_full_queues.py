"""A request that one replica refuses for its full queue goes elsewhere; full everywhere is a 503."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.running import eventually, running_server
from weft.config import EngineConfig
from weft.errors import QueueFullError, RequestError, WeftError
from weft.fleet.placement import Placement
from weft.request import Request, SamplingParams
from weft.router.protocol import LeastLoaded


class Engine:
    """An engine that refuses with ``error``, or accepts."""

    def __init__(self, error: WeftError | None) -> None:
        self.error = error
        self.death = None
        self.info = SimpleNamespace(sizes=SimpleNamespace(rows_max=4))
        self.stats = None
        self.asked: list[str] = []

    async def submit(self, request: Request) -> None:
        self.asked.append(request.request_id)
        if self.error is not None:
            raise self.error

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Nothing runs."""


FULL = QueueFullError("the queue is full", param="limits.max_queued_requests", code="queue_full")


def placement(*errors: WeftError | None) -> tuple[Placement, list[Engine]]:
    engines = [Engine(error) for error in errors]
    replicas: list[Any] = [
        SimpleNamespace(number=number, role="both", ready=True, engine=engine) for number, engine in enumerate(engines)
    ]
    return Placement(EngineConfig(), replicas, LeastLoaded()), engines


def request(name: str = "a") -> Request:
    return Request(request_id=name, prompt_tokens=[1, 2, 3], sampling=SamplingParams(seed=1, max_tokens=9))


def test_a_full_queue_is_tried_elsewhere() -> None:
    requests, engines = placement(FULL, FULL, None)
    asyncio.run(requests.submit([request()]))
    assert [engine.asked for engine in engines] == [["a"], ["a"], ["a"]]
    assert [requests.count_on(number) for number in range(3)] == [0, 0, 1]


def test_full_everywhere_is_the_refusal_of_the_last_replica() -> None:
    requests, engines = placement(FULL, FULL)
    with pytest.raises(QueueFullError):
        asyncio.run(requests.submit([request()]))
    assert [len(engine.asked) for engine in engines] == [1, 1]
    assert requests.held_count == 0
    assert not requests._lives


def test_another_refusal_is_final() -> None:
    requests, engines = placement(RequestError("bad", param="prompt"), None)
    with pytest.raises(RequestError, match="bad"):
        asyncio.run(requests.submit([request()]))
    assert [len(engine.asked) for engine in engines] == [1, 0]


async def test_requests_that_no_engine_can_take_wait_up_to_the_limit_and_are_placed_once_one_can() -> None:
    engine = Engine(None)
    replica: Any = SimpleNamespace(number=0, role="both", ready=False, engine=engine)
    requests = Placement(EngineConfig(max_queued_requests=3), [replica], LeastLoaded())
    waiting = [asyncio.create_task(requests.submit([request(name)])) for name in "abc"]
    await asyncio.sleep(0)
    assert requests.held_count == 3
    with pytest.raises(QueueFullError, match="3 sequences wait for an engine to restart and this request brings 1"):
        await asyncio.wait_for(requests.submit([request("d")]), 30)
    requests._lives["a"].strikes = 1.0  # an engine died with it: it runs where no other such request does
    replica.ready = True
    requests.dispatch()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert (sorted(engine.asked), requests.held_count) == (["a", "b", "c"], 0)


def test_a_client_of_a_full_fleet_gets_503_with_retry_after(model_directory: Path) -> None:
    body = {"model": "default", "prompt": "sing", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with running_server(
        "build_slow",
        engine={"model": str(model_directory), "max_num_seqs": 1, "max_queued_requests": 1},
        server={"replicas": "2"},
    ) as server:
        streams = []
        with server.ends_early(4 * 2000):
            for _ in range(4):  # a running and a waiting one on each replica
                stream = server._http.stream("POST", server.url + "/v1/completions", json=body)
                assert stream.__enter__().status_code == 200
                streams.append(stream)
                assert eventually(lambda: server.running() == len(streams))
            refused = server.post("/v1/completions", {**body, "stream": False})
            for stream in streams:
                stream.__exit__(None, None, None)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.post("/v1/completions", {**body, "stream": False, "max_tokens": 2}).status_code == 200
