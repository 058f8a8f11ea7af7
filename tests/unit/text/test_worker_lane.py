"""A line of jobs before one worker: how many turns of the event loop it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weft.text.workers import WorkerLane

JOBS = 40


class Quick:
    """A worker that answers at once, but for the jobs in ``late``, which a loop must come back for."""

    gone = False

    def __init__(self, *late: bytes) -> None:
        self._late = late
        self._bodies: list[bytes] = []
        self.order: list[bytes] = []

    def send(self, body: bytes) -> int:
        self._bodies.append(body)
        self.order.append(body)
        return len(self._bodies)

    def receive(self, number: int, seconds: float) -> bytes | None:
        body = self._bodies[number - 1]
        return None if body in self._late else body.upper()

    async def receive_later(self, number: int) -> bytes:
        await asyncio.sleep(0.01)
        if self._bodies[number - 1] == b"deadly":
            raise BrokenPipeError
        return self._bodies[number - 1].upper()

    def end(self) -> None:
        self.gone = True


async def answers_and_turns(lane: Any) -> tuple[list[bytes], int]:
    """The answers to a late job and to those behind it, and the turns of the loop from the first one on."""
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    first = asyncio.ensure_future(lane.ask(b"late"))
    await asyncio.sleep(0)
    behind = asyncio.gather(*(lane.ask(b"job%d" % at) for at in range(JOBS)))
    first.add_done_callback(lambda _: turn())
    answers = [await first, *await behind]
    assert lane.waiting == 0
    return answers, turns


@pytest.mark.parametrize(("line_s", "fewest", "most"), [(60.0, 0, 5), (-1.0, JOBS - 5, 4 * JOBS)])
def test_a_line_of_jobs_is_answered_in_one_turn_of_the_loop(
    line_s: float, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with no time for a line there is a turn between two jobs."""
    monkeypatch.setattr("weft.text.workers._LINE_S", line_s)
    worker: Any = Quick(b"late")
    answers, turns = asyncio.run(answers_and_turns(WorkerLane(lambda: worker, 1.0, worker)))
    assert answers == [b"LATE", *(b"JOB%d" % at for at in range(JOBS))]
    assert worker.order == [b"late", *(b"job%d" % at for at in range(JOBS))]
    assert fewest <= turns <= most


def test_a_deadly_job_fails_alone_and_the_job_of_a_client_that_left_goes_on() -> None:
    workers: list[Any] = [Quick(b"deadly"), Quick(b"deadly")]
    lane = WorkerLane(lambda: workers[1], 1.0, workers[0])

    async def ask() -> list[Any]:
        deadly = asyncio.ensure_future(lane.ask(b"deadly"))
        await asyncio.sleep(0)
        left, stays = (asyncio.ensure_future(lane.ask(body)) for body in (b"left", b"stays"))
        await asyncio.sleep(0)
        left.cancel()
        return await asyncio.gather(deadly, left, stays, lane.ask(b"late"), return_exceptions=True)

    deadly, left, stays, last = asyncio.run(ask())
    assert isinstance(deadly, BrokenPipeError)
    assert isinstance(left, asyncio.CancelledError)
    assert (stays, last) == (b"STAYS", b"LATE")
    assert workers[0].gone
    assert lane.waiting == 0
