"""Messages between a server and a joined machine, in addition to the engine's; the token; and the machine's side of a
connection.

    joined machine (``Uplink``)                             server (``listener``)
    ---------------------------                             ---------------------
    Hello          -------------------------------------->  name of the machine, version of weft
                   <--------------------------------------  Welcome, or Dismissal
                   <--------------------------------------  StartEngine: model and config; a running engine goes on
    EngineEnded    -------------------------------------->  the process ended, with the reason
    Leaving        -------------------------------------->  drain this replica: the operator stops `weft join`
    ConnectionLost -------------------------------------->  the server is silent
                   <--------------------------------------  Dismissal: the connection is over, with the next action
    LinkBeat       <------------------------------------->  every BEAT_S, in both directions

The messages of ``weft.rpc.messages`` are relayed unread. A connection belongs to one engine process and is never
reopened: ZeroMQ's reconnection is off. After any loss the agent opens a new connection on a new socket. So no message
of an earlier connection can reach a later one, and messages need no connection number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from weft.errors import ConfigError, EngineUnavailableError
from weft.handoff import Role
from weft.rpc.heartbeat import Silence
from weft.rpc.loop_socket import LoopSocket

LINK_VERSION = 4
"""Version of the messages; other versions are refused."""
BEAT_S = 0.5
SILENT_S = 3.0
"""Seconds without a message after which the other side counts as vanished."""
OF_LINK, OF_ENGINE = b"L", b"E"
"""Kinds of bodies: a message of this file, or an unread message of ``weft.rpc.messages``."""
FRAME_BYTES_MAX = 256 << 10
"""Most bytes of one frame; a longer body is sent in pieces. ZeroMQ reads a frame before the sender has proved its key,
so this value times the connections is the memory that strangers can take."""
_CURVE_BYTES = 256
"""Upper bound of the bytes that CURVE adds to a frame, and of the bytes of a handshake frame."""
_PORT_MAX = 65535
_QUEUED_MAX = 20_000
"""Most queued messages to a side that does not read; more end the connection."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of an agent. ``agent`` names a replica of a joined machine for as long as its `weft join` runs.
    ``attempt`` grows with each Hello of an agent, so that late ones are recognised. ``host``: the machine's name.
    ``started_by``: the program that started `weft join`, such as a Ray actor; empty for a person. ``role``: of its
    replica."""

    link_version: int
    weft_version: str
    agent: str
    attempt: int
    host: str
    started_by: str = ""
    role: Role = "both"


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The reply to a Hello. ``replica``: the number of the agent's replica."""

    replica: int


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """An order to start an engine. ``config``: fields of an EngineConfig; the joined machine may override fields that
    concern only itself. If an engine with the same configuration runs, the agent resets it instead."""

    factory: str
    config: dict[str, Any]
    beat_s: float


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Request of an agent: drain the replica, and dismiss the agent."""


class ConnectionLost(msgspec.Struct, frozen=True, tag=True):
    """Report of an agent that receives nothing from the server. If only one direction is cut, this message tells the
    server."""


Then = Literal["wait", "restart", "refused", "drained"]


class Dismissal(msgspec.Struct, frozen=True, tag=True):
    """The connection is over. The agent then keeps its engine and waits for the next server (wait), ends the engine and
    connects again (restart), or ends (refused; drained, as it asked)."""

    reason: str
    then: Then = "wait"


class LinkBeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


LinkMessage = Hello | Welcome | StartEngine | EngineEnded | Leaving | ConnectionLost | Dismissal | LinkBeat

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LinkMessage)


def encode(message: LinkMessage) -> bytes:
    return _encoder.encode(message)


def decode(raw: bytes) -> LinkMessage:
    """Decode a message. Raise msgspec.DecodeError."""
    message: LinkMessage = _decoder.decode(raw)
    return message


def frames(*bodies: bytes | memoryview) -> list[memoryview]:
    """Split ``bodies`` into frames, which the receiver joins."""
    views = [memoryview(body).cast("B") if body else memoryview(b"") for body in bodies]
    return [
        view[start : start + FRAME_BYTES_MAX]
        for view in views
        for start in range(0, max(1, len(view)), FRAME_BYTES_MAX)
    ]


def _set_options(socket: zmq.Socket[bytes]) -> None:
    """Set the options of a socket. ZeroMQ's heartbeat closes connections over a cut network. It only proves that the
    machine lives; ``LinkBeat`` proves that the process does."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RECONNECT_IVL, -1),
        (zmq.IPV6, 1),
        (zmq.SNDHWM, _QUEUED_MAX),
        (zmq.RCVHWM, _QUEUED_MAX),
        (zmq.MAXMSGSIZE, FRAME_BYTES_MAX + _CURVE_BYTES),
        (zmq.HEARTBEAT_IVL, int(BEAT_S * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, int(SILENT_S * 1000)),
        (zmq.HANDSHAKE_IVL, int(SILENT_S * 1000)),
    ):
        socket.setsockopt(option, value)


