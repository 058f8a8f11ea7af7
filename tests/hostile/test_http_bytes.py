"""Bytes that are nearly HTTP: mutations of valid requests, with a fixed seed and budget.

The server must answer 2xx or 4xx or close the connection, must not fail with a 5xx, and must serve a
bystander."""

from __future__ import annotations

import os
import random

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.hostile.raw import HEAD, RawClient
from tests.server.running import RunningServer

ROUNDS = int(os.environ.get("WEFT_FUZZ_ROUNDS", "400"))
SERVER = {"header_timeout": 0.2, "body_timeout": 0.2, "max_body_mb": 1}
SEEDS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b'Content-Length: 34\r\n\r\n{"prompt": "say:a", "max_tokens":1}',
    b"POST /tokenize HTTP/1.1\r\n" + HEAD + b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"prompt": "abc"}\r\n0\r\n\r\n',
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
)
TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b":",
    b"\xff\xfe",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: a\r\n",
    b"HTTP/9.9",
    b"CONNECT a:1 ",
    b"%00",
    b"%ff",
    b"//",
    b"http://a@b:c/",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"Connection: close\r\n",
    b" folded: a\r\n\tb\r\n",
    b"a" * 9000,
)


def mutated(source: random.Random) -> bytes:
    data = bytearray(source.choice(SEEDS) * source.choice((1, 1, 1, 2, 5)))
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data) + 1)
        match source.randrange(4):
            case 0:
                data[at:at] = source.choice(TOKENS)
            case 1:
                del data[at : at + source.randint(1, 20)]
            case 2:
                data[at : at + 1] = bytes([source.randrange(256)])
            case _:
                other = source.choice(SEEDS)
                data[at:] = other[source.randrange(len(other)) :]
        data = data or bytearray(b"\r\n")
    return bytes(data)


def _statuses(url: str, data: bytes) -> list[int]:
    with RawClient(url, limit_s=5.0) as client:
        client.send(data)
        statuses = []
        while (answer := client.answer()) is not None:
            statuses.append(answer.status)
            if len(statuses) == 12:
                break
            client.socket.settimeout(0.05)
            try:
                client.wait_for_more()
            except TimeoutError:
                break
            client.socket.settimeout(5.0)
    return statuses


def test_mutated_requests_end_in_an_answer_or_a_closed_connection(server: RunningServer) -> None:
    source = random.Random(14)
    _statuses(server.url, SEEDS[0])
    before = rss_of(server.process.pid)
    seen: set[int] = set()
    with bystander(server) as other:
        for _ in range(ROUNDS):
            data = mutated(source)
            statuses = _statuses(server.url, data)
            assert all(status < 500 for status in statuses), data
            seen.update(statuses)
    other.check()
    assert {200, 400} <= seen
    assert rss_returns(server.process.pid, before, share=0.25)
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.output
