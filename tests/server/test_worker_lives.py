"""HTTP workers that end are started again, and the log says when; an update of weights waits for the others."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.stats import WeightsState
from weft.rpc.messages import StepReport
from weft.server.workers import supervisor
from weft.server.workers.link import Attached, KnowsWeights


async def test_the_line_of_a_worker_that_ended_names_a_wait_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, waited = iter([0.0, 10.0, 10.0, 11.0]), list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise asyncio.CancelledError

    async def life(worker: Any) -> int:
        return -9

    monkeypatch.setattr(logging.getLogger("weft.server"), "propagate", True)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    own: Any = SimpleNamespace(_one_life=life, counts=SimpleNamespace(clear=lambda number: None))
    worker: Any = SimpleNamespace(number=1, process=None, lost=lambda: None, serves=asyncio.Event())
    worker.serves.set()
    with pytest.raises(asyncio.CancelledError):
        await supervisor.Workers._keep_alive(own, worker)
    assert waited == [0.0, 0.1]
    ended = "HTTP worker 1 was ended by SIGKILL; the system may have run out of memory"
    assert [record.getMessage() for record in caplog.records] == [
        f"{ended}; another starts",
        f"{ended}; another starts in 0.1 s",
    ]


async def test_an_update_waits_until_each_process_knows_the_weights() -> None:
    """Its answer came before, and a process could still take a session of the old weights."""
    sent: list[StepReport] = []
    fleet: Any = SimpleNamespace(requests=SimpleNamespace(abandon=lambda worker: None))
    first, second = (supervisor.Worker(number, fleet, lambda _, report: sent.append(report)) for number in range(2))
    engines = SimpleNamespace(weights=WeightsState(digest="new"))
    own: Any = SimpleNamespace(_workers=[first, second], _fleet=SimpleNamespace(engines=engines))
    own.tell_weights = lambda: supervisor.Workers.tell_weights(own)
    for worker in (first, second):
        worker.take(Attached(serves=True))
    agreed = asyncio.ensure_future(supervisor.Workers.agree_on_weights(own))
    await asyncio.sleep(0)
    assert [report.weights for report in sent] == [engines.weights] * 2
    for message in (KnowsWeights("old"), KnowsWeights("new")):
        first.take(message)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not agreed.done(), "the second process may not know"
    second.lost()  # a process that ended takes no request
    await asyncio.wait_for(agreed, 1)
