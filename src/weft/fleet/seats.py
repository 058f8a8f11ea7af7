"""Which machines are connected: the seat of each agent, and the session that it has at the moment.

    Seat      the place of one agent (a replica of a joined machine) in the fleet; it outlives sessions
    Session   one connection of an agent, from its Welcome to its loss; its number is the epoch
    LinkEnd   the engine process that a session speaks of (``remote_link``)

A session may see several engine processes, one after the other: its *lives*. A frame of an earlier life is
dropped, so a report of a killed process never reaches its successor's client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from weft.rpc.link_frames import BodyKind, FrameHeader, FrameNumbers
from weft.rpc.link_messages import Leaving, LinkMessage, SessionLost, decode, encode


class LinkEnd(Protocol):
    def deliver(self, report: bytes) -> None: ...

    def hear(self, message: LinkMessage) -> None: ...

    def lose(self, reason: str) -> None: ...


class Session:
    """One connection of an agent. ``link``: the engine process that it speaks of at the moment."""

    def __init__(self, seat: Seat, epoch: int, routing_id: bytes,
                 send: Callable[[list[bytes]], None]) -> None:
        self.seat = seat
        self.routing_id = routing_id
        self.link: LinkEnd | None = None
        self.numbers = FrameNumbers(epoch)
        self.silent_s = 0.0
        self._send = send
        self._life = 0

    def begin_life(self, link: LinkEnd) -> None:
        """Of the next engine process; frames of the ones before it are dropped."""
        self._life += 1
        self.link = link

    def say(self, message: LinkMessage) -> None:
        self.put(BodyKind.LINK, encode(message))

    def put(self, kind: BodyKind, body: bytes) -> None:
        self._send([self.routing_id, self.numbers.header(kind, self._life), body])

    def take(self, header: FrameHeader, body: bytes) -> LinkMessage | None:
        """A message for the listener, or None. Raises FrameGapError."""
        if not self.numbers.accepts(header):
            return None
        self.silent_s = 0.0
        link = self.link if header.life == self._life else None
        if header.kind is BodyKind.ENGINE:
            if link is not None:
                link.deliver(body)
            return None
        message = decode(body)
        if isinstance(message, Leaving | SessionLost):
            return message
        if link is not None:
            link.hear(message)
        return None


class Seat:
    """The place of one agent in the fleet. ``session``: None while its machine is away."""

    def __init__(self, agent: str, host: str, started_by: str) -> None:
        self.agent = agent
        self.host = host
        self.started_by = started_by
        self.number = -1
        self.attempt = 0
        self.session: Session | None = None
        self.away_since_s: float | None = None
        self._attached = asyncio.Event()

    async def attached(self) -> None:
        """Waits until the machine is connected."""
        await self._attached.wait()

    def attach(self, session: Session) -> None:
        self.session, self.away_since_s = session, None
        self._attached.set()

    def detach(self, reason: str) -> None:
        """The session is lost: so is the engine process that it spoke of."""
        session, self.session = self.session, None
        self._attached.clear()
        self.away_since_s = time.monotonic()
        if session is not None and session.link is not None:
            session.link.lose(reason)
