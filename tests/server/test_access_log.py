"""server.access_log json, and the dashboard of deploy/: every query names a metric that the server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import ROOT, RunningServer, eventually, running_server

KEY = {"Authorization": "Bearer secret-key"}


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[RunningServer]:
    with running_server(
        "build",
        engine={"model": str(model_directory)},
        server={"access_log": "json", "api_key": ["secret-key"], "replicas": "2"},
    ) as running:
        yield running


def test_every_query_of_the_dashboard_names_a_metric_of_the_server(server: RunningServer) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"weft:(\w+)", query)}
    assert len(asked) > 15
    assert asked >= {
        "store_bytes",
        "store_writes_total",
        "store_uploads_waiting",
        "store_uploads_total",
        "store_unreachable_seconds_total",
    }
    server.client(api_key="secret-key").completions.create(model="default", prompt="say:a")

    def missing() -> set[str]:
        text = server.get("/metrics", headers=KEY).text
        return asked - set(re.findall(r"^(?:# TYPE )?weft:(\w+)", text, re.MULTILINE))

    assert eventually(lambda: not missing()), missing()
    # The control: a name that no server has is found out.
    asked.add("no_such_metric")
    assert missing() == {"no_such_metric"}


def test_each_request_is_a_json_object_without_keys_and_texts(server: RunningServer) -> None:
    server.post("/v1/completions?key=in-the-query", {"prompt": "say:private"}, headers=KEY)
    server.get("/v1/models/wrong", headers=KEY)
    server.interrupt()
    assert server.exit_code() == 0
    text = server.rest_of_output()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(one["method"], one["path"], one["status"]) for one in lines][-2:] == [
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/models/wrong", 404),
    ]
    assert set(lines[0]) == {"time", "client", "method", "path", "status"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", lines[0]["time"])
    assert not re.search("secret-key|private|in-the-query", text)
