"""A server without replicas of its own, with two HTTP processes, waits for a machine and serves on it."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_join import free_port, joining, joining_port, states
from tests.server.running import RunningServer, eventually, running_server
from weft.errors import ConfigError
from weft.server.config import ServerConfig

MACHINE = ("--memory", "32MB", "--threads", "1")


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "token"


@pytest.fixture(scope="module")
def server(token: Path) -> Iterator[RunningServer]:
    settings = {
        "replicas": "0",
        "http_workers": 2,
        "token": str(token),
        "router": "seconds",
        "listen_engines": f"127.0.0.1:{free_port()}",
    }
    engine = {"model": str(checkpoint("qwen3_5")), "max_model_len": 256}
    with running_server("", engine=engine, server=settings, wait_for="weft join HOST") as running:
        yield running


async def said(server: RunningServer, count: int) -> list[str]:
    """Each on a connection of its own, so at either worker."""
    body: dict[str, Any] = {"model": "default", "prompt": "hello", "max_tokens": 8, "temperature": 0}

    async def one() -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    return await asyncio.gather(*(one() for _ in range(count)))


def test_a_server_without_replicas_serves_with_a_machine_that_joins(server: RunningServer, token: Path) -> None:
    with joining(joining_port(server), token, *MACHINE) as first:
        assert eventually(lambda: server.get("/health").json()["status"] == "ok", 40)
        answers = asyncio.run(said(server, 6))
        assert len(set(answers)) == 1
        first.send_signal(signal.SIGINT)
        assert first.wait(20) == 0
    assert eventually(lambda: states(server) == {})
    health = server.get("/health")
    assert health.status_code == 200
    assert (health.json()["status"], "no machine has joined" in health.json()["reason"]) == ("degraded", True)

    async def waited() -> list[str]:
        waiting = asyncio.create_task(said(server, 2))
        await asyncio.sleep(0.3)
        assert not waiting.done(), "they are held"
        with joining(joining_port(server), token, *MACHINE):
            return await waiting

    assert asyncio.run(waited()) == answers[:2]


def test_other_weights_are_refused(server: RunningServer, token: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5"), other)
    [file] = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors[min(tensors)] += 1
    save_file(tensors, file, {"format": "pt"})
    with joining(joining_port(server), token, *MACHINE) as first:
        assert eventually(lambda: server.get("/health").json()["status"] == "ok", 40)
        with joining(joining_port(server), token, *MACHINE, "--model", str(other)) as second:
            output, _ = second.communicate(timeout=30)
        assert (second.returncode, "would give other answers: weights is" in output) == (2, True), output
        first.send_signal(signal.SIGINT)
        assert first.wait(20) == 0


def test_a_recording_of_no_replica_is_refused(token: Path, tmp_path: Path) -> None:
    config = ServerConfig(replicas="0", token=str(token), listen_engines="127.0.0.1:0", record=str(tmp_path / "trace"))
    with pytest.raises(ConfigError, match="--record records the replicas of this machine"):
        config.check()
