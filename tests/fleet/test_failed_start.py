"""A start that fails in a way that nobody foresaw ends with its reason: nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from tests.rpc.test_listener import Listening, listening
from weft.config import EngineConfig
from weft.errors import EngineUnavailableError
from weft.fleet.replica import Replica, first_error
from weft.rpc.client import EngineClient

__all__ = ["listening"]


class Broken:
    """An engine that raises ``error`` at its start, or when it should be ready."""

    death = None

    def __init__(self, where: str, error: Exception) -> None:
        self._where, self._error = where, error
        self.stopped: list[str] = []
        self.link: Any = self
        self.machine_lost = False

    def _at(self, where: str) -> None:
        if where == self._where:
            raise self._error

    async def start(self) -> None:
        self._at("start")

    async def ready(self) -> None:
        self._at("ready")

    async def prepare(self, engine: Any) -> None:
        self._at("prepare")

    async def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.mark.parametrize("where", ["start", "ready", "prepare"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("tokens"), "KeyError: 'tokens'"),
        (OSError("no processes left"), "no processes left"),
        (AssertionError("a bug"), "AssertionError: a bug"),
    ],
)
async def test_any_error_of_a_first_start_is_the_reason_of_its_end(where: str, error: Exception, said: str) -> None:
    engine, lost = Broken(where, error), asyncio.Event()
    replica = Replica(
        0,
        lambda start: engine,
        5,
        prepare=engine.prepare,  # type: ignore[arg-type, return-value]
        on_ready=lambda replica: None,
        on_lost=lambda replica: lost.set(),
    )
    replica.start()
    await asyncio.wait_for(lost.wait(), 20)
    assert replica.state == "dead"
    assert engine.stopped == [f"cannot start an engine: {said}"]
    error_of_all = first_error([replica])
    assert error_of_all is not None
    assert error_of_all.message == engine.stopped[0]


async def test_a_message_that_cannot_be_read_ends_the_engine_with_a_reason(listening: Listening) -> None:
    uplink, connection = await listening.joined()
    client = EngineClient(EngineConfig(), link=connection)
    await client.start()
    uplink.relay(b"\x81\xa4type\xa7unknown")
    with pytest.raises(EngineUnavailableError, match="another version"):
        await asyncio.wait_for(client.ready(), 20)
    await client.stop("the test is over")


class Served(Broken):
    """An engine that gets ready, and is lost at once."""

    def __init__(self) -> None:
        super().__init__("", OSError())
        self.detach = lambda: None

    async def lost(self) -> str:
        return "it was killed"


@pytest.mark.parametrize(
    ("error", "dies"), [(OSError(errno.EMFILE, "Too many open files"), False), (OSError(errno.ENOMEM, "no"), True)]
)
async def test_a_start_that_finds_no_descriptor_uses_no_attempt_up(
    monkeypatch: pytest.MonkeyPatch, error: OSError, dies: bool
) -> None:
    monkeypatch.setattr("weft.fleet.replica.FILES_RETRY_S", 0.001)
    monkeypatch.setattr("weft.fleet.replica.BACKOFF_FIRST_S", 0.001)
    engines: list[Any] = []

    def new(start: int) -> Any:
        engines.append(Broken("start", error) if start else Served())
        return engines[-1]

    async def prepare(engine: Any) -> None:
        pass

    replica = Replica(0, new, 2, prepare=prepare, on_ready=lambda replica: None, on_lost=lambda replica: None)
    replica.start()
    while len(engines) < 12 and replica.state != "dead":
        await asyncio.sleep(0.005)
    assert (replica.state == "dead") == dies
    assert replica.restart_count == (2 if dies else 1)
    await replica.stop("the test is over")
