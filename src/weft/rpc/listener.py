"""The server's side of all links to joined machines: one port, and a connection for each agent.

    zmq ROUTER, CURVE        messages in  --> AgentConnection --reports--> EngineClient
    (``--listen-engines``)   messages out <-- AgentConnection <--commands-- EngineClient

An agent is one replica of a joined machine. For the client a connection is a ``ProcessLink``, like a child process. It
ends with the engine process, or it is lost: nothing came for SILENT_S, the queue is full, or the agent sends Hello
again. Then the requests resume elsewhere. The engine process lives on: the agent connects again, and the engine serves
with a warm cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.rpc import link
from weft.rpc.heartbeat import Silence
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import ANYWHERE, HostShare, RecordingTarget
from weft.version import weft_version

_FAREWELL_MS = 500
_log = logging.getLogger("weft.server")


class AgentConnection:
    """A ``ProcessLink``: one engine process of an agent, over one connection. ``on_end`` is called at the end of the
    connection."""

    def __init__(self, listener: LinkListener, routing_id: bytes, host: str) -> None:
        self.host = host
        self.routing_id = routing_id
        self.machine_lost = False
        self.started = False
        self.silence = Silence(link.BEAT_S)
        self.on_end: Callable[[], None] = lambda: None
        self._listener = listener
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def running(self) -> bool:
        return not self._end.done()

    async def start(
        self,
        *,
        factory: str,
        config: EngineConfig,
        record: RecordingTarget | None,
        beat_s: float,
        place: HostShare = ANYWHERE,
    ) -> None:
        """Start an engine on the agent's machine. ``record`` and ``place`` are ignored: a recording belongs to the
        server's own machine, and the joined machine chooses its own cores and memory."""
        self.started = True
        self.say(link.StartEngine(factory, dataclasses.asdict(config), beat_s))

    async def send(self, command: bytes) -> None:
        self.post(command)

    def post(self, command: bytes) -> None:
        """Send a command. Do nothing after the end, which ``wait`` reports."""
        self._put(link.OF_ENGINE, command)

    async def receive(self) -> bytes:
        return await self._received.get()

    async def wait(self) -> str:
        """Wait for the end of the process, and return the reason."""
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self.dismiss("the engine process was ended", "restart")

    def close(self) -> None:
        """Do nothing: the listener keeps no data of a connection that has ended."""

    # ------------------------------------------------------------------ for the listener and the fleet

    def say(self, message: link.LinkMessage) -> None:
        self._put(link.OF_LINK, link.encode(message))

    def dismiss(self, reason: str, then: link.Then = "wait") -> None:
        """End the connection. ``then``: the next action of the agent. Idempotent."""
        self.say(link.Dismissal(reason, then))
        self.end(reason, machine_lost=then != "restart")

    def deliver(self, report: bytes) -> None:
        self._received.put_nowait(report)

    def end(self, reason: str, *, machine_lost: bool = True) -> None:
        """Note the end of the connection. ``machine_lost``: the process may still run, and serve again. The first
        reason stays."""
        if not self._end.done():
            self.machine_lost = machine_lost
            self._end.set_result(reason)
            self._listener.forget(self)
            self.on_end()

    def _put(self, kind: bytes, body: bytes) -> None:
        if self._end.done():
            return
        try:
            self._listener.put([self.routing_id, kind, *link.frames(body)])
        except zmq.ZMQError as error:  # the agent does not read, or has closed the connection
            self.end(f"the link to {self.host} broke: {error.strerror}")


class Machine:
    """One agent of a joined machine, as the replica sees it. ``connection``: None while the agent is away."""

    def __init__(self, hello: link.Hello) -> None:
        self.host = hello.host
        self.agent = hello.agent
        self.role = hello.role
        self.number = -1
        self.attempt = 0
        self.connection: AgentConnection | None = None
        self.away_since_s = 0.0
        self._connected = asyncio.Event()

    async def connected(self) -> AgentConnection:
        """Wait for a connection that no engine client has used, and return it."""
        while self.connection is None:
            self._connected.clear()
            await self._connected.wait()
        return self.connection

    def connect(self, connection: AgentConnection) -> None:
        previous, self.connection = self.connection, connection
        connection.on_end = lambda: self._disconnected(connection)
        if previous is not None:
            previous.end(f"the link to {self.host} was opened again")
        self._connected.set()

    def _disconnected(self, connection: AgentConnection) -> None:
        if self.connection is connection:
            self.connection, self.away_since_s = None, time.monotonic()


