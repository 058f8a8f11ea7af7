"""Weights are replaced under a running server: what it answers, what it says, and who may do it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_replaced_weights import change_one_element
from tests.server.running import RunningServer, eventually, running_server

PROMPT = [3 + 7 * number % 251 for number in range(200)]
MEMORY = {"memory": "24MB", "threads": 1, "max_model_len": 1024, "dtype": "float32"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints that differ in one element."""
    folder = tmp_path_factory.mktemp("models")
    first = Path(shutil.copytree(checkpoint("lfm2"), folder / "first"))
    second = Path(shutil.copytree(first, folder / "second"))
    change_one_element(second)
    return first, second


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("store") / "store"
    stored = {"store": str(store), "store_size": "64MiB", "store_reserve": "1MiB"}
    with running_server("", engine={"model": str(models[0]), **MEMORY, **stored}) as running:
        yield running


def complete(server: RunningServer, **more: Any) -> httpx.Response:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.post("/v1/completions", {**fields, "logprobs": 0, **more})


def answer(server: RunningServer, **more: Any) -> tuple[list[int], list[float], int, str]:
    """(tokens, logprobs, cached tokens, version)."""
    response = complete(server, **more)
    assert response.is_success, response.text
    body = response.json()
    [choice], usage = body["choices"], body["usage"]
    version = usage.get("weight_version", "")
    assert response.headers.get("x-weft-weight-version", "") == version
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached, version


def test_other_weights_answer_as_a_fresh_server_of_theirs(server: RunningServer, models: tuple[Path, Path]) -> None:
    salt = {"cache_salt": "what this test alone computes"}
    updates = server.post("/update_weights", {"path": str(models[0])}).json()["updates"]
    old = answer(server, **salt)
    assert answer(server, **salt)[2] > 100
    updated = server.post("/update_weights", {"path": str(models[1]), "weight_version": "step-7"})
    assert updated.status_code == 200, updated.text
    assert updated.json()["weight_version"] == "step-7"
    assert updated.json()["updates"] == updates + 1
    assert updated.json()["flushed"]["tokens"] > 100
    new = answer(server, **salt)
    assert new[2:] == (0, "step-7")
    assert new[1] != old[1]
    health = server.get("/health").json()
    assert health == {"status": "ok", "weight_version": "step-7"}
    metrics = server.get("/metrics").text
    assert "weights_info{" in metrics
    assert 'weight_version="step-7"' in metrics
    assert server.post("/update_weights", {"path": str(models[0]), "weight_version": "step-8"}).is_success
    again = answer(server, **salt)
    assert again[:2] == old[:2]
    assert again[3] == "step-8"
    # What the first weights stored is found again; what the second computed is not among it.
    assert again[2] in (0, 192)


def test_a_pause_holds_requests_and_other_weights_answer_them(server: RunningServer, models: tuple[Path, Path]) -> None:
    assert server.get("/is_paused").json() == {"is_paused": False}
    assert server.post("/pause?mode=wait").json()["status"] == "paused"
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.get("/health").json()["status"] == "paused"
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(server)))
    asking.start()
    assert server.post("/update_weights", {"path": str(models[1]), "weight_version": "held"}).is_success
    assert not answers
    assert server.post("/resume").json()["status"] == "resumed"
    asking.join(timeout=30)
    assert answers[0].json()["usage"]["weight_version"] == "held"


def test_a_stream_goes_on_over_an_update_and_says_the_version_that_ended_it(
    server: RunningServer, models: tuple[Path, Path]
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=fields, timeout=60) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        assert server.post("/update_weights", {"path": str(models[0]), "weight_version": "middle"}).is_success
        rest = list(lines)
    assert rest[-1] == "[DONE]"
    usage = json.loads(rest[-2])["usage"]
    assert usage["completion_tokens"] == 300
    assert usage["weight_version"] == "middle"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "path"),
        ({"path": "relative/model"}, "path"),
        ({"path": "/nowhere"}, "config.json"),
        ({"path": "/nowhere", "mode": "later"}, "mode"),
        ({"path": "/nowhere", "timeout": -1}, "timeout"),
        ({"path": "/nowhere", "weight_version": "a\nb"}, "weight_version"),
        ({"update_info": {"names": []}}, "update_info"),
    ],
)
def test_bad_calls_name_the_field_and_change_nothing(server: RunningServer, body: dict[str, Any], named: str) -> None:
    before = answer(server)
    refused = server.post("/update_weights", body)
    assert refused.status_code == 400, refused.text
    assert named in refused.text
    assert answer(server)[:2] == before[:2]


def test_a_flush_empties_the_store_and_leaves_it_where_it_is_told_to(server: RunningServer) -> None:
    answer(server)
    server.post("/sleep?level=1")  # all is written
    server.post("/wake_up")
    assert answer(server)[2] == 192

    def comes_back_from_the_store() -> bool:
        # Where other programs slow the disk down, computing is the faster way for once.
        assert server.post("/v1/cache/flush?store=false").is_success
        return answer(server)[2] == 192

    assert eventually(comes_back_from_the_store)
    assert server.post("/v1/cache/flush").is_success
    assert answer(server)[2] == 0
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    assert answer(server)[2] == 0
    assert server.post("/v1/cache/flush?store=perhaps").status_code == 400


def test_only_its_operator_may_replace_the_weights(tmp_path: Path) -> None:
    keys = {"api_key": ["client"], "operator_key": ["operator"]}
    with running_server("", engine={"model": str(checkpoint("lfm2")), **MEMORY}, server=keys) as guarded:
        for path in ("/pause", "/resume", "/update_weights", "/reset_prefix_cache"):
            refused = guarded.post(path, {}, headers={"Authorization": "Bearer client"})
            assert refused.status_code == 403, path
        paused = guarded.get("/is_paused", headers={"Authorization": "Bearer client"})
        assert paused.json() == {"is_paused": False}
