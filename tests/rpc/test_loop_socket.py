"""A ZeroMQ socket on the event loop: each message is received, and a fast sender does not starve others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from weft.rpc.loop_socket import BURST, LoopSocket


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind(f"ipc://{tmp_path}/s")
        other.connect(f"ipc://{tmp_path}/s")
        other.send(b"hello")
        assert one.recv() == b"hello", "they are connected"
        yield one, other


async def test_messages_that_cross_are_all_received(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """Each send may swallow the sign that a message has arrived."""
    one, other = map(LoopSocket, pair)

    async def talk(end: LoopSocket) -> list[int]:
        heard = []
        for number in range(300):
            end.send([b"%d" % number, b"tail"])
            if number % 3 == 0:
                await asyncio.sleep(0)
            if number % 7 == 0:
                heard.append(int((await end.receive())[0]))
        while len(heard) < 300:
            heard.append(int((await end.receive())[0]))
        return heard

    async with asyncio.timeout(60):
        assert await asyncio.gather(talk(one), talk(other)) == [list(range(300))] * 2
    one.close()
    other.close()
    one.send([b"late"])


async def test_a_burst_gives_others_a_turn(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    raw, end = pair[1], LoopSocket(pair[0])
    for _ in range(4 * BURST):
        raw.send(b"x")
    await end.receive()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with asyncio.timeout(60):
        for _ in range(4 * BURST - 1):
            await end.receive()
    counting.cancel()
    assert turns >= 3
    end.close()


async def test_a_wait_that_is_cancelled_loses_no_message(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    one, other = map(LoopSocket, pair)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(one.receive(), 0.05)
    other.send([b"after"])
    async with asyncio.timeout(60):
        assert await one.receive() == [b"after"]
    one.close()
    other.close()
