"""A session that one machine saved is restored by a machine that joins: from the bucket that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_join import free_port, joining, joining_port, states
from tests.server.running import RunningServer, eventually, running_server
from tests.server.test_sessions import MORE, PROMPT, complete, save


def serving(folder: Path, name: str, replicas: str) -> RunningServer:
    """A server of the fleet's objects and bucket, with a directory of its own in front of the bucket."""
    engine = {
        "model": str(checkpoint("qwen3_5")),
        "memory": "24MB",
        "threads": 1,
        "max_model_len": 1024,
        "dtype": "float32",
        "store": f"file://{folder / 'bucket'}",
        "store_cache": str(folder / name),
        "store_size": "1GB",
        "store_reserve": "1MB",
    }
    server = {
        "replicas": replicas,
        "token": str(folder / "token"),
        "listen_engines": f"127.0.0.1:{free_port()}",
        "response_store": str(folder / "objects.sqlite"),
    }
    wait_for = "weft join HOST" if replicas == "0" else "API "
    return running_server("", engine=engine, server=server, wait_for=wait_for)


def in_bucket(report: Any) -> int:
    """Return the snapshots that engines see in the bucket, by a report of /v1/cache."""
    if isinstance(report, dict):
        own = report["remote"].get("snapshots", 0) if isinstance(report.get("remote"), dict) else 0
        return int(own + sum(map(in_bucket, report.values())))
    return sum(map(in_bucket, report)) if isinstance(report, list) else 0


@pytest.mark.parametrize("shares", [True, False])
def test_a_joined_machine_computes_new_tokens_only(tmp_path: Path, shares: bool) -> None:
    """Without the bucket, the control, it computes all of them; the bits are the same."""
    with serving(tmp_path, "first", "1") as first:
        save(first, "trip")
        tokens, logprobs, computed = complete(first, MORE, session="trip")
        assert computed == len(MORE)
        assert eventually(lambda: first.metric("store_uploads_total") > 0 == first.metric("store_uploads_waiting"), 40)
        first.process.kill()
        first.process.wait()
    if not shares:
        (tmp_path / "bucket").rename(tmp_path / "gone")
    options = ("--memory", "24MB", "--threads", "1")
    with serving(tmp_path, "second", "0") as second, joining(joining_port(second), tmp_path / "token", *options):
        assert eventually(lambda: second.get("/health").json()["status"] == "ok", 60)
        assert list(states(second).values()) == ["ready"]
        assert eventually(lambda: bool(in_bucket(second.get("/v1/cache").json())) == shares, 40)
        restored = second.post("/v1/sessions/trip/restore").json()
        assert restored["in_memory"] == len(PROMPT)
        assert restored["computed_tokens"] == (0 if shares else len(PROMPT))
        again = complete(second, MORE, session="trip")
        assert again[:2] == (tokens, logprobs)
        assert again[2] <= len(MORE)
