"""A replica whose restarts are used up is dead, everything says so and why, and it can be started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fleet.test_replicas import all_ready, engine_pids, replicas
from tests.server.running import eventually, running_server
from weft.cli.main import main


def test_a_replica_that_died_for_good_is_dead_with_its_reason_and_can_be_started(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(
        "build_paced", engine={"model": str(model_directory)}, server={"replicas": "2", "restarts": 0}
    ) as server:
        for again in (["drain", "1", "--start"], ["drain", "1", "--restart"], ["drain", "all", "--restart"]):
            os.kill(engine_pids(server)[1], signal.SIGKILL)
            assert eventually(lambda: replicas(server)[1]["state"] == "dead")
            assert "ended by SIGKILL" in replicas(server)[1]["reason"]
            health = server.get("/health").json()
            assert health["status"] == "degraded"
            assert "is dead" in health["reason"]
            assert main(["top", "--once", "--url", server.url]) == 0
            shown = " ".join(capsys.readouterr().out.split())
            assert "engine 1 is dead" in shown
            assert "ended by SIGKILL" in shown
            assert main([*again, "--url", server.url]) == 0
            assert all_ready(server)
            assert server.get("/health").json() == {"status": "ok"}
        server.interrupt()
        assert server.exit_code() == 0
        lines = [line for line in server.rest_of_output().splitlines() if "dead, as its restarts" in line]
        assert len(lines) == 3
        assert all("ended by SIGKILL" in line and "limits.restarts is 0" in line for line in lines)