class LinkListener:
    """The port at which machines join. ``on_hello`` gets a new connection and returns the number of the replica, or
    None to drop it; ``on_leaving`` gets a machine whose agent wants to leave."""

    def __init__(
        self,
        address: str,
        keys: link.LinkKeys,
        *,
        on_hello: Callable[[link.Hello, AgentConnection], int | None],
        on_leaving: Callable[[AgentConnection], None],
    ) -> None:
        self._address = address
        self._keys = keys
        self._on_hello = on_hello
        self._on_leaving = on_leaving
        self._connections: dict[bytes, AgentConnection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    def bind(self) -> None:
        """Bind the port. Raise ConfigError that names --listen-engines. Call it on the event loop."""
        context = self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self._keys)
        try:  # a socket of the shadow: the context does not know its monitor, and would wait for it
            socket, endpoint = link.listen(zmq.Context.shadow(context.underlying), self._address, self._keys)
        except zmq.ZMQError as error:
            self._authenticator.stop()
            context.destroy(linger=0)
            raise ConfigError(
                f"--listen-engines {self._address.removeprefix('tcp://')}: {zmq.strerror(error.errno or 0)}",
                param="--listen-engines",
            ) from None
        self.port = int(endpoint.rpartition(":")[2])
        self._socket = LoopSocket(socket)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def close(self, reason: str) -> None:
        """Close the port. Agents are told, keep their engines, and wait for the next server."""
        if not self._tasks:
            return
        for connection in list(self._connections.values()):
            connection.dismiss(reason)
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._socket.close(_FAREWELL_MS)
        self._authenticator.stop()
        await asyncio.to_thread(self._context.term)

    def put(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message to an agent. Never waits. Raise zmq.ZMQError."""
        self._socket.send(parts)

    def forget(self, connection: AgentConnection) -> None:
        self._connections.pop(connection.routing_id, None)

    # ------------------------------------------------------------------ messages

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.receive()
            if len(parts) >= 3:
                routing_id, kind, *pieces = parts
                with contextlib.suppress(msgspec.DecodeError):  # of another version, whose Hello is refused
                    self._take(routing_id, kind, b"".join(pieces))

    def _take(self, routing_id: bytes, kind: bytes, body: bytes) -> None:
        connection = self._connections.get(routing_id)
        if connection is None:
            message = link.decode(body) if kind == link.OF_LINK else None
            if isinstance(message, link.Hello):
                self._welcome(routing_id, message)
            return
        connection.silence.end()
        if kind == link.OF_ENGINE:
            connection.deliver(body)
            return
        message = link.decode(body)
        if isinstance(message, link.EngineEnded):
            connection.end(message.reason, machine_lost=False)
        elif isinstance(message, link.Leaving):
            self._on_leaving(connection)
        elif isinstance(message, link.ConnectionLost):
            connection.end(f"{connection.host} hears nothing of this server")

    def _welcome(self, routing_id: bytes, hello: link.Hello) -> None:
        connection = self._connections[routing_id] = AgentConnection(self, routing_id, hello.host)
        refusal = refusal_of(hello)
        if refusal is not None:
            _log.warning("%s was refused: %s", hello.host, refusal)
            connection.dismiss(refusal, "refused")
            return
        number = self._on_hello(hello, connection)
        if number is None:
            self.forget(connection)
        else:
            connection.say(link.Welcome(number))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(link.BEAT_S)
            for connection in list(self._connections.values()):
                if connection.silence.tick() > link.SILENT_S:
                    connection.end(f"{connection.host} has been silent for {connection.silence.seconds:.1f} s")
                else:
                    connection.say(link.LinkBeat())


def refusal_of(hello: link.Hello) -> str | None:
    own = weft_version()
    if hello.link_version != link.LINK_VERSION or hello.weft_version != own:
        return (
            f"{hello.host} runs weft {hello.weft_version} (link {hello.link_version}), and this server "
            f"runs weft {own} (link {link.LINK_VERSION}); all machines of a fleet need one version"
        )
    return None
