"""``weft ps`` beside a real server: listed while it lives, whatever ends it, and never after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.running import running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.main import main
from weft.server.running import running_servers


def test_a_server_is_listed_while_it_lives_with_what_it_has_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["ps"]) == 0
    assert "no server runs on this machine" in capsys.readouterr().out
    with running_server(
        "build", engine={"model": str(write_model_directory(tmp_path))}, server={"api_key": ["a-key"]}
    ) as server:
        [announced] = running_servers()
        assert (announced.pid, announced.url) == (server.process.pid, server.url)
        assert main(["ps", "--json", "--api-key", "a-key"]) == 0
        [row] = json.loads(capsys.readouterr().out)
        assert (row["url"], row["model"]) == (server.url, "scripted")
        assert main(["ps"]) == 0
        assert "this server wants an API key" in " ".join(capsys.readouterr().out.split())
        server.process.kill()  # nothing of it can tidy up
        server.process.wait()
        assert running_servers() == []
    assert not list((tmp_path / "weft" / "servers").iterdir())
