"""One attempt of an agent to reach its server, and the session that follows: a socket of its own for each.

    open --Hello--> Welcome(epoch) --> frames in both directions --> lost --close--> the next attempt

A new socket for each attempt drops whatever the old one had queued, so nothing of an old session is sent
late. The session is lost for this end if nothing came for SILENT_S, if a frame is missing, or if the server
dismisses it. Silence may mean that one way of the network is cut.

ZeroMQ connects, fails and connects again without a word. Its socket monitor says which of the reasons it is:
nothing listens, or the handshake fails because the tokens differ. One failed handshake may be a server that
ends in that moment. REFUSALS_MAX of them in one attempt are a refusal, and the agent does not wait for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from importlib import metadata

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from weft.errors import ConfigError, EngineUnavailableError
from weft.rpc.link_frames import NO_EPOCH, BodyKind, FrameHeader, FrameNumbers
from weft.rpc.link_keys import LinkKeys
from weft.rpc.link_messages import (
    BEAT_S,
    LINK_VERSION,
    SILENT_S,
    Dismissal,
    Hello,
    LinkBeat,
    LinkMessage,
    SessionLost,
    Welcome,
    decode,
    encode,
)
from weft.rpc.link_socket import link_options

_REFUSED = (zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
REFUSALS_MAX = 3
_LATE_TICKS = 2


class LinkLostError(EngineUnavailableError):
    """The server cannot be reached, or the session with it is over."""


class DismissedError(EngineUnavailableError):
    """The server ended the session with a reason."""

    def __init__(self, dismissal: Dismissal) -> None:
        super().__init__(dismissal.reason)
        self.dismissal = dismissal


class LinkClient:
    """``life``: of the engine process that frames speak of from now on."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: LinkKeys) -> None:
        self.life = 0
        self._address = address
        self._numbers = FrameNumbers(NO_EPOCH)
        self._silent_s = 0.0
        self._failures: set[zmq.Event] = set()
        self._refusal_count = 0
        self._refused = asyncio.Event()
        socket = self._socket = context.socket(zmq.DEALER)
        link_options(socket)
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey, socket.curve_secretkey = keys.machine.public, keys.machine.secret
        self._monitor = socket.get_monitor_socket()
        socket.connect(address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=500)  # a farewell may be on its way

    async def greet(self, agent: str, attempt: int, host: str, started_by: str = "") -> Welcome:
        """Raises LinkLostError with the reason; DismissedError; ConfigError for another token."""
        hello = Hello(link_version=LINK_VERSION, weft_version=metadata.version("weft"), agent=agent,
                      attempt=attempt, host=host, started_by=started_by)
        outside = FrameHeader(NO_EPOCH, 0, 0, BodyKind.LINK).pack()
        listening = asyncio.create_task(self._note_failures())
        await self._socket.send_multipart([outside, encode(hello)])
        welcome, refused = asyncio.create_task(self._welcome()), asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait((welcome, refused), timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
            if not welcome.done():
                raise self._unanswered()
            message = welcome.result()
        finally:
            for task in (listening, welcome, refused):
                task.cancel()
        if isinstance(message, Dismissal):
            raise DismissedError(message)
        assert isinstance(message, Welcome)
        self._numbers = FrameNumbers(message.epoch)
        return message

    async def say(self, message: LinkMessage) -> None:
        await self.put(BodyKind.LINK, encode(message))

    async def put(self, kind: BodyKind, body: bytes) -> None:
        await self._socket.send_multipart([self._numbers.header(kind, self.life), body])

    async def receive(self) -> tuple[FrameHeader, bytes]:
        """The next frame of the session. Raises FrameGapError."""
        while True:
            parts = await self._socket.recv_multipart()
            header = FrameHeader.unpack(parts[0]) if len(parts) == 2 else None
            if header is not None and self._numbers.accepts(header):
                self._silent_s = 0.0
                return header, parts[1]

    async def keep_alive(self) -> None:
        """Sends beats until the server is silent, and raises LinkLostError then. Silence is counted in ticks:
        a machine that was stopped itself does not blame the server."""
        ticked_s = time.monotonic()
        while self._silent_s <= SILENT_S:
            await self.say(LinkBeat())
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            self._silent_s += min(now_s - ticked_s, _LATE_TICKS * BEAT_S)
            ticked_s = now_s
        await self.say(SessionLost())
        raise LinkLostError(f"the server has been silent for {self._silent_s:.1f} s")

    async def _welcome(self) -> LinkMessage:
        while True:
            parts = await self._socket.recv_multipart()
            header = FrameHeader.unpack(parts[0]) if len(parts) == 2 else None
            if header is not None and header.epoch == NO_EPOCH and header.kind is BodyKind.LINK:
                with contextlib.suppress(msgspec.DecodeError):
                    message = decode(parts[1])
                    if isinstance(message, Welcome | Dismissal):
                        return message

    async def _note_failures(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            self._failures.add(zmq.Event(event["event"]))
            self._refusal_count += bool(zmq.Event(event["event"]) & _REFUSED)
            if self._refusal_count == REFUSALS_MAX:
                self._refused.set()

    def _unanswered(self) -> Exception:
        where = self._address.removeprefix("tcp://")
        if any(failure & _REFUSED for failure in self._failures):
            return ConfigError(f"{where} refuses the token: copy the file of its --token to this machine",
                               param="--token")
        if zmq.Event.CONNECTED not in self._failures:
            return LinkLostError(f"nothing listens at {where}")
        return LinkLostError(f"no answer from {where}; is it a weft server with --listen-engines?")
