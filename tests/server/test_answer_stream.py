"""Streamed answers: the parts go to the connection without a task, and a slow client delays only its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from weft.errors import EngineUnavailableError, WeftError
from weft.server.connection import WRITE_PART
from weft.server.sse import AnswerStream
from weft.text.choices import Piece


class Pieces:
    """A generation whose pieces come by hand: lists of texts, or an error. The text "last" ends it."""

    def __init__(self) -> None:
        self.unfinished = 1
        self._waiting: list[list[str] | WeftError] = []
        self._listener: Callable[[], None] = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def next_pieces(self) -> list[Piece] | None:
        if not self._waiting:
            return None
        match self._waiting.pop(0):
            case WeftError() as error:
                raise error
            case texts:
                return [Piece(0, text) for text in texts]

    def come(self, *more: list[str] | WeftError) -> None:
        self._waiting += more
        self._listener()


class Job:
    def __init__(self) -> None:
        self.generation: Any = Pieces()

    async def answer(self) -> bytes:
        return b""

    def begin(self) -> bytes:
        return b"begin "

    def part(self, pieces: list[Piece]) -> bytes:
        if any(piece.text == "last" for piece in pieces):
            self.generation.unfinished = 0
        return " ".join(piece.text for piece in pieces).encode()

    async def end(self) -> bytes:
        return b" end"

    def failed(self, error: WeftError) -> bytes:
        return b"failed: " + error.message.encode()


class Connection:
    """``writable`` cleared: the client reads nothing."""

    def __init__(self, *, direct: bool) -> None:
        self.parts: list[bytes] = []
        self.sends = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.gone = asyncio.Event()
        state = {WRITE_PART: self._write} if direct else {}
        self.scope: dict[str, Any] = {"type": "http", "state": state}

    def _write(self, part: bytes) -> bool:
        if self.writable.is_set():
            self.parts.append(part)
        return self.writable.is_set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sends += 1
        await self.writable.wait()
        if message.get("body"):
            self.parts.append(message["body"])

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def begun(connection: Connection) -> tuple[Job, asyncio.Task[None], list[str]]:
    job, ended = Job(), []
    stream = AnswerStream(job, on_end=lambda: ended.append("ended"), keep_alive_s=0.0)
    task = asyncio.ensure_future(stream(connection.scope, connection.receive, connection.send))
    for _ in range(5):
        await asyncio.sleep(0)
    return job, task, ended


async def test_no_part_of_a_quick_client_costs_a_send_or_a_task() -> None:
    connection = Connection(direct=True)
    job, task, ended = await begun(connection)
    sends, tasks = connection.sends, len(asyncio.all_tasks())
    for number in range(50):
        job.generation.come([f"{number}"])
        assert connection.parts[-1] == b"%d" % number, "it is written before the call returns"
        assert len(asyncio.all_tasks()) == tasks
    assert connection.sends == sends
    job.generation.come(["last"])
    await asyncio.wait_for(task, 10)
    assert connection.parts[-2:] == [b"last", b" end"]
    assert ended == ["ended"]


@pytest.mark.parametrize("direct", [True, False])
async def test_what_comes_while_a_client_reads_nothing_follows_in_order(*, direct: bool) -> None:
    connection = Connection(direct=direct)
    job, task, _ = await begun(connection)
    connection.writable.clear()
    for number in range(5):
        job.generation.come([f"{number}"])
    await asyncio.sleep(0)
    assert connection.parts == [b"begin "]
    job.generation.come(["last"])
    connection.writable.set()
    await asyncio.wait_for(task, 10)
    assert b"".join(connection.parts) == b"begin 01234last end"


async def test_pieces_without_text_do_not_hide_those_that_follow_in_one_report() -> None:
    connection = Connection(direct=True)
    job, task, _ = await begun(connection)
    job.generation.come([], [], ["a"], [], ["last"])
    await asyncio.wait_for(task, 10)
    assert connection.parts == [b"begin ", b"a", b"last", b" end"]


async def test_an_error_ends_the_stream_in_the_words_of_the_dialect() -> None:
    connection = Connection(direct=True)
    job, task, ended = await begun(connection)
    job.generation.come(["a"], EngineUnavailableError("gone"))
    await asyncio.wait_for(task, 10)
    assert connection.parts == [b"begin ", b"a", b"failed: gone"]
    assert ended == ["ended"]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_leaves_ends_the_stream_and_its_task(*, reads: bool) -> None:
    connection = Connection(direct=True)
    job, task, ended = await begun(connection)
    if not reads:
        connection.writable.clear()
    job.generation.come(["a"])
    connection.gone.set()
    await asyncio.wait_for(task, 10)
    assert ended == ["ended"]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
    job.generation.come(["b"])
    assert b"b" not in connection.parts
