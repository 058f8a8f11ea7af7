"""Work for a client ends with the client (``weft.server.sse.unless_gone``)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weft.server.sse import ClientGoneError, unless_gone


class Client:
    """``receive`` of one that leaves when it is told."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self._messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}


class Work:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> str:
        self.began.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


def pending() -> int:
    return len(asyncio.all_tasks()) - 1


async def test_the_result_of_work_is_its_own_and_no_task_stays() -> None:
    client, work = Client(), Work()
    work.may_end.set()
    assert await unless_gone(work.run(), client.receive) == "done"
    await asyncio.sleep(0)
    assert pending() == 0


async def test_an_error_of_work_is_its_own() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await unless_gone(fail(), Client().receive)


async def test_work_is_cancelled_when_its_client_leaves_and_the_request_goes_on() -> None:
    client, work = Client(), Work()
    asyncio.get_running_loop().call_later(0.01, client.leaves.set)
    with pytest.raises(ClientGoneError):
        await unless_gone(work.run(), client.receive)
    this = asyncio.current_task()
    assert this is not None
    assert (work.was_cancelled, this.cancelling()) == (True, 0)
    async with asyncio.timeout(10):  # a cancellation that was left over would end this
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("client_leaves_too", [False, True])
async def test_a_request_that_is_cancelled_is_cancelled(*, client_leaves_too: bool) -> None:
    client, work = Client(), Work()
    request = asyncio.ensure_future(unless_gone(work.run(), client.receive))
    await work.began.wait()
    await asyncio.sleep(0.01)
    if client_leaves_too:
        client.leaves.set()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.sleep(0)
    assert (work.was_cancelled, pending()) == (True, 0)


async def test_work_that_ends_as_its_client_leaves_has_one_end() -> None:
    client, work = Client(), Work()
    request = asyncio.ensure_future(unless_gone(work.run(), client.receive))
    await work.began.wait()
    await asyncio.sleep(0.01)
    client.leaves.set()
    work.may_end.set()
    with pytest.raises(ClientGoneError):
        await request
    assert work.was_cancelled
