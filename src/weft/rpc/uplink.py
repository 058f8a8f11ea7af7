"""One connection of an agent to its server, from the attempt to its loss: a socket that is used once.

    greet: Hello --> Welcome     receive, relay, say     keep_alive, watch: raise why it is lost     close

The connection is lost if nothing came for SILENT_S, if it is closed, or if the server dismisses the agent.
Silence may mean that one way of the network is cut. ZeroMQ's socket monitor says why a connection fails:
nothing listens, or the handshake fails because the tokens differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from weft.errors import ConfigError, EngineUnavailableError
from weft.rpc.link import (
    BEAT_S,
    LATE_TICKS,
    OF_ENGINE,
    OF_LINK,
    SILENT_S,
    ConnectionLost,
    Dismissal,
    Hello,
    LinkBeat,
    LinkKeys,
    LinkMessage,
    Welcome,
    decode,
    encode,
    set_options,
)
from weft.rpc.loop_socket import LoopSocket

_REFUSED = (zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
_FAREWELL_MS = 500


class LinkLostError(EngineUnavailableError):
    """The server cannot be reached, or the connection to it is over."""


class DismissedError(EngineUnavailableError):
    """The server ended the connection with a reason."""

    def __init__(self, dismissal: Dismissal) -> None:
        super().__init__(dismissal.reason)
        self.dismissal = dismissal


class Uplink:
    """To be constructed on the running event loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys) -> None:
        self._where = address.removeprefix("tcp://")
        self._silent_s = 0.0
        socket = context.socket(zmq.DEALER)
        set_options(socket)
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey, socket.curve_secretkey = keys.machine.public, keys.machine.secret
        self._dealer = socket
        self._monitor = LoopSocket(socket.get_monitor_socket())
        self._socket = LoopSocket(socket)
        socket.connect(address)

    def close(self) -> None:
        if not self._dealer.closed:
            self._dealer.disable_monitor()  # first: ZeroMQ waits for ever to write to one that is closed
        self._monitor.close()
        self._socket.close(_FAREWELL_MS)  # a farewell may be on its way

    async def greet(self, hello: Hello) -> Welcome:
        """Raises LinkLostError with the reason; DismissedError; ConfigError for another token."""
        self.say(hello)
        answer, lost = asyncio.ensure_future(self.receive()), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait((answer, lost), timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                welcome = answer.result()
                assert isinstance(welcome, Welcome)
                return welcome
            if lost.done():
                lost.result()
            raise LinkLostError(f"no answer from {self._where}; is it a weft server with --listen-engines?")
        finally:
            answer.cancel()
            lost.cancel()

    def say(self, message: LinkMessage) -> None:
        """Raises LinkLostError."""
        self._put(OF_LINK, encode(message))

    def relay(self, report: bytes) -> None:
        """A report of the engine. Raises LinkLostError."""
        self._put(OF_ENGINE, report)

    async def receive(self) -> LinkMessage | bytes:
        """The next message, or a command for the engine in msgpack. Raises DismissedError."""
        while True:
            kind, body = await self._socket.receive()
            self._silent_s = 0.0
            if kind == OF_ENGINE:
                return body
            with contextlib.suppress(msgspec.DecodeError):  # of another version
                message = decode(body)
                if isinstance(message, Dismissal):
                    raise DismissedError(message)
                if not isinstance(message, LinkBeat):
                    return message

    async def keep_alive(self) -> None:
        """Sends beats until the server is silent, and raises LinkLostError then. Silence is counted in ticks:
        a machine that was stopped itself does not blame the server."""
        ticked_s = time.monotonic()
        while self._silent_s <= SILENT_S:
            self.say(LinkBeat())
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            self._silent_s += min(now_s - ticked_s, LATE_TICKS * BEAT_S)
            ticked_s = now_s
        self.say(ConnectionLost())
        raise LinkLostError(f"the server has been silent for {self._silent_s:.1f} s")

    async def watch(self) -> None:
        """Raises why the connection failed or was closed: LinkLostError; ConfigError for another token."""
        while True:
            event = zmq.Event(parse_monitor_message(await self._monitor.receive())["event"])
            if event & _REFUSED:
                raise ConfigError(f"{self._where} refuses the token: copy the file of its --token to this "
                                  "machine", param="--token")
            if event & zmq.Event.CLOSED:
                raise LinkLostError(f"nothing listens at {self._where}")
            if event & zmq.Event.DISCONNECTED:
                raise LinkLostError(f"{self._where} closed the connection")

    def _put(self, kind: bytes, body: bytes) -> None:
        try:
            self._socket.send([kind, body])
        except zmq.Again:
            raise LinkLostError(f"the connection to {self._where} is over") from None
