"""Two HTTP processes on one port: limits, keys, metrics, batches, drain as with one; a worker may die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.server.running import RunningServer, eventually, running_server, server_ended, started_again
from weft.server.edge import EdgeLimits, HttpEdge, SharedCounts
from weft.server.metrics import SummedSeries
from weft.server.openapi.endpoints import ENDPOINTS
from weft.server.workers.forward import forwarded_operations

KEYS = {"Authorization": "Bearer operator"}
SAID = {"model": "default", "prompt": "say:hello", "max_tokens": 20}


@pytest.fixture(scope="module")
def servers(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], RunningServer]]:
    def start() -> AbstractContextManager[RunningServer]:
        files = tmp_path_factory.mktemp("files")
        settings = {
            "http_workers": 2,
            "api_key": ["few", "client", "background"],
            "operator_key": ["operator"],
            "key_requests_per_minute": 40,
            "file_store": str(files),
            "max_connections": 60,
            "response_store": str(files / "responses.sqlite"),
            "drain_timeout": 20,
        }
        return running_server("build_paced", engine={"model": str(model_directory)}, server=settings)

    with started_again(start, server_ended) as current:
        yield current


@pytest.fixture
def server(servers: Callable[[], RunningServer]) -> RunningServer:
    return servers()


def workers(server: RunningServer) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(server.process.pid).children()
        if "weft.server.workers.process" in " ".join(child.cmdline())
    ]


def fresh(server: RunningServer, method: str, path: str, key: str = "operator", **more: Any) -> httpx.Response:
    """On a connection of its own, so at either worker."""
    return httpx.request(method, server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=20, **more)


def succeeded(server: RunningServer) -> float:
    return _sum(server, "request_success_total")


def generation_tokens(server: RunningServer) -> float:
    return _sum(server, "generation_tokens_total")


def _sum(server: RunningServer, name: str) -> float:
    text = fresh(server, "GET", "/metrics").text
    return sum(float(value) for value in re.findall(rf"weft:{name}{{.*}} (\S+)", text))


def test_every_endpoint_is_answered_by_one_of_the_two() -> None:
    forwarded = forwarded_operations()
    assert {"metrics", "health", "upload_file", "drain_replica", "sleep", "load"} <= forwarded
    assert not forwarded & {"chat", "completions", "messages", "create_response", "tokenize", "models"}
    assert forwarded < {row.operation for row in ENDPOINTS}


def test_requests_reach_both_workers_and_every_scrape_gives_the_whole(server: RunningServer) -> None:
    before = succeeded(server)
    times = {worker.pid: sum(worker.cpu_times()[:2]) for worker in workers(server)}
    for _ in range(24):
        answer = fresh(server, "POST", "/v1/completions", json=SAID)
        assert answer.json()["choices"][0]["text"] == "hello"
    assert len(times) == 2
    assert [succeeded(server) for _ in range(4)] == [before + 24] * 4
    text = fresh(server, "GET", "/metrics").text
    assert text.count("# TYPE weft:e2e_request_latency_seconds histogram") == 1
    assert 'weft:engine_up{engine="0",model_name="scripted"} 1.0' in text


async def test_streams_of_both_workers_are_those_of_one(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=KEYS, timeout=30) as client:

        async def stream(seed: int) -> str:
            body = {**SAID, "prompt": "sing", "stream": True, "seed": seed, "temperature": 1.0, "max_tokens": 60}
            answer = await client.post("/v1/completions", json=body)
            assert answer.text.rstrip().endswith("data: [DONE]")
            return "".join(
                json.loads(line[6:])["choices"][0]["text"]
                for line in answer.text.splitlines()
                if line.startswith("data: {")
            )

        first = await asyncio.gather(*(stream(seed) for seed in range(6)))
        assert first == await asyncio.gather(*(stream(seed) for seed in range(6)))
        assert len(set(first)) == 6


def test_the_rate_of_a_key_holds_for_all_workers_together(server: RunningServer) -> None:
    began_s = time.monotonic()
    statuses: list[int] = []
    with ThreadPoolExecutor(8) as threads:
        while 429 not in statuses and len(statuses) < 400:
            answers = threads.map(lambda _: fresh(server, "POST", "/v1/completions", key="few", json=SAID), range(25))
            statuses += [answer.status_code for answer in answers]
    refilled = (time.monotonic() - began_s) * 40 / 60
    assert set(statuses) == {200, 429}
    assert 40 <= statuses.count(200) <= 40 + refilled + 1


def test_what_clients_may_not_see_is_refused_at_a_worker(server: RunningServer) -> None:
    assert fresh(server, "GET", "/metrics", key="client").status_code == 403
    assert fresh(server, "GET", "/v1/replicas", key="wrong").status_code == 401
    refused = httpx.get(server.url + "/v1/models", headers={**KEYS, "Host": "evil.example"})
    assert refused.status_code == 421
    echoed = httpx.get(server.url + "/health", headers={"X-Request-Id": "mine"})
    assert echoed.headers.get_list("x-request-id") == ["mine"]


def test_a_batch_and_a_stored_response_are_the_same_at_each_worker(server: RunningServer) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": SAID})
    upload = fresh(server, "POST", "/v1/files", files={"file": ("lines.jsonl", line)}, data={"purpose": "batch"}).json()
    batch = fresh(
        server,
        "POST",
        "/v1/batches",
        json={"input_file_id": upload["id"], "endpoint": "/v1/completions", "completion_window": "24h"},
    ).json()
    assert eventually(lambda: fresh(server, "GET", f"/v1/batches/{batch['id']}").json()["status"] == "completed", 15)
    output = fresh(server, "GET", f"/v1/batches/{batch['id']}").json()["output_file_id"]
    assert "hello" in fresh(server, "GET", f"/v1/files/{output}/content").text
    first = fresh(server, "POST", "/v1/responses", json={"model": "default", "input": "say:one"}).json()
    for _ in range(4):
        assert fresh(server, "GET", f"/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_a_response_in_the_background_is_the_same_at_each_worker(server: RunningServer) -> None:
    def status(response_id: str) -> str:
        return str(fresh(server, "GET", f"/v1/responses/{response_id}").json()["status"])

    def begin(text: str, **more: Any) -> str:
        body = {"model": "default", "input": text, "background": True, **more}
        return str(fresh(server, "POST", "/v1/responses", json=body).json()["id"])

    done = begin("say:well done")
    assert eventually(lambda: status(done) == "completed")
    assert {status(done) for _ in range(6)} == {"completed"}
    generated = generation_tokens(server)
    long = begin("sing", max_output_tokens=1500)
    assert {status(long) for _ in range(6)} <= {"queued", "in_progress"}
    assert fresh(server, "POST", f"/v1/responses/{long}/cancel").json()["status"] == "cancelled"
    assert {status(long) for _ in range(6)} == {"cancelled"}
    assert eventually(lambda: _load(server)["running"] == 0)
    assert generation_tokens(server) - generated < 1500, "an answer that is cancelled is computed to its end"
    streamed = begin("say:x", stream=False)
    assert eventually(lambda: status(streamed) == "completed")
    assert fresh(server, "GET", f"/v1/responses/{streamed}?stream=true").status_code == 400


def test_a_request_that_a_worker_passes_on_counts_once(server: RunningServer) -> None:
    body = {"model": "default", "input": "say:x", "background": True}
    statuses = [fresh(server, "POST", "/v1/responses", key="background", json=body).status_code for _ in range(30)]
    assert statuses == [200] * 30, "40 a minute are allowed"


def test_all_workers_sleep_and_wake(server: RunningServer) -> None:
    assert fresh(server, "POST", "/sleep?level=1").status_code == 200
    assert [fresh(server, "POST", "/v1/completions", json=SAID).json()["error"]["code"] for _ in range(4)] == [
        "asleep"
    ] * 4
    assert fresh(server, "POST", "/wake_up").status_code == 200
    assert fresh(server, "POST", "/v1/completions", json=SAID).status_code == 200


async def test_a_worker_that_is_killed_leaves_nothing_behind(server: RunningServer) -> None:
    body = {**SAID, "prompt": "sing", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    generated = generation_tokens(server)
    async with httpx.AsyncClient(base_url=server.url, headers=KEYS, timeout=30) as client:
        singing = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
        assert await asyncio.to_thread(eventually, lambda: _load(server)["running"] == 8)
        # The system gives connections to either worker, and may give all of them to one.
        other, victim = sorted(workers(server), key=_clients)
        assert _clients(victim) > 0
        counted = succeeded(server)
        assert _metric_files(victim) > 0
        os.kill(victim.pid, signal.SIGKILL)
        answers = await asyncio.gather(*singing, return_exceptions=True)
    whole = [answer for answer in answers if isinstance(answer, httpx.Response)]
    assert all(answer.text.rstrip().endswith("data: [DONE]") for answer in whole)
    assert eventually(lambda: _load(server) == {"server_load": 0, "running": 0, "waiting": 0})
    assert len(whole) < 8
    assert generation_tokens(server) - generated < 8 * 1500, "answers of a dead worker are computed to their end"
    assert eventually(lambda: len(workers(server)) == 2 and other in workers(server), 15)
    statuses: list[int] = []

    def answer_again() -> bool:
        new = [fresh(server, "POST", "/v1/completions", json=SAID).status_code for _ in range(4)]
        statuses.extend(new)
        return new == [200] * 4

    assert eventually(answer_again, 15)
    now = counted + len(whole) + statuses.count(200)
    assert eventually(lambda: succeeded(server) == now), "what a dead worker counted stays"
    assert _metric_files(victim) == 0, "its files go into those of all dead ones"


def _clients(worker: psutil.Process) -> int:
    """Return the TCP connections that an HTTP process has accepted."""
    listed = worker.connections("tcp")  # psutil 5.9 has no net_connections
    return sum(one.status == psutil.CONN_ESTABLISHED for one in listed)


def _metric_files(worker: psutil.Process) -> int:
    """Of one HTTP process, alive or dead."""
    return len(list(Path(tempfile.gettempdir()).glob(f"weft-*/*_{worker.pid}.db")))


def test_the_limit_of_connections_holds_for_all_workers_together(server: RunningServer) -> None:
    clients = [httpx.Client(base_url=server.url, headers=KEYS, timeout=20) for _ in range(70)]
    try:
        statuses = [client.get("/version").status_code for client in clients]
    finally:
        for client in clients:
            client.close()
    assert statuses.count(200) == 60
    assert statuses.count(503) == 10
    assert eventually(lambda: fresh(server, "GET", "/version").status_code == 200)


def test_an_interrupt_drains_all_workers(server: RunningServer) -> None:
    body = {**SAID, "prompt": "sing", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=KEYS, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.interrupt()
        assert eventually(lambda: fresh(server, "GET", "/health").status_code == 503)
        assert fresh(server, "POST", "/v1/completions", json=SAID).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.exit_code() == 0


def _load(server: RunningServer) -> dict[str, int]:
    load: dict[str, int] = fresh(server, "GET", "/load").json()
    return load


def test_counts_add_up_over_processes_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    one, two = (SharedCounts(tmp_path / "counts", process=number, processes=2, keys=1) for number in (0, 1))
    one.connections.add(3)
    two.connections.add(4)
    assert one.connections.total() == two.connections.total() == 7
    one.drains.add(1)
    one.requests.add(2)
    assert (two.drains.total(), two.requests.total()) == (1, 2)
    one.address("10.0.0.1").add(2)
    assert two.address("10.0.0.1").total() == 2
    assert two.address("10.0.0.2").total() == 0
    one.key(0).bytes_in_flight.add(100)
    with one.key(0).lock:
        one.key(0).requests[0] = 5.0
    one.clear(0)
    assert two.connections.total() == 4
    assert two.key(0).bytes_in_flight.total() == 0
    assert two.key(0).requests[0] == 5.0, "a rate is no count of one process"


def test_refusals_are_written_until_there_are_as_many_as_connections() -> None:
    edge = HttpEdge(EdgeLimits(connections=2))
    connections: list[Any] = [object() for _ in range(5)]
    for connection in connections[:4]:
        edge.enter(connection, "10.0.0.1")
    assert not edge.is_crowded()
    edge.enter(connections[4], "10.0.0.1")
    assert edge.is_crowded()
    edge.leave(connections[4])
    edge.leave(connections[4])  # it has left already
    assert not edge.is_crowded()


def test_a_rate_of_each_key_is_its_own_and_outlives_each_process(tmp_path: Path) -> None:
    counts = SharedCounts(tmp_path / "counts", process=0, processes=2, keys=3)
    for number in range(3):
        counts.key(number).requests[:] = memoryview(array("d", [1.0 + number, 2.0]))
        counts.key(number).tokens[:] = memoryview(array("d", [3.0 + number, 4.0]))
    for process in range(2):
        counts.clear(process)
    for number in range(3):
        assert list(counts.key(number).requests) == [1.0 + number, 2.0]
        assert list(counts.key(number).tokens) == [3.0 + number, 4.0]


def test_series_of_processes_add_up() -> None:
    def measured(amount: float) -> CollectorRegistry:
        registry = CollectorRegistry()
        Counter("sent", "Sent.", ["to"], registry=registry).labels("a").inc(amount)
        Gauge("open", "Open.", registry=registry).set(amount)
        Histogram("size", "Sizes.", buckets=(1, 5), registry=registry).observe(amount)
        return registry

    alone, both = measured(2), SummedSeries([measured(2), measured(3)])
    text = generate_latest(both).decode()
    assert 'sent_total{to="a"} 5.0' in text
    assert "open 5.0" in text
    assert 'size_bucket{le="5.0"} 2.0' in text
    assert "size_sum 5.0" in text
    assert generate_latest(SummedSeries([alone])) == generate_latest(alone)
