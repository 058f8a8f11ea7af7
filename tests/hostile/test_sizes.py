"""What is too large is refused by its own limit, before any key is checked, and takes no memory."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.hostile.raw import HEAD, RawClient
from tests.server.running import RunningServer

SERVER = {"api_key": ["a-key"], "max_body_mb": 60, "max_buffered_mb": 100, "max_unread_mb": 3}
KEY = {"Authorization": "Bearer a-key"}
START = b"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer a-key\r\n" + HEAD
MB = 1_000_000


@pytest.mark.parametrize(
    ("data", "status", "code", "flag"),
    [
        (b"GET /" + b"a" * 9000, 414, "request_line_too_long", "limits.max_request_line"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 300_000, 431, "headers_too_large", "limits.max_header_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"A" * 300_000, 431, "headers_too_large", "limits.max_header_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 102, 431, "headers_too_large", "limits.max_header_bytes"),
        (
            b"GET / HTTP/1.1\r\n" + b"A: %s\r\n" % (b"c" * 4000) * 10,
            431,
            "headers_too_large",
            "limits.max_header_bytes",
        ),
        (b"POST / HTTP/1.1\r\n%sContent-Length: 60000001\r\n\r\n" % HEAD, 413, "body_too_large", "limits.max_body_mb"),
    ],
)
def test_a_size_over_its_limit_is_refused(
    server: RunningServer, data: bytes, status: int, code: str, flag: str
) -> None:
    with RawClient(server.url) as client:
        client.send(data)
        answer = client.answer()
        assert answer is not None
        assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, flag)
        assert flag in answer.error["message"]
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert len(answer.headers["x-request-id"]) == 32
        assert client.is_closed()


def test_a_message_over_the_limit_is_refused_in_the_shape_of_its_dialect(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(b"POST /v1/messages HTTP/1.1\r\n%sContent-Length: 60000001\r\n\r\n" % HEAD)
        answer = client.answer()
        assert answer is not None
        assert (answer.status, answer.error["type"]) == (413, "request_too_large")
        assert "limits.max_body_mb" in answer.error["message"]


def test_what_is_just_within_its_limit_is_served(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(b"GET /health?%s HTTP/1.1\r\nHost: localhost\r\n" % (b"a" * 8000))
        client.send(b"A: b\r\n" * 90 + b"C: %s\r\n\r\n" % (b"d" * 30_000))
        answer = client.answer()
        assert answer is not None
        assert answer.status == 200


def test_a_chunked_body_over_the_limit_is_refused(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(START + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        while client.send(chunk):
            assert server.process.poll() is None


@pytest.mark.parametrize("tail", [b"0\r\nA: " + b"b" * 400_000, b"1;" + b"x" * 400_000])
def test_trailers_and_chunk_extensions_are_bounded(server: RunningServer, tail: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(START + b"Transfer-Encoding: chunked\r\n\r\n" + tail)
        answer = client.answer()
        assert answer is not None
        assert answer.status == 431


def test_an_endless_request_line_or_header_harms_no_other_client(server: RunningServer) -> None:
    pid = server.process.pid
    with bystander(server, headers=KEY) as other:
        before = rss_of(pid)
        for start in (b"GET /", b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50):
            with RawClient(server.url) as client:
                client.send(start)
                while client.send(b"a" * MB):
                    assert server.process.poll() is None
        assert rss_of(pid) < before + 20 * MB
    other.check()
    assert rss_returns(pid, before)


def test_unfinished_bodies_share_one_budget(server: RunningServer) -> None:
    """20 bodies of 50 MB, none complete: a gigabyte without the budget."""
    pid = server.process.pid
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(bystander(server, headers=KEY))
        before = rss_of(pid)
        clients = [stack.enter_context(RawClient(server.url)) for _ in range(20)]
        for client in clients:
            client.send(START + b"Content-Length: 50000001\r\n\r\n" + b" " * 50 * MB)
        assert rss_of(pid) < before + 250 * MB
        refused = re.search(
            r'http_refusals_total{code="server_buffers_full".*} (\S+)', server.get("/metrics", headers=KEY).text
        )
        assert refused is not None
        assert float(refused[1]) >= 17
    other.check()
    assert rss_returns(pid, before, share=0.25)
    assert server.post("/tokenize", {"prompt": "a"}, headers=KEY).status_code == 200


def test_an_answer_that_is_not_read_ends_and_one_that_is_read_goes_on(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 20}
    with RawClient(server.url, receive_bytes=1024, limit_s=30.0) as slow:
        with server.ends_early(8 * 1900, headers=KEY):
            raw = json.dumps({**body, "n": 8}).encode()
            slow.send(b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer a-key\r\n%s" % HEAD)
            slow.send(b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
        read = server.post("/v1/completions", {**body, "logprobs": 5}, headers=KEY).text
        assert (read.count('finish_reason":"length'), "client_too_slow" in read) == (1, False)
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += slow.socket.recv(1 << 20)
    assert b"limits.max_unread_mb" in received
    assert b'"code":"client_too_slow"' in received[-400:]
    assert len(received) < 3 * MB
