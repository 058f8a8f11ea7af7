"""``weft ps`` beside a real server: listed while it lives, whatever ends it, and never after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.running import running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.main import main, print_table, table_of
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
        title, row_of_text = capsys.readouterr().out.splitlines()  # each row is a line, whatever its length
        assert title.split()[:3] == ["server", "pid", "model"]
        assert row_of_text.startswith(server.url)
        assert "this server wants an API key" in row_of_text
        assert main(["ps", "--api-key", "a-key"]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[2] == "scripted"
        server.process.kill()  # nothing of it can tidy up
        server.process.wait()
        assert running_servers() == []
    assert not list((tmp_path / "weft" / "servers").iterdir())


def test_an_address_where_nothing_answers_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: nothing answers at http://127.0.0.1:9: ")
    assert said.err.count("\n") == 1
    assert main(["ps", "--url", "http://127.0.0.1:9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["error"].startswith("nothing answers")


def test_no_cell_of_a_table_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(["name", "what"])
    table.add_row("n" * 90, "w" * 90)
    print_table(table)
    assert capsys.readouterr().out.splitlines()[1].split() == ["n" * 90, "w" * 90]
