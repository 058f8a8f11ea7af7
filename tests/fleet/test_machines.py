"""A server's listener and an agent's client in one process: frames that are lost, doubled or late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import zmq.asyncio

from weft.errors import ConfigError
from weft.fleet.machines import Machines
from weft.fleet.seats import Seat
from weft.rpc.link_client import DismissedError, LinkClient
from weft.rpc.link_frames import BodyKind
from weft.rpc.link_keys import LinkKeys, new_token
from weft.rpc.link_messages import EngineEnded, Leaving, LinkBeat, LinkMessage, StartEngine

KEYS = LinkKeys.of(new_token())


@dataclass
class RecordedEnd:
    """A ``LinkEnd``."""

    reports: list[bytes] = field(default_factory=list)
    messages: list[LinkMessage] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def deliver(self, report: bytes) -> None:
        self.reports.append(report)

    def hear(self, message: LinkMessage) -> None:
        self.messages.append(message)

    def lose(self, reason: str) -> None:
        self.losses.append(reason)


class Listening:
    """Machines with the seats that came."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.leaving: list[Seat] = []
        self.machines = Machines("tcp://127.0.0.1:0", KEYS, on_join=self._join,
                                 on_leaving=self.leaving.append)
        self.context = zmq.asyncio.Context()

    def _join(self, seat: Seat) -> int:
        self.seats.append(seat)
        return len(self.seats) - 1

    def client(self, keys: LinkKeys = KEYS) -> LinkClient:
        return LinkClient(self.context, f"tcp://127.0.0.1:{self.machines.port}", keys)

    async def joined(self) -> tuple[LinkClient, Seat, RecordedEnd]:
        client = self.client()
        await client.greet("agent", 1, "far")
        [seat] = self.seats
        end = RecordedEnd()
        assert seat.session is not None
        seat.session.begin_life(end)
        seat.session.say(StartEngine("f", {}, 1.0))
        header, _ = await client.receive()
        client.life = header.life
        return client, seat, end


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    listening = Listening()
    listening.machines.bind()
    yield listening
    await listening.machines.close("the test is over")
    listening.context.destroy(linger=0)


async def until(holds: object) -> None:
    assert callable(holds)
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


async def received(client: LinkClient) -> None:
    """For ever."""
    while True:
        await client.receive()


async def test_reports_and_messages_reach_the_engine_client(listening: Listening) -> None:
    client, seat, end = await listening.joined()
    await client.put(BodyKind.ENGINE, b"one")
    await client.say(EngineEnded("it ended"))
    await client.say(Leaving())
    await until(lambda: listening.leaving)
    assert end.reports == [b"one"]
    assert end.messages == [EngineEnded("it ended")]
    assert listening.leaving == [seat]
    client.close()


async def test_a_doubled_frame_is_delivered_once(listening: Listening) -> None:
    client, _, end = await listening.joined()
    await client.put(BodyKind.ENGINE, b"one")
    client._numbers._next_sent -= 1
    await client.put(BodyKind.ENGINE, b"one")
    await client.put(BodyKind.ENGINE, b"two")
    await until(lambda: b"two" in end.reports)
    assert end.reports == [b"one", b"two"]
    client.close()


async def test_a_lost_frame_ends_the_session_and_what_follows_is_dropped(listening: Listening) -> None:
    client, seat, end = await listening.joined()
    client._numbers._next_sent += 1
    await client.put(BodyKind.ENGINE, b"late")
    await until(lambda: end.losses)
    assert "1 frames were lost" in end.losses[0]
    assert seat.session is None
    await client.put(BodyKind.ENGINE, b"later")
    again = listening.client()
    await again.greet("agent", 2, "far")
    assert end.reports == []
    assert listening.seats == [seat], "the agent has its seat again"
    client.close()
    again.close()


async def test_a_frame_of_an_earlier_process_is_dropped(listening: Listening) -> None:
    client, seat, end = await listening.joined()
    assert seat.session is not None
    later = RecordedEnd()
    seat.session.begin_life(later)
    await client.put(BodyKind.ENGINE, b"of the first process")
    client.life += 1
    await client.put(BodyKind.ENGINE, b"of the second")
    await until(lambda: later.reports)
    assert (end.reports, later.reports) == ([], [b"of the second"])
    client.close()


async def test_a_machine_that_vanishes_is_noticed_within_five_seconds(listening: Listening) -> None:
    """Of seconds in which this process ran: a test machine that is busy makes its ticks late."""
    client, seat, end = await listening.joined()
    alive = listening.client()
    await alive.greet("another", 1, "near")
    beating = asyncio.create_task(alive.keep_alive())
    listening_to_beats = asyncio.create_task(received(alive))
    await client.say(LinkBeat())
    began_s = last_s = time.monotonic()
    late_s = 0.0
    while not end.losses:
        await asyncio.sleep(0.02)
        now_s = time.monotonic()
        late_s, last_s = late_s + max(now_s - last_s - 0.02, 0.0), now_s
        assert now_s - began_s < 30
    assert last_s - began_s > 2.0
    assert last_s - began_s - late_s < 5.0
    assert seat.session is None
    assert listening.seats[1].session is not None, "the one that beats is there"
    beating.cancel()
    listening_to_beats.cancel()
    client.close()
    alive.close()


async def test_another_token_and_another_version_are_refused(
        listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = listening.client(LinkKeys.of(new_token()))
    with pytest.raises(ConfigError, match="refuses the token"):
        await stranger.greet("agent", 1, "far")
    monkeypatch.setattr("weft.rpc.link_client.LINK_VERSION", 99)
    old = listening.client()
    with pytest.raises(DismissedError, match="all machines of a fleet need one version") as refused:
        await old.greet("agent", 1, "far")
    assert refused.value.dismissal.refused
    assert listening.seats == []
    stranger.close()
    old.close()
