"""The router of two real engine processes: a prompt goes where its snapshot is, as engines report it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.server.running import RunningServer, eventually, running_server


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[RunningServer]:
    with running_server(
        "build_cached", engine={"model": str(model_directory)}, server={"replicas": "2", "restarts": 20}
    ) as running:
        yield running


def metric(server: RunningServer, name: str) -> list[float]:
    """By replica."""
    rows = re.findall(rf'^weft:{name}{{engine="(\d)"[^}}]*}} (\S+)$', server.get("/metrics").text, re.M)
    return [float(value) for _, value in sorted(rows)]


def ask(server: RunningServer, text: str, **more: Any) -> int:
    """Cached tokens of the prompt."""
    answer = server.client().completions.create(model="default", prompt=text, max_tokens=2, temperature=0.0, **more)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None or details.cached_tokens is None else details.cached_tokens


def known_everywhere(server: RunningServer) -> bool:
    return eventually(lambda: metric(server, "router_table_stale") == [0.0, 0.0], 20)


def counted(server: RunningServer) -> list[np.ndarray[Any, Any]]:
    """Prompt tokens by replica: cached ones as the engines count them, then cached and predicted ones as the router
    does, in metrics and in its rows."""
    rows = [row["router"] for row in server.get("/v1/cache").json()["replicas"]]
    names = ("prompt_tokens_cached_total", "router_cached_tokens_total", "router_predicted_tokens_total")
    shown = [metric(server, name) for name in names]
    told = [[row[name] for row in rows] for name in ("cached_tokens", "predicted_tokens")]
    return [np.array(one) for one in (*shown, *told)]


def requests(server: RunningServer) -> int:
    return sum(row["router"]["requests"] for row in server.get("/v1/cache").json()["replicas"])


TEXT = " ".join(f"word{number}" for number in range(120))


def test_a_prompt_that_comes_again_goes_where_it_was_computed(server: RunningServer) -> None:
    assert known_everywhere(server)
    seen, asked = counted(server), requests(server)
    assert ask(server, TEXT) == 0
    assert eventually(lambda: sum(metric(server, "router_checkpoints")) > 0)
    cached = [ask(server, TEXT + f" and question {number}") for number in range(4)]
    assert min(cached) > 64
    by_replica, *others = (now - before for now, before in zip(counted(server), seen, strict=True))
    assert sorted(by_replica) == [0.0, float(sum(cached))], "all on one replica"
    assert [list(other) for other in others] == [list(by_replica)] * 4
    assert requests(server) == asked + 5
    assert not any(row["router"]["is_stale"] for row in server.get("/v1/cache").json()["replicas"])


def test_two_salts_share_no_prefix(server: RunningServer) -> None:
    text = "salted " + TEXT
    assert ask(server, text, extra_body={"cache_salt": "a"}) == 0
    assert ask(server, text, extra_body={"cache_salt": "b"}) == 0
    before = metric(server, "router_predicted_tokens_total")
    cached = ask(server, text, extra_body={"cache_salt": "a"})
    assert cached > 64
    assert sum(metric(server, "router_predicted_tokens_total")) - sum(before) == cached


def test_a_killed_engine_is_forgotten_and_its_successor_is_known(server: RunningServer) -> None:
    text = "killed " + TEXT
    ask(server, text)
    assert ask(server, text) > 64
    for child in psutil.Process(server.process.pid).children():
        if "engine_process" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    assert eventually(
        lambda: metric(server, "engine_restarts_total") == [1.0, 1.0] and metric(server, "engine_up") == [1.0, 1.0], 30
    )
    assert known_everywhere(server)
    assert ask(server, text) == 0, "the caches of new processes are empty"
    assert ask(server, text) > 64
    assert metric(server, "router_report_gaps_total") == [0.0, 0.0]