def tcp_address(text: str, *, flag: str) -> str:
    """Return ``HOST:PORT`` as ZeroMQ writes it. Raise ConfigError that names ``flag``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ConfigError(f"{flag} {text}: it is HOST:PORT, such as 10.0.0.1:8100 or [::]:8100", param=flag)
    return f"tcp://{host}:{port}"


def own_address(towards: str = "192.0.2.1") -> str:
    """Return this machine's address on the route to ``towards``. Nothing is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


TOKEN_CHARS_MIN = 32
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Keys of one fleet, from its token: CURVE encrypts and authenticates every frame with them. Both sides derive the
    public keys from the token, so no key crosses the network."""

    server: KeyPair
    machine: KeyPair

    @classmethod
    def of(cls, token: str) -> LinkKeys:
        return cls(_key_pair(token, b"server"), _key_pair(token, b"machine"))

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell ZeroMQ whether a handshake may succeed: only with the key of the token."""
        return key == self.machine.public


def new_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


def read_token(file: str) -> str:
    """Return the token. Raise ConfigError that names --token: no such file, readable by others, too short."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"--token {path}: other users can read or change it (mode "
                    f"{stat.S_IMODE(mode):04o}); run: chmod 600 {path}",
                    param="--token",
                )
            token = opened.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(
            f"--token {path}: {error.strerror}; the file is created by `weft serve "
            "--listen-engines` and copied from there",
            param="--token",
        ) from None
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or "\ufffd" in token:
        raise ConfigError(
            f"--token {path}: it has {len(token)} characters; a token is one line of at least "
            f"{TOKEN_CHARS_MIN} printable ASCII characters",
            param="--token",
        )
    return token


def read_or_create_token(file: str) -> tuple[str, bool]:
    """Return the token, and whether its file is new: 256 random bits, readable only by its owner. Raise ConfigError as
    ``read_token``."""
    path = Path(file).expanduser()
    with contextlib.suppress(FileExistsError):
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"--token {path}: it cannot be created: {error.strerror}", param="--token") from None
        token = new_token()
        with open(opened, "w", encoding="ascii") as created:
            created.write(token + "\n")
        return token, True
    return read_token(file), False


def _key_pair(token: str, role: bytes) -> KeyPair:
    seed = hashlib.sha256(token.encode("ascii", "replace")).digest()
    secret = z85.encode(hashlib.sha256(b"weft link " + role + seed).digest())
    return KeyPair(zmq.curve_public(secret), secret)


def dial(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a socket that connects to ``address``, and the monitor of its end (``ending_of``). ``keys``: None on this
    machine. Raise zmq.ZMQError."""
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    if keys is not None:
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey, socket.curve_secretkey = keys.machine.public, keys.machine.secret
    monitor = socket.get_monitor_socket()
    socket.connect(address)
    return socket, monitor


