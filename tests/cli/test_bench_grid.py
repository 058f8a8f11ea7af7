"""``weft bench grid``: one table of a server, a file that goes on, files side by side."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.main import main
from weft_tools.bench.grid import SECOND_TURN_TOKENS

SMALL = ["--streams=1,3", "--prompts=16,40", "--input-len=12", "--output-len=4", "--turn-len=300", "--repetitions=1"]
CELLS = ["1 stream", "3 streams", "second turn, 300 tokens", "prompt, 16 tokens", "prompt, 40 tokens"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = {"model": str(write_model_directory(tmp_path_factory.mktemp("scripted")))}
    with running_server("build_cached", engine=engine) as running:
        yield running


@pytest.fixture(scope="module")
def measured(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "weft.json"
    assert main(["bench", "grid", "--base-url", server.url, *SMALL, "--output-json", str(path)]) == 0
    return path


def test_each_cell_has_its_figures(measured: Path) -> None:
    results = json.loads(measured.read_text())["results"]
    assert list(results) == CELLS
    for name in CELLS[:2]:
        assert set(results[name]) == {"output_tokens_s", "stream_tokens_s", "first_token_s", "first_token_p99_s"}
        assert all(value > 0 for value in results[name].values())
    for name in CELLS[3:]:
        length = int(name.split()[1])
        assert results[name]["prompt_tokens_s"] == pytest.approx(length / results[name]["first_token_s"])


def test_a_second_turn_repeats_the_answer_of_the_first(measured: Path) -> None:
    """What a server caches of it is its opening and its answer, in whole pages of at most 64 tokens."""
    turn = json.loads(measured.read_text())["results"]["second turn, 300 tokens"]
    assert turn["answer_known"] is True
    assert turn["prompt_tokens"] == 300 + 4 + SECOND_TURN_TOKENS
    assert turn["cached_tokens"] > 300 - 64


def test_a_run_goes_on_where_it_ended(
    server: RunningServer, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells with figures are kept to the bit; one that is missing and one that failed are measured."""
    path = tmp_path / "grid.json"
    run = json.loads(measured.read_text())
    del run["results"][CELLS[0]]
    run["results"][CELLS[1]] = {"failed": "503: no"}
    path.write_text(json.dumps(run))
    asked = ["bench", "grid", "--base-url", server.url, *SMALL, "--output-json", str(path)]
    assert main(asked) == 0
    after = json.loads(path.read_text())
    assert after["seed"] == run["seed"]
    assert {name: after["results"][name] for name in CELLS[2:]} == {name: run["results"][name] for name in CELLS[2:]}
    assert after["results"][CELLS[0]]["output_tokens_s"] > 0
    assert after["results"][CELLS[1]]["output_tokens_s"] > 0
    capsys.readouterr()
    assert main([*asked, "--turn-len", "301"]) == 2
    assert f"--output-json {path} has a run with cells" in capsys.readouterr().err


def test_a_cell_beyond_the_context_or_the_limit_of_time_is_skipped_and_said(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench", "grid", "--base-url", server.url, *SMALL, "--output-json", str(tmp_path / "grid.json")]
    assert main([*asked, "--streams", "1", "--prompts", "9000000", "--limit-s", "0.0001"]) == 0
    shown = capsys.readouterr().out
    assert "1 stream: skipped: took over 0.0001 s" in shown
    assert "prompt, 9,000,000 tokens: skipped: needs 9,000,001 tokens of context, and the server has" in shown


def test_files_are_shown_side_by_side(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.loads(measured.read_text())
    for figures in other["results"].values():
        if "output_tokens_s" in figures:
            figures["output_tokens_s"] *= 2
        figures["first_token_s"] *= 2
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    assert main(["bench", "grid", str(measured), str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["cell", "figure", "weft", "other", "ratio"]
    assert {row[-1] for row in rows if "output" in row} == {"2.00"}
    assert {row[-1] for row in rows if "first" in row and "ms" in row} == {"0.50"}
    same = tmp_path / "weft.json"
    same.write_text(measured.read_text())
    assert main(["bench", "grid", str(measured), str(same)]) == 0
    assert f"2. {same}" in capsys.readouterr().out
    nonsense = tmp_path / "nonsense.json"
    nonsense.write_text("{}")
    assert main(["bench", "grid", str(measured), str(nonsense)]) == 2
    assert f"{nonsense} is not a result of weft bench grid" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--streams", "1,x"), ("--prompts", "0")])
def test_a_list_that_is_none_names_the_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "grid", flag, value]) == 2
    assert f"{flag} is {value!r}" in capsys.readouterr().err


class OneAnswerAConnection(socketserver.StreamRequestHandler):
    """A server that keeps a connection open after its answer, and closes it when the next request has arrived there."""

    def handle(self) -> None:
        path, body = read_request(self.rfile)
        if path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}))
        elif path == "/v1/completions":
            chunks = [
                {"choices": [{"index": 0, "text": "a", "token_ids": [7]}]}
                for _ in range(json.loads(body)["max_tokens"])
            ]
            self._answer("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")
        else:
            self._answer("{}")
        self.rfile.readline()

    def _answer(self, body: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write((head + body).encode())


def read_request(file: IO[bytes]) -> tuple[str, bytes]:
    first, *fields = iter(lambda: file.readline().strip().decode(), "")
    lengths = [int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:")]
    return first.split()[1], file.read(sum(lengths))


def test_a_server_that_closes_idle_connections_late_fails_no_request(tmp_path: Path) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OneAnswerAConnection) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = tmp_path / "grid.json"
        url = f"http://127.0.0.1:{server.server_address[1]}"
        asked = ["bench", "grid", "--base-url", url, *SMALL, "--vocab-size=100", "--output-json", str(path)]
        assert main(asked) == 0
        server.shutdown()
    assert [name for name, figures in json.loads(path.read_text())["results"].items() if "failed" in figures] == []
