"""The soak of a million requests, in small: a fleet of three under all faults, and controls that must be
noticed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.soak_million.questions import Stream, asking, begins, question
from benchmarks.soak_million.slopes import PER, Sample, of_process, slopes
from tests.server.running import ROOT

REQUESTS = 120


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("soak")
    every = {"engine": 100, "worker": 200, "disk": 80, "clock": 30, "audit": 60, "sample": 40}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.soak_million",
            "--state",
            str(folder),
            "--requests",
            str(REQUESTS),
            "--rate",
            "200",
            "--controls",
            "--json",
            str(folder / "result.json"),
            *(word for kind, count in every.items() for word in ("--every", f"{kind}={count}")),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_a_fleet_under_every_fault_gives_right_answers_and_no_error_that_none_explains(result: dict[str, Any]) -> None:
    assert result["requests"] == REQUESTS
    assert (result["wrong"], result["unexplained"], result["audits_failed"]) == (0, 0, 0)
    assert result["audits"] == 2
    assert result["counts"]["compared with a lone engine"] > 0
    assert result["faults"]["HTTP processes killed"] == 1
    assert result["faults"]["engines killed"] <= 1, "only where all were ready"


def test_each_check_of_the_soak_notices_what_it_is_for(result: dict[str, Any]) -> None:
    assert result["controls_unnoticed"] == []


def test_request_n_is_the_same_in_every_run_and_all_kinds_come() -> None:
    asked = [asking(1, number) for number in range(1500)]
    assert asked == [asking(1, number) for number in range(1500)]
    assert asked != [asking(2, number) for number in range(1500)]
    assert len({one.question.kind for one in asked}) == len({question(number).kind for number in range(5000)})
    assert any(one.leaves_after for one in asked)


def test_a_slope_is_that_of_each_server_by_itself_and_too_few_requests_decide_nothing() -> None:
    def verdicts(leak: float, requests: int) -> str:
        samples = [
            Sample(server, number, {"engine: memory": 500 * server + leak * number + number % 7})
            for server in range(2)
            for number in range(0, requests, max(1, requests // 100))
        ]
        [row] = slopes(samples)
        return row.verdict

    assert verdicts(0.0, 1_000_000) == "flat"
    assert verdicts(2 * 10.0 / PER, 10_000_000) == "grows"
    assert verdicts(0.0, 40) == "open"


def test_values_that_jump_are_flat_in_a_run_that_is_long_enough_and_a_leak_among_them_grows() -> None:
    """Descriptors of an HTTP process change by tens with its connections. A server has 200,000 requests."""
    chance = random.Random(1)

    def verdict(leak: float, servers: int) -> str:
        samples = [
            Sample(
                server,
                200_000 * server + number,
                {"HTTP process: descriptors": 76 + leak * number + chance.gauss(0, 12)},
            )
            for server in range(servers)
            for number in range(0, 200_000, 200)
        ]
        return slopes(samples)[0].verdict

    assert verdict(0.0, 5) == "flat"
    assert verdict(2 * 5.0 / PER, 5) == "grows"


def test_an_answer_that_was_left_must_be_the_beginning_of_the_whole_one() -> None:
    stream = Stream("/v1/completions")
    for text in ("ab", "c"):
        stream.line(b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode())
    assert begins(stream.said(), [["abcd", "length", []]])
    assert not begins(stream.said(), [["abd", "length", []]])
    stream.line(b"data: " + json.dumps({"choices": [{"index": 2, "text": "x", "finish_reason": None}]}).encode())
    assert begins(stream.said(), [["abcd", "length", []], ["none yet", "length", []], ["xy", "length", []]])


def test_open_clients_are_no_descriptors_of_their_server_and_those_that_left_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def counted(of: int = port) -> float:
            return of_process("it", os.getpid(), of)["it: descriptors"]

        alone = counted()
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as taken:
            assert counted() == alone + 1, "this process is the client too"
            assert counted(of=1) == alone + 2, "the control: of another port"
            client.close()
            taken.settimeout(5)
            assert taken.recv(1) == b""
            assert counted() == alone + 1, "the server has not closed it"
