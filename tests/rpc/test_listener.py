"""A server's listener and an agent's uplink in one process: what arrives, and connections that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq

from tests.fleet.cut_network import cut_network
from tests.support.stranger import taken_of_a_stranger
from weft.errors import ConfigError
from weft.request import TokenEvent
from weft.rpc.link import (
    FRAME_BYTES_MAX,
    LINK_VERSION,
    ConnectionLost,
    DismissedError,
    EngineEnded,
    Hello,
    Leaving,
    LinkBeat,
    LinkKeys,
    LinkLostError,
    StartEngine,
    Uplink,
    Welcome,
    new_token,
)
from weft.rpc.listener import AgentConnection, LinkListener
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import Beat, Cancel, StepReport
from weft.version import weft_version

KEYS = LinkKeys.of(new_token())
encode = msgspec.msgpack.encode


def hello(agent: str = "agent", attempt: int = 1, **more: object) -> Hello:
    values: dict[str, object] = {
        "link_version": LINK_VERSION,
        "weft_version": weft_version(),
        "agent": agent,
        "attempt": attempt,
        "host": "far",
        **more,
    }
    return Hello(**values)  # type: ignore[arg-type]


class Listening:
    """A listener with the connections that came."""

    def __init__(self) -> None:
        self.connections: list[AgentConnection] = []
        self.leaving: list[AgentConnection] = []
        self.listener = LinkListener("tcp://127.0.0.1:0", KEYS, on_hello=self._on_hello, on_leaving=self.leaving.append)
        self.context = zmq.Context()

    def _on_hello(self, hello: Hello, connection: AgentConnection) -> int:
        self.connections.append(connection)
        return len(self.connections) - 1

    def uplink(self, keys: LinkKeys = KEYS, port: int | None = None) -> Uplink:
        return Uplink(self.context, f"tcp://127.0.0.1:{port or self.listener.port}", keys)

    async def joined(self, port: int | None = None, agent: str = "agent") -> tuple[Uplink, AgentConnection]:
        uplink = self.uplink(port=port)
        assert await uplink.greet(hello(agent)) == Welcome(len(self.connections) - 1)
        return uplink, self.connections[-1]


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    listening = Listening()
    listening.listener.bind()
    yield listening
    await listening.listener.close("the test is over")
    listening.context.destroy(linger=0)


async def until(holds: object) -> None:
    assert callable(holds)
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


async def received(uplink: Uplink) -> None:
    """For ever."""
    while True:
        await uplink.receive()


def report(token: int) -> StepReport:
    return StepReport(events=[TokenEvent(request_id="r", index=0, tokens=[token])])


async def test_commands_reports_and_messages_pass_in_their_order(listening: Listening) -> None:
    uplink, connection = await listening.joined()
    connection.say(StartEngine("f", {}, 1.0))
    await connection.send(encode(Cancel("r")))
    assert await uplink.receive() == StartEngine("f", {}, 1.0)
    assert await uplink.receive() == encode(Cancel("r"))
    sent = [encode(report(token)) for token in range(1000)]
    for one in sent:
        uplink.relay(one)
    uplink.say(Leaving())
    uplink.say(EngineEnded("it ended"))
    assert [await connection.receive() for _ in sent] == sent
    assert await connection.wait() == "it ended"
    assert not connection.machine_lost
    assert listening.leaving == [connection]
    uplink.close()


async def test_a_connection_that_is_closed_is_never_opened_again(listening: Listening) -> None:
    """So no message is lost, doubled or late without a word: what follows comes with another Hello."""
    with cut_network(listening.listener.port) as network:
        uplink, connection = await listening.joined(network.port)
        uplink.relay(encode(report(1)))
        assert await connection.receive() == encode(report(1))
        network.reset()
        with pytest.raises(LinkLostError, match="closed the connection"):
            await asyncio.wait_for(uplink.watch(), 5)
        with contextlib.suppress(LinkLostError):
            uplink.relay(encode(report(2)))
        uplink.close()
        again, later = await listening.joined(network.port)
        again.relay(encode(report(3)))
        assert await later.receive() == encode(report(3))
        assert later.routing_id != connection.routing_id
        assert connection._received.empty()
        again.close()


async def test_messages_that_a_cut_network_held_back_reach_no_later_connection(listening: Listening) -> None:
    with cut_network(listening.listener.port) as network:
        uplink, connection = await listening.joined(network.port)
        network.cut("there")
        uplink.relay(encode(report(1)))
        connection.end("given up")
        again, later = await listening.joined()
        network.heal()
        uplink.say(LinkBeat())
        await asyncio.sleep(0.3)
        assert connection._received.empty()
        assert later._received.empty()
        uplink.close()
        again.close()


async def test_an_end_that_does_not_read_loses_its_connection_and_not_a_message(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(socket: LoopSocket, parts: list[bytes]) -> None:
        raise zmq.Again

    uplink, connection = await listening.joined()
    monkeypatch.setattr(LoopSocket, "send", full)
    connection.post(encode(Cancel("r")))
    assert not connection.running
    assert connection.machine_lost
    assert "the link to far broke" in await connection.wait()
    with pytest.raises(LinkLostError, match="is over"):
        uplink.relay(encode(Beat()))
    monkeypatch.undo()
    uplink.close()


async def test_an_agent_that_hears_nothing_says_so(listening: Listening) -> None:
    uplink, connection = await listening.joined()
    uplink.say(ConnectionLost())
    assert await connection.wait() == "far hears nothing of this server"
    assert connection.machine_lost
    uplink.close()


@pytest.mark.parametrize("then", ["wait", "restart", "refused", "drained"])
async def test_a_dismissed_agent_learns_why_and_what_next(listening: Listening, then: str) -> None:
    uplink, connection = await listening.joined()
    connection.dismiss("over", then)  # type: ignore[arg-type]
    with pytest.raises(DismissedError, match="over") as dismissed:
        await uplink.receive()
    assert dismissed.value.dismissal.then == then
    assert connection.machine_lost == (then != "restart"), "a process that was ended is no lost machine"
    uplink.close()


async def test_a_machine_that_vanishes_is_noticed_within_five_seconds(listening: Listening) -> None:
    """Of seconds in which this process ran: a test machine that is busy makes its ticks late."""
    uplink, connection = await listening.joined()
    alive, other = await listening.joined(agent="another")
    beating = asyncio.create_task(alive.keep_alive())
    listening_to_beats = asyncio.create_task(received(alive))
    uplink.say(LinkBeat())
    began_s = last_s = time.monotonic()
    late_s = 0.0
    while connection.running:
        await asyncio.sleep(0.02)
        now_s = time.monotonic()
        late_s, last_s = late_s + max(now_s - last_s - 0.02, 0.0), now_s
        assert now_s - began_s < 30
    assert last_s - began_s > 2.0
    assert last_s - began_s - late_s < 5.0
    assert "has been silent" in await connection.wait()
    assert other.running, "the one that beats is there"
    beating.cancel()
    listening_to_beats.cancel()
    uplink.close()
    alive.close()


async def test_silence_counts_from_the_begin_of_a_connection(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that says nothing behind its Hello is lost after as many beats as one that falls silent later."""
    monkeypatch.setattr("weft.rpc.link.BEAT_S", 0.02)
    monkeypatch.setattr("weft.rpc.link.SILENT_S", 0.2)
    uplink, connection = await listening.joined()
    beats: list[object] = []
    monkeypatch.setattr(connection, "say", beats.append)
    async with asyncio.timeout(30):
        assert "has been silent" in await connection.wait()
    assert len(beats) <= 20, "10 of them fit into the silence"
    uplink.close()