def listen(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys | None
) -> tuple[zmq.Socket[bytes], str]:
    """Return a socket bound to ``address``, whose port may be 0, and the address with the port. ``keys``: admit their
    fleet; None on this machine. Raise zmq.ZMQError."""
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that cannot be queued is an error, not dropped
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server.public, keys.server.secret
    try:
        socket.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


Ending = Literal["refused", "unreachable", "closed"]
_ENDINGS: tuple[tuple[zmq.Event, Ending], ...] = (
    (zmq.Event.HANDSHAKE_FAILED_AUTH, "refused"),
    (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, "refused"),
    (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, "refused"),
    (zmq.Event.CLOSED, "unreachable"),
    (zmq.Event.DISCONNECTED, "closed"),
)


def ending_of(message: Mapping[str, Any]) -> Ending | None:
    """Return how a connection ended, by a message of its monitor: its key was refused, nothing listens at its address,
    or the other side closed it; None if it did not end."""
    event = zmq.Event(message["event"])
    return next((ending for ended, ending in _ENDINGS if event & ended), None)


_FAREWELL_MS = 500


class LinkLostError(EngineUnavailableError):
    """The server cannot be reached, or the connection to it is over."""


class DismissedError(EngineUnavailableError):
    """The server ended the connection with a reason."""

    def __init__(self, dismissal: Dismissal) -> None:
        super().__init__(dismissal.reason)
        self.dismissal = dismissal


class Uplink:
    """A joined machine's side of one connection. Construct it on the running event loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys) -> None:
        self._where = address.removeprefix("tcp://")
        self._silence = Silence(BEAT_S)
        self._dealer, monitor = dial(context, address, keys)
        self._monitor, self._socket = LoopSocket(monitor), LoopSocket(self._dealer)

    def close(self) -> None:
        if not self._dealer.closed:
            self._dealer.disable_monitor()  # first, since ZeroMQ would wait for ever to write to a closed monitor
        self._monitor.close()
        self._socket.close(_FAREWELL_MS)  # a last message may be on its way

    async def greet(self, hello: Hello) -> Welcome:
        """Send Hello, and return the reply. Raise LinkLostError with the reason; DismissedError; ConfigError for a
        wrong token."""
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
        """Send ``message``. Raise LinkLostError."""
        self._put(OF_LINK, encode(message))

    def relay(self, report: bytes) -> None:
        """Send a report of the engine. Raise LinkLostError."""
        self._put(OF_ENGINE, report)

    async def receive(self) -> LinkMessage | bytes:
        """Return the next message, or a command for the engine in msgpack. Raise DismissedError."""
        while True:
            kind, *pieces = await self._socket.receive()
            body = b"".join(pieces)
            self._silence.end()
            if kind == OF_ENGINE:
                return body
            with contextlib.suppress(msgspec.DecodeError):  # of another version
                message = decode(body)
                if isinstance(message, Dismissal):
                    raise DismissedError(message)
                if not isinstance(message, LinkBeat):
                    return message

    async def keep_alive(self) -> None:
        """Send beats until the server is silent; then raise LinkLostError."""
        self._silence.begin()
        self.say(LinkBeat())
        while await self._silence.next_tick() <= SILENT_S:
            self.say(LinkBeat())
        self.say(ConnectionLost())
        raise LinkLostError(f"the server has been silent for {self._silence.seconds:.1f} s")

    async def watch(self) -> None:
        """Wait for the end of the connection, and raise the reason: LinkLostError; ConfigError for a wrong token."""
        while True:
            ending = ending_of(parse_monitor_message(await self._monitor.receive()))
            if ending == "refused":
                raise ConfigError(
                    f"{self._where} refuses the token: copy the file of its --token to this machine", param="--token"
                )
            if ending == "unreachable":
                raise LinkLostError(f"nothing listens at {self._where}")
            if ending == "closed":
                raise LinkLostError(f"{self._where} closed the connection")

    def _put(self, kind: bytes, body: bytes) -> None:
        try:
            self._socket.send([kind, *frames(body)])
        except zmq.Again:
            raise LinkLostError(f"the connection to {self._where} is over") from None
