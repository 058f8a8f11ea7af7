"""Many streams at once, clients that leave, clients that are slow: on an engine that takes 5 ms a step."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tests.server.running import RunningServer, eventually
from tests.server.scripted_engine import SONG
from weft.server.edge import Origins
from weft.server.gate import Gate
from weft.server.sse import EventStream
from weft.server.tenants import Keys

FACTORY = "build_slow"
SERVER = {"sse_keep_alive": 0.05}

LONG = {"prompt": "sing", "max_tokens": 2000}


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def seconds_of(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


async def test_sixty_four_streams_at_once_each_get_their_own_text(server: RunningServer) -> None:
    client = server.async_client(max_retries=2)

    async def one(number: int) -> str:
        said = f"number {number} é{number}".ljust(40, ".")
        turns: Any = [{"role": "user", "content": f"say:{said}"}]
        stream = await client.chat.completions.create(model="scripted", messages=turns, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == said
        return text

    before = server.metric("iteration_tokens_total_count")
    texts = await asyncio.gather(*(one(number) for number in range(64)))
    assert len(set(texts)) == 64
    assert eventually(lambda: server.running() == 0)
    # Batched: the steps of few answers, not of 64 one after the other.
    assert server.metric("iteration_tokens_total_count") - before < 64 * 40 / 2


async def test_a_stream_that_is_left_costs_nothing_any_more(server: RunningServer) -> None:
    body = {**LONG, "stream": True, "n": 3}
    with server.ends_early(3 * 2000):
        async with (
            httpx.AsyncClient(base_url=server.url) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for _ in response.aiter_lines():
                break
            assert eventually(lambda: server.running() == 3)  # stats come ten times a second


async def test_a_whole_answer_that_is_left_costs_nothing_any_more(server: RunningServer) -> None:
    with server.ends_early(4 * 2000):
        async with httpx.AsyncClient(base_url=server.url) as client:
            request = asyncio.create_task(client.post("/v1/completions", json={**LONG, "prompt": ["sing"] * 4}))
            assert await asyncio.to_thread(eventually, lambda: server.running() == 4)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def test_leaving_one_stream_leaves_the_others_alone(server: RunningServer) -> None:
    client = server.async_client()

    async def whole() -> str:
        answer = await client.completions.create(model="scripted", prompt="sing", max_tokens=150)
        return str(answer.choices[0].text)

    with server.ends_early(150 + 2000):
        staying = asyncio.create_task(whole())
        leaving = await client.completions.create(model="scripted", stream=True, **LONG)
        async for _ in leaving:
            await leaving.close()
            break
        assert (SONG * 3).startswith(await staying)


def test_a_client_that_resets_the_connection_is_noticed(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "sing", "max_tokens": 2000, "stream": true}'
    with server.ends_early(2000), socket.create_connection((host, int(port))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert raw.recv(100)
        assert eventually(lambda: server.running() == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_to_a_closed_connection_ends_quietly(stream: bool) -> None:
    """uvicorn begins a request that was pipelined behind another on a closed connection too, unsaid."""
    ended: list[str] = []

    async def lines() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: more"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = EventStream(lines(), on_end=lambda: ended.append("end")) if stream else Response("all")
        await answer(scope, receive, send)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def closed(message: Message) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def broken(message: Message) -> None:
        raise RuntimeError("Unexpected ASGI message")

    scope = {"type": "http", "path": "/v1/completions", "headers": [], "method": "POST"}
    gate = Gate(app, keys=Keys([]), origins=Origins())
    await gate(scope, never, closed)
    assert ended == (["end"] if stream else [])
    with pytest.raises(RuntimeError, match="ASGI"):
        await gate(scope, never, broken)


def test_a_slow_reader_does_not_slow_the_others(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "sing", "max_tokens": 1500, "stream": true}'
    before = server.metric("generation_tokens_total")
    with server.ends_early(1500), socket.create_connection((host, int(port))) as sleeper:
        sleeper.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = server.post("/v1/completions", {"prompt": "say:quick", "max_tokens": 50})
        assert answer.json()["choices"][0]["text"] == "quick", answer.text
        assert eventually(lambda: server.running() == 1)
        assert server.metric("generation_tokens_total") - before < 1500, "the slow reader's answer came first"


@pytest.mark.parametrize("interval", [1, 5])
def test_a_request_chooses_the_tokens_of_an_event(server: RunningServer, interval: int) -> None:
    body = {"prompt": "sing", "max_tokens": 23, "stream": True, "stream_interval": interval, "return_token_ids": True}
    text = server.post("/v1/completions", body).text
    sizes = [len(msgspec.json.decode(one)["choices"][0]["token_ids"]) for one in events_of(text)[:-1]]
    assert sum(sizes) == 23
    if interval == 1:
        assert min(sizes[1:-1]) < 5, "steps of 5 ms come one by one, but for those of a busy machine"
    else:
        assert sizes[0] < 5, "the first token does not wait"
        assert min(sizes[1:-1]) >= 5


@pytest.mark.parametrize("value", [0, -1, 1025, "2", 1.5])
def test_an_interval_of_a_stream_is_a_number_of_tokens(server: RunningServer, value: Any) -> None:
    answer = server.post("/v1/completions", {"prompt": "sing", "stream": True, "stream_interval": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_interval"


def test_silence_is_broken_by_comment_lines_when_asked_for(server: RunningServer) -> None:
    """Text that may be the start of a stop string is held back: 60 steps of silence here."""
    body = {"prompt": "say:" + "a" * 60, "stop": "a" * 60 + "b", "stream": True, "max_tokens": 100}
    text = server.post("/v1/completions", body).text
    assert text.count(": keep-alive\n\n") >= 2
    assert "a" * 60 in text
    assert events_of(text)[-1] == "[DONE]"


def test_an_idle_engine_does_not_use_the_processor(server: RunningServer) -> None:
    assert eventually(lambda: server.running() == 0)
    engine, http = psutil.Process(server.engine_pid()), psutil.Process(server.process.pid)
    for _ in range(10):  # an audit follows the last busy spell
        before = seconds_of(engine), seconds_of(http)
        time.sleep(1.0)
        used = seconds_of(engine) - before[0], seconds_of(http) - before[1]
        if used[0] <= 0.02 and used[1] <= 0.1:
            return
    raise AssertionError(f"engine and server use {used} of every second")


def test_a_stream_that_ends_leaves_the_connection_usable(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            text = client.post("/v1/completions", json={"prompt": "say:ab", "stream": True}).text
            assert events_of(text)[-1] == "[DONE]"
            health: Any = client.get("/health").json()
            assert health == {"status": "ok"}
