"""Pipelined requests: bounded, answered in order, and cancelled when their client leaves."""

from __future__ import annotations

import json

import pytest

from tests.hostile.raw import HEAD, RawClient
from tests.server.running import RunningServer, eventually

FACTORY = "build_slow"
LONG = {"prompt": "a" * 100, "max_tokens": 1800, "ignore_eos": True}
SHORT = {"prompt": "say:ok", "max_tokens": 4}


def _request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(data), data)


@pytest.mark.parametrize("count", [10, 300])
def test_a_client_that_pipelines_and_leaves_costs_one_request(server: RunningServer, count: int) -> None:
    before = server.metric("prompt_tokens_total")
    with server.ends_early(1800), RawClient(server.url) as client:
        client.send(_request(LONG) * count)
        assert eventually(lambda: server.running() == 1)
    assert eventually(lambda: server.metric("prompt_tokens_total") == before + 100)
    assert server.get("/load").json()["server_load"] == 0


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(b"".join(_request({**SHORT, "prompt": f"say:{number}"}) for number in range(9)))
        for number in range(9):
            answer = client.answer()
            assert answer is not None
            assert json.loads(answer.body)["choices"][0]["text"] == str(number)


def test_beyond_the_limit_the_first_ones_are_answered_and_the_connection_ends(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(_request(SHORT) * 100)
        answers = []
        while (answer := client.answer()) is not None:
            answers.append(answer)
    assert len(answers) == 17
    assert {answer.status for answer in answers} == {200}
    assert answers[-1].headers["connection"] == "close"


@pytest.mark.parametrize(
    "broken",
    [b"\x00\x01\x02\r\n\r\n", b"GET /" + b"a" * 20_000, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
def test_a_refusal_does_not_break_into_the_answer_under_way(server: RunningServer, broken: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(_request({**SHORT, "prompt": "say:whole", "max_tokens": 50}) + broken)
        answer = client.answer()
        assert answer is not None
        assert json.loads(answer.body)["choices"][0]["text"] == "whole"
        assert client.is_closed()


def test_a_broken_body_ends_its_own_request(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n" % HEAD)
        client.send(b"5\r\n{    \r\nzz\r\n")
        answer = client.answer()
        assert answer is not None
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    assert eventually(lambda: server.get("/load").json()["server_load"] == 0)