async def test_another_token_and_another_version_are_refused(listening: Listening) -> None:
    stranger = listening.uplink(LinkKeys.of(new_token()))
    with pytest.raises(ConfigError, match="refuses the token"):
        await stranger.greet(hello())
    old = listening.uplink()
    with pytest.raises(DismissedError, match="all machines of a fleet need one version") as refused:
        await old.greet(hello(link_version=99))
    assert refused.value.dismissal.then == "refused"
    assert listening.connections == []
    stranger.close()
    old.close()


async def test_a_port_where_nothing_listens_is_said_at_once(listening: Listening) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    uplink = listening.uplink(port=port)
    with pytest.raises(LinkLostError, match="nothing listens"):
        await asyncio.wait_for(uplink.greet(hello()), 2)
    uplink.close()


async def test_a_stranger_fills_no_frame_before_it_proves_its_key(listening: Listening) -> None:
    """The kernel's buffers take some megabytes that the listener never reads."""
    taken = await asyncio.to_thread(taken_of_a_stranger, listening.listener.port, frame_bytes=1 << 30)
    assert taken < 32 << 20


async def test_a_body_of_many_frames_arrives_whole_both_ways(listening: Listening) -> None:
    uplink, connection = await listening.joined()
    large = report(7)
    large.events[0].tokens.extend(range(3 * FRAME_BYTES_MAX))
    uplink.relay(encode(large))
    assert await connection.receive() == encode(large)
    await connection.send(encode(Cancel("r" * (2 * FRAME_BYTES_MAX + 1))))
    assert await uplink.receive() == encode(Cancel("r" * (2 * FRAME_BYTES_MAX + 1)))
    uplink.close()
