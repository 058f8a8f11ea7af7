"""Sleeping and waking over HTTP, with a tiny model: what is answered before, meanwhile and after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.main import main

PROMPT = list(range(3, 203))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "16MB", "threads": 1, "max_model_len": 512}
    with running_server("", engine=engine, server={"metrics_prefix": "vllm"}) as running:
        yield running


@pytest.fixture(autouse=True)
def _awake(server: RunningServer) -> Iterator[None]:
    yield
    server.post("/wake_up")


def complete(server: RunningServer, **more: Any) -> httpx.Response:
    return server.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more},
    )


def tokens(server: RunningServer) -> list[int]:
    answer = complete(server)
    assert answer.is_success, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_says_so_and_answers_as_before(
    server: RunningServer, level: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tokens(server)
    assert server.get("/is_sleeping").json()["is_sleeping"] is False
    fell = server.post(f"/sleep?level={level}")
    assert fell.status_code == 200, fell.text
    assert fell.json()["status"] == "sleeping"
    assert fell.json()["level"] == level
    assert fell.json()["flushed"]["bytes"] > 0
    assert fell.json()["flushed"]["tokens"] >= 192
    missing = ["kv_cache"] if level == 1 else ["weights", "kv_cache"]  # on a CPU the weights stay at level 1
    assert server.get("/is_sleeping").json() == {"is_sleeping": True, "level": level, "missing": missing}
    health = server.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "sleeping"
    metrics = server.get("/metrics").text
    name = {1: "weights_offloaded", 2: "discard_all"}[level]
    states = {
        line.partition('sleep_state="')[2].partition('"')[0]: line[-3:]
        for line in metrics.splitlines()
        if line.startswith("vllm:engine_sleep_state{")
    }
    assert states == {
        state: "1.0" if state == name else "0.0" for state in ("awake", "weights_offloaded", "discard_all")
    }
    assert main(["top", "--url", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert f"level {level}" in shown
    assert "given back" in shown
    assert server.post("/wake_up").json() == {"status": "awake", "tags": None, "missing": []}
    assert tokens(server) == before
    assert main(["top", "--url", server.url, "--once"]) == 0
    assert "asleep" not in capsys.readouterr().out


def test_a_request_to_a_sleeping_server_is_a_503_that_says_how_it_is_woken(server: RunningServer) -> None:
    server.post("/sleep", {"level": 1})
    refused = complete(server)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "asleep"
    assert "/wake_up" in refused.json()["error"]["message"]
    streamed = complete(server, stream=True)
    assert streamed.status_code == 503
    assert server.get("/v1/models").is_success
    assert server.post("/tokenize", {"prompt": "a"}).is_success
    assert server.get("/v1/cache").json()["bytes"] == 0


def test_parts_are_woken_by_their_tags(server: RunningServer) -> None:
    server.post("/sleep?level=2")
    woken = server.post("/wake_up?tags=weights")
    assert woken.json() == {"status": "sleeping", "tags": ["weights"], "missing": ["kv_cache"]}
    assert complete(server).status_code == 503
    assert server.post("/wake_up", {"tags": ["kv_cache"]}).json()["status"] == "awake"
    assert complete(server).is_success


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/sleep?level=3", None, "level", "level is 3"),
        ("/sleep?level=one", None, "level", "'one'"),
        ("/sleep", {"level": "2"}, "level", "expected"),
        ("/sleep?mode=keep", None, "mode", "wait"),
        ("/sleep?timeout=-1", None, "timeout", "-1"),
        ("/sleep?timeout=nan", None, "timeout", "nan"),
        ("/wake_up?tags=kv", None, "tags", "kv_cache"),
    ],
)
def test_bad_calls_name_the_field_and_change_nothing(
    server: RunningServer, path: str, body: Any, field: str, words: str
) -> None:
    refused = server.post(path, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert words in refused.json()["error"]["message"]
    assert server.get("/is_sleeping").json()["is_sleeping"] is False


def test_a_page_of_another_site_cannot_make_a_browser_do_it(server: RunningServer) -> None:
    here = server.url.partition("://")[2]
    for path, asleep in (("/sleep", False), ("/wake_up", True)):
        refused = server.post(path, headers={"Origin": "http://elsewhere.example"})
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        assert server.post(path, headers={"Origin": "null"}).status_code == 403
        assert server.get("/is_sleeping").json()["is_sleeping"] is asleep
        assert server.post(path, headers={"Origin": f"http://{here}"}).status_code == 200


def test_only_its_operator_may_put_a_server_to_sleep(tmp_path: Path) -> None:
    settings = {"api_key": ["client"], "operator_key": ["operator"]}
    engine = {"model": str(write_model_directory(tmp_path))}
    with running_server("build", engine=engine, server=settings) as running:
        client, operator = ({"Authorization": f"Bearer {key}"} for key in ("client", "operator"))
        for path in ("/sleep", "/wake_up"):
            assert running.post(path).status_code == 401
            refused = running.post(path, headers=client)
            assert refused.status_code == 403
            assert refused.json()["error"]["type"] == "permission_error"
            assert running.post(path, headers=operator).status_code == 200
        assert running.get("/is_sleeping").status_code == 401
        assert running.get("/is_sleeping", headers=client).status_code == 200


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A scripted engine whose one row takes its time."""
    engine = {"model": str(write_model_directory(tmp_path_factory.mktemp("slow"))), "max_num_seqs": 1}
    with running_server("build_slow", engine=engine) as running:
        yield running


class TestWhatRuns:
    def ask(self, slow: RunningServer, n: int, max_tokens: int) -> tuple[threading.Thread, list[httpx.Response]]:
        answers: list[httpx.Response] = []
        body = {"prompt": "sing", "n": n, "max_tokens": max_tokens, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(slow.post("/v1/completions", body)))
        thread.start()
        assert eventually(lambda: slow.running() == n or bool(answers), 30.0)
        return thread, answers

    def test_is_not_harmed_unless_asked_and_then_told_why(self, slow: RunningServer) -> None:
        thread, answers = self.ask(slow, 8, 1500)  # a minute's work
        refused = slow.post("/sleep")
        assert refused.status_code == 409
        assert "8 sequences are running or waiting" in refused.json()["error"]["message"]
        late = slow.post("/sleep?mode=wait&timeout=0")
        assert late.status_code == 409
        assert "after 0 s" in late.json()["error"]["message"]
        assert slow.post("/sleep?mode=abort").status_code == 200
        thread.join()
        assert answers[0].status_code == 503
        assert "put to sleep" in answers[0].json()["error"]["message"]
        assert slow.post("/wake_up").json()["status"] == "awake"

    def test_is_waited_for_while_nothing_new_is_taken(self, slow: RunningServer) -> None:
        thread, answers = self.ask(slow, 1, 60)
        fell: list[httpx.Response] = []
        call = threading.Thread(target=lambda: fell.append(slow.post("/sleep?mode=wait&timeout=60")))
        call.start()
        call.join()
        thread.join()
        assert fell[0].json()["status"] == "sleeping"
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        slow.post("/wake_up")
