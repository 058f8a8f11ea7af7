"""An HTTP worker that ends is started again, and the log says when."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weft.server.workers import supervisor


async def test_the_line_of_a_worker_that_ended_names_a_wait_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits, waited = iter([0.0, 2.0]), list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise asyncio.CancelledError

    async def life(worker: Any) -> int:
        return -9

    monkeypatch.setattr(logging.getLogger("weft.server"), "propagate", True)
    monkeypatch.setattr(supervisor, "backoff_s", lambda short_lives: next(waits))
    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    own: Any = SimpleNamespace(_one_life=life, counts=SimpleNamespace(clear=lambda number: None))
    worker: Any = SimpleNamespace(number=1, process=None, lost=lambda: None, serves=asyncio.Event())
    worker.serves.set()
    with pytest.raises(asyncio.CancelledError):
        await supervisor.Workers._keep_alive(own, worker)
    assert waited == [0.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == [
        "HTTP worker 1 ended with code -9; another starts",
        "HTTP worker 1 ended with code -9; another starts in 2 s",
    ]
