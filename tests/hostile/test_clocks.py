"""What takes too long ends: idle connections, half a header, half a body, a client that never reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.hostile.raw import ADDRESS, HEAD, RawClient
from tests.server.running import RunningServer, eventually, running_server
from weft.server.edge import SWEEP_S, EdgeLimits, HttpEdge

LIMIT_S = 1.0
SERVER = {
    "header_timeout": LIMIT_S,
    "body_timeout": LIMIT_S,
    "idle_timeout": LIMIT_S,
    "write_timeout": LIMIT_S,
    "max_connections": 1500,
    "max_connections_per_address": 1100,
}
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: local"
HALF_BODY = b"POST /tokenize HTTP/1.1\r\n%sContent-Length: 100\r\n\r\n{" % HEAD
ENDLESS = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("start", [HALF_HEAD, HALF_BODY, b"\r\n\r\n", b"G"])
def test_half_a_request_gets_a_408(server: RunningServer, start: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(start)
        answer = client.answer()
        assert answer is not None
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.error["param"] in ("limits.header_timeout", "limits.body_timeout")


def test_a_byte_now_and_then_does_not_stop_the_clock(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        began_s = time.monotonic()
        client.send(HALF_HEAD)
        while client.send(b"a"):
            assert time.monotonic() - began_s < 60
            time.sleep(0.1)


class _Swept(asyncio.Protocol):
    """What its connection has brought, and how much of that at a sweep once the server ``stood_still``."""

    def __init__(self) -> None:
        self.bytes = 0
        self.at_sweep = -1
        self.blocks: Callable[[], None] = lambda: None
        self.stood_still = False

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        self.blocks()

    def sweep(self, now_s: float) -> None:
        if self.stood_still and self.at_sweep < 0:
            self.at_sweep = self.bytes

    def abort(self) -> None:
        raise AssertionError("nothing here is slow")


def test_a_body_that_came_while_the_server_stood_still_is_read_before_its_client_is_called_slow() -> None:
    """A process that the machine does not run may stand still between two reads, and its timers come first
    behind that."""

    async def run() -> int:
        edge, protocols, loop = HttpEdge(EdgeLimits()), [_Swept(), _Swept()], asyncio.get_running_loop()
        waiting, other = protocols
        unused = iter(protocols)
        server = await loop.create_server(lambda: next(unused), ADDRESS, 0)
        async with server:
            clients = []
            for protocol in protocols:
                edge.enter(protocol, ADDRESS)
                clients.append(socket.create_connection(server.sockets[0].getsockname()))
                clients[-1].sendall(b"head")
                while not protocol.bytes:
                    await asyncio.sleep(0.001)

            def stand_still() -> None:
                clients[0].sendall(b"body")
                time.sleep(2 * SWEEP_S)
                waiting.stood_still = True

            other.blocks = stand_still
            sweeping = asyncio.create_task(edge.sweep_forever())
            await asyncio.sleep(0)
            clients[1].sendall(b"more")
            while waiting.at_sweep < 0:
                await asyncio.sleep(0.001)
            sweeping.cancel()
            for client in clients:
                client.close()
        return waiting.at_sweep

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == len(b"headbody")


def test_an_idle_connection_is_closed_without_words(server: RunningServer) -> None:
    with RawClient(server.url) as fresh, RawClient(server.url) as used:
        used.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = used.answer()
        assert answer is not None
        assert answer.status == 200
        for client in (fresh, used):
            assert client.answer() is None
            assert client.is_closed()


def _thousand_connections(server: RunningServer, start: bytes) -> None:
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(1000):
            clients.append(stack.enter_context(RawClient(server.url)))
            clients[-1].send(start)
            if number % 50 == 49:
                time.sleep(0.02)
        for client in clients:
            assert client.is_closed(30)


@pytest.mark.parametrize("start", [b"", HALF_HEAD, HALF_BODY])
def test_a_thousand_unfinished_connections_harm_no_other_client(server: RunningServer, start: bytes) -> None:
    """The first thousand grow the heap of a fresh process once; the second must not."""
    _thousand_connections(server, start)
    before = rss_of(server.process.pid)
    with bystander(server) as other:
        _thousand_connections(server, start)
    other.check()
    assert rss_returns(server.process.pid, before)


def test_connections_are_bounded_by_address_and_in_all(server: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.url)) for _ in range(1110)]
        answer = clients[-1].answer()
        assert answer is not None
        assert (answer.status, answer.error["code"]) == (429, "too_many_connections")
        assert answer.headers["retry-after"] == "1"
        clients += [stack.enter_context(RawClient(server.url, address="127.0.0.3")) for _ in range(400)]
        answer = clients[-1].answer()
        assert answer is not None
        assert (answer.status, answer.error["param"]) == (503, "limits.max_connections")
    assert eventually(lambda: server.get("/health").status_code == 200)


def test_a_client_that_never_reads_is_cut(server: RunningServer) -> None:
    """Its socket holds a few KB, so the answer does not fit."""
    with RawClient(server.url, receive_bytes=1024) as client:
        client.post("/v1/completions", json.dumps({**ENDLESS, "n": 4, "logprobs": 20}).encode())
        assert eventually(lambda: server.running() > 0)
        assert eventually(lambda: server.running() == 0, 30)
        assert eventually(
            lambda: 'http_connections{engine="0",model_name="scripted"} 1.0' in server.get("/metrics").text, 10
        )


def test_a_drain_waits_no_longer_for_a_client_that_never_reads(model_directory: object) -> None:
    """The answers take 9.5 s at least, and a client that reads nothing would be waited for for an hour."""
    settings = {"drain_timeout": 2.0, "write_timeout": 3600.0}
    with running_server("build_slow", engine={"model": str(model_directory)}, server=settings) as own:
        clients = [RawClient(own.url, receive_bytes=1024) for _ in range(4)]
        for client in clients:
            client.post("/v1/completions", json.dumps(ENDLESS).encode())
        assert eventually(lambda: own.running() == 4)
        own.process.send_signal(signal.SIGTERM)
        assert own.exit_code() == 0
        assert "4 requests did not finish in 2 s (limits.drain_timeout) and are cut" in own.rest_of_output()
        for client in clients:
            client.socket.close()
