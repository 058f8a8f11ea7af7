"""A line of jobs before one worker: how many turns of the event loop it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weft.errors import EngineUnavailableError
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


class Paced(Quick):
    """A worker that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    def receive(self, number: int, seconds: float) -> bytes | None:
        return None

    async def receive_later(self, number: int) -> bytes:
        await self.go.wait()
        return self._bodies[number - 1].upper()


def keyed_lane(**more: Any) -> tuple[WorkerLane, list[Paced]]:
    workers: list[Paced] = []

    def start() -> Any:
        workers.append(Paced())
        return workers[-1]

    return WorkerLane(start, 60.0, **more), workers


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_a_job_of_another_key_is_behind_one_job_and_not_behind_the_line() -> None:
    lane, workers = keyed_lane()
    attack = [asyncio.ensure_future(lane.ask(b"a%d" % at, "attacker")) for at in range(60)]
    await settled()
    own = asyncio.ensure_future(lane.ask(b"own", "bystander"))
    await settled()
    assert workers[0].order == [b"a0"]
    workers[0].go.set()
    assert await own == b"OWN"
    assert workers[0].order[1] == b"own"
    await asyncio.gather(*attack)


async def test_without_keys_jobs_are_answered_in_the_order_of_their_arrival() -> None:
    """The control."""
    lane, workers = keyed_lane()
    jobs = [asyncio.ensure_future(lane.ask(b"a%d" % at)) for at in range(5)]
    await settled()
    workers[0].go.set()
    await asyncio.gather(*jobs)
    assert workers[0].order == [b"a%d" % at for at in range(5)]


async def test_of_two_workers_one_is_left_to_other_keys() -> None:
    lane, workers = keyed_lane(workers=2)
    attack = [asyncio.ensure_future(lane.ask(b"a%d" % at, "attacker")) for at in range(5)]
    await settled()
    assert [worker.order for worker in workers] == [[b"a0"]]
    own = asyncio.ensure_future(lane.ask(b"own", "bystander"))
    await settled()
    assert [worker.order for worker in workers] == [[b"a0"], [b"own"]]
    for worker in workers:
        worker.go.set()
    assert await own == b"OWN"
    assert len(await asyncio.gather(*attack)) == 5


async def test_a_job_whose_client_has_left_does_not_begin() -> None:
    lane, workers = keyed_lane()
    first, gone, last = (asyncio.ensure_future(lane.ask(body)) for body in (b"first", b"gone", b"last"))
    await settled()
    gone.cancel()
    await settled()
    assert lane.waiting == 2
    workers[0].go.set()
    assert [await first, await last] == [b"FIRST", b"LAST"]
    assert workers[0].order == [b"first", b"last"]
    assert lane.waiting == 0


async def test_one_key_fills_half_of_the_line_at_most() -> None:
    lane, workers = keyed_lane(line_max=8)
    for at in range(4):
        lane.check_line("attacker", "jobs wait")
        asyncio.ensure_future(lane.ask(b"a%d" % at, "attacker"))  # noqa: RUF006
        await settled()
    with pytest.raises(EngineUnavailableError, match="of your API key; the limit is 4"):
        lane.check_line("attacker", "jobs wait")
    lane.check_line("bystander", "jobs wait")
    workers[0].go.set()
    await settled()
    lane.check_line("attacker", "jobs wait")
