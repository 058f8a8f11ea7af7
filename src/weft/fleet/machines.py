"""The server's end of all links to joined machines: one port, a session for each agent.

    zmq ROUTER, CURVE        frames in  --epoch, number-->  Session --> RemoteLink --> EngineClient
    (``--listen-engines``)   frames out <------------------ Session <-- RemoteLink <-- EngineClient

An agent is one replica of a joined machine, for as long as its `weft join` runs (``seats``).

A session is lost if nothing came for SILENT_S, if a frame is missing, or if its agent says Hello again. Its
engine client then dies with the reason, and the requests resume elsewhere. The engine process lives on: when
its agent is back, it gets a new session, drops what it computed, and serves with a warm cache.

Silence is counted in ticks of this event loop (as in ``weft.rpc.heartbeat``), so a server that was held up
itself blames no machine.

Rejected: a socket for each machine (a port range to open in firewalls); the server connecting to machines
(they come and go, often behind NAT); ZeroMQ's own heartbeat alone (it closes connections, and says nothing of
a process that is stopped).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from weft.errors import ConfigError
from weft.fleet.seats import Seat, Session
from weft.rpc.link_frames import NO_EPOCH, BodyKind, FrameGapError, FrameHeader
from weft.rpc.link_keys import LinkKeys
from weft.rpc.link_messages import (
    BEAT_S,
    LINK_VERSION,
    SILENT_S,
    Dismissal,
    Hello,
    Leaving,
    LinkBeat,
    SessionLost,
    Welcome,
    decode,
    encode,
)
from weft.rpc.link_socket import link_options

_LATE_TICKS = 2
_log = logging.getLogger("weft.server")


class Machines:
    """``on_join`` gives a new seat its number; ``on_leaving``: its agent wishes to leave."""

    def __init__(self, address: str, keys: LinkKeys, *, on_join: Callable[[Seat], int],
                 on_leaving: Callable[[Seat], None]) -> None:
        self._address = address
        self._keys = keys
        self._on_join = on_join
        self._on_leaving = on_leaving
        self._seats: dict[str, Seat] = {}
        self._sessions: dict[bytes, Session] = {}
        self._epochs = itertools.count(time.time_ns())  # above those of an earlier server
        self._tasks: list[asyncio.Task[None]] = []
        self._unsent: set[asyncio.Future[Any]] = set()
        self.port = 0

    def bind(self) -> None:
        """Raises ConfigError that names --listen-engines. Call it on the event loop."""
        context = self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_MachineKey(self._keys))
        socket = self._socket = context.socket(zmq.ROUTER)
        link_options(socket)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.server.public, self._keys.server.secret
        try:
            socket.bind(self._address.removesuffix(":0") + ":*" if self._address.endswith(":0")
                        else self._address)
        except zmq.ZMQError as error:
            self._authenticator.stop()
            context.destroy(linger=0)
            raise ConfigError(f"--listen-engines {self._address.removeprefix('tcp://')}: {error.strerror}",
                              param="--listen-engines") from None
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def close(self, reason: str) -> None:
        """Agents learn that the server ends, and wait for the next one. Their engines live on."""
        if not self._tasks:
            return
        for session in list(self._sessions.values()):
            session.say(Dismissal(reason))
            self._lose(session, reason)
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._unsent:
            await asyncio.wait(self._unsent, timeout=1)
        self._socket.close(linger=500)
        self._authenticator.stop()
        await asyncio.to_thread(self._context.term)

    def dismiss(self, seat: Seat, reason: str, *, refused: bool = False, drained: bool = False) -> None:
        """The agent leaves for good, and its seat is gone."""
        self._seats.pop(seat.agent, None)
        if seat.session is not None:
            seat.session.say(Dismissal(reason, refused=refused, drained=drained))
            self._lose(seat.session, reason)

    # ------------------------------------------------------------------ frames

    def _put(self, parts: list[bytes]) -> None:
        """Never waits: a ROUTER drops what it cannot queue, and the number of the next frame says so."""
        future = asyncio.ensure_future(self._socket.send_multipart(parts))
        if not future.done():
            self._unsent.add(future)
            future.add_done_callback(self._unsent.discard)

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            if len(parts) != 3:
                continue
            routing_id, raw, body = parts
            header = FrameHeader.unpack(raw)
            if header is None:
                continue
            with contextlib.suppress(msgspec.DecodeError):  # of another version, and refused by its Hello
                self._take(routing_id, header, body)

    def _take(self, routing_id: bytes, header: FrameHeader, body: bytes) -> None:
        if header.epoch == NO_EPOCH:
            message = decode(body) if header.kind is BodyKind.LINK else None
            if isinstance(message, Hello):
                self._welcome(routing_id, message)
            return
        session = self._sessions.get(routing_id)
        if session is None:
            return
        try:
            message = session.take(header, body)
        except FrameGapError as gap:
            self._lose(session, f"the link to {session.seat.host} broke: {gap.message}")
            return
        if isinstance(message, Leaving):
            self._on_leaving(session.seat)
        elif isinstance(message, SessionLost):
            self._lose(session, f"{session.seat.host} hears nothing of this server")

    def _welcome(self, routing_id: bytes, hello: Hello) -> None:
        refusal = refusal_of(hello)
        if refusal is not None:
            _log.warning("%s was refused: %s", hello.host, refusal)
            self._put([routing_id, _outside(), encode(Dismissal(refusal, refused=True))])
            return
        seat = self._seats.get(hello.agent)
        if seat is None:
            seat = self._seats[hello.agent] = Seat(hello.agent, hello.host, hello.started_by)
            seat.number = self._on_join(seat)
        elif hello.attempt <= seat.attempt:
            return  # a late one
        seat.attempt = hello.attempt
        if seat.session is not None:
            self._lose(seat.session, f"the link to {hello.host} was opened again")
        epoch = next(self._epochs)
        session = self._sessions[routing_id] = Session(seat, epoch, routing_id, self._put)
        self._put([routing_id, _outside(), encode(Welcome(epoch, seat.number))])
        seat.attach(session)

    async def _watch(self) -> None:
        ticked_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            passed_s, ticked_s = min(now_s - ticked_s, _LATE_TICKS * BEAT_S), now_s
            for session in list(self._sessions.values()):
                session.silent_s += passed_s
                if session.silent_s > SILENT_S:
                    self._lose(session, f"{session.seat.host} has been silent for {session.silent_s:.1f} s")
                else:
                    session.say(LinkBeat())

    def _lose(self, session: Session, reason: str) -> None:
        if self._sessions.pop(session.routing_id, None) is not None and session.seat.session is session:
            session.seat.detach(reason)


class _MachineKey:
    """Tells ZeroMQ whose handshakes may succeed: those with the key of the token."""

    def __init__(self, keys: LinkKeys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._keys.machine.public


def refusal_of(hello: Hello) -> str | None:
    own = metadata.version("weft")
    if hello.link_version != LINK_VERSION or hello.weft_version != own:
        return (f"{hello.host} runs weft {hello.weft_version} (link {hello.link_version}), and this server "
                f"runs weft {own} (link {LINK_VERSION}); all machines of a fleet need one version")
    return None


def _outside() -> bytes:
    return FrameHeader(NO_EPOCH, 0, 0, BodyKind.LINK).pack()
