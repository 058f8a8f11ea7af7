"""``weft join``: engine processes of this machine for a server on another machine, with an agent for each replica.

    connect --> start the engine, or reset a running one --> relay --> lost --> connect again
                                                              |
                                      first Ctrl-C: the server drains the replica and dismisses the agent
                                      second: the engine is ended at once

The agent relays commands and reports without reading them. The engine outlives connections: after a loss the requests
are cancelled (other replicas resume them), the cache stays, and the engine serves again. The agent drops reports from
before the reset. The server decides the model and its configuration; `weft join` takes the fields that depend on the
machine. The engines of one machine start one after the other, as each chooses its memory from the free rest. Exit
codes: 0 drained; 2 refused (token, version, weights); 130 after the second Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from weft.config import EngineConfig
from weft.errors import ConfigError, WeftError
from weft.fleet.places import divide_machine
from weft.fleet.start_progress import StartProgress
from weft.handoff import Role
from weft.info import ModelInfo
from weft.rpc.client import EngineLink
from weft.rpc.link import (
    LINK_VERSION,
    DismissedError,
    EngineEnded,
    Hello,
    Leaving,
    LinkKeys,
    LinkLostError,
    StartEngine,
    Uplink,
)
from weft.rpc.messages import HostShare, PeerKeys, Progress, Ready, Report, Reset, StepReport
from weft.version import weft_version

EXIT_DRAINED, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 2, 130
REFUSALS_MAX = 3
"""Refusals in a row that end an agent. A single failed handshake may come from a server that is just ending."""
RESET_S = 10.0
_AGAIN_S = 1.0
_NO_QUESTION = -1
_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)


def join(
    address: str,
    keys: LinkKeys,
    own: Mapping[str, Any],
    replicas: int,
    progress: StartProgress,
    *,
    started_by: str = "",
    role: Role = "both",
    peers: PeerKeys | None = None,
) -> int:
    """Serve until dismissed or interrupted; return the exit code. ``own``: fields of EngineConfig that hold on this
    machine instead of the server's. ``role``: of the replicas; ``peers``: how other engines send to the replicas. Call
    it from the main thread."""
    with asyncio.Runner() as runner:
        return runner.run(Joining(address, keys, own, replicas, progress, started_by, role, peers).run())


class Joining:
    """The agents of one machine, and its reaction to signals."""

    def __init__(
        self,
        address: str,
        keys: LinkKeys,
        own: Mapping[str, Any],
        replicas: int,
        progress: StartProgress,
        started_by: str = "",
        role: Role = "both",
        peers: PeerKeys | None = None,
    ) -> None:
        self._context = zmq.Context()
        divide_machine(EngineConfig(device=own.get("device", "auto")), replicas)  # raises before anything starts
        self._agents = [
            Agent(self._context, address, keys, own, (number, replicas), progress, started_by, role, peers)
            for number in range(replicas)
        ]
        self._stops = 0
        self._interrupted = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        interrupted = asyncio.create_task(self._interrupted.wait())
        tasks = {asyncio.create_task(agent.run()) for agent in self._agents[:1]}
        waiting = self._agents[1:]
        ready = asyncio.create_task(self._agents[0].ready.wait())
        codes = []
        try:
            while tasks and not interrupted.done():
                done, _ = await asyncio.wait({*tasks, interrupted, ready}, return_when=asyncio.FIRST_COMPLETED)
                if ready.done() and waiting and not self._stops:
                    agent = waiting.pop(0)
                    tasks.add(asyncio.create_task(agent.run()))
                    ready = asyncio.create_task(agent.ready.wait())
                elif ready.done():
                    ready = asyncio.create_task(asyncio.Event().wait())
                codes += [task.result() for task in done & tasks]
                tasks -= done
        finally:
            for agent in self._agents:
                await agent.close()
            for task in (*tasks, interrupted, ready):
                task.cancel()
            self._context.destroy(linger=500)
        return EXIT_INTERRUPTED if self._interrupted.is_set() else max(codes, default=EXIT_DRAINED)

    def _on_signal(self) -> None:
        self._stops += 1
        if self._stops > 1:
            self._interrupted.set()
        for agent in self._agents:
            agent.leave()


class EngineEndedError(WeftError):
    """The engine process of an agent ended, and with it the connection."""


class Agent:
    """One replica of this machine. ``place``: number of the replica, and number of replicas on the machine. ``ready``
    is set once the engine serves."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: LinkKeys,
        own: Mapping[str, Any],
        place: tuple[int, int],
        progress: StartProgress,
        started_by: str = "",
        role: Role = "both",
        peers: PeerKeys | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self._peers = peers
        self._context = context
        self._address = address
        self._keys = keys
        self._own = own
        self._place = place
        self._progress = progress
        self._hello = Hello(
            link_version=LINK_VERSION,
            weft_version=weft_version(),
            agent=uuid.uuid4().hex,
            attempt=0,
            host=socket.gethostname(),
            started_by=started_by,
            role=role,
        )
        self._has_joined = False
        self._refusals = 0
        self._said = ""
        self._engine: LocalEngine | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Leave once the server has drained the replica."""
        self._leaving.set()

    async def close(self) -> None:
        """End the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.end()

    async def run(self) -> int:
        """Run until dismissed; return the exit code."""
        while True:
            uplink = Uplink(self._context, self._address, self._keys)
            self._hello = msgspec.structs.replace(self._hello, attempt=self._hello.attempt + 1)
            pause_s = _AGAIN_S
            try:
                welcome = await uplink.greet(self._hello)
                self._has_joined = True
                self._tell(f"joined {self._where} as replica {welcome.replica}")
                await self._serve(uplink)
            except DismissedError as error:
                then = error.dismissal.then
                if then in ("refused", "drained"):
                    self._tell(f"{then}: {error.message}")
                    return EXIT_REFUSED if then == "refused" else EXIT_DRAINED
                if then == "restart":
                    await self.close()
                    pause_s = 0.0
                else:
                    self._tell(f"{error.message}; waiting for {self._where}")
            except EngineEndedError:
                await self.close()
                pause_s = 0.0
            except ConfigError as error:
                self._refusals += 1
                if self._has_joined:
                    self._tell(f"the connection to {self._where} breaks off; trying again")
                elif self._refusals == REFUSALS_MAX:
                    self._tell(error.message)
                    return EXIT_REFUSED
            except LinkLostError as error:
                if not self._leaving.is_set():
                    self._tell(f"{error.message}; trying again")
            finally:
                uplink.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause_s)
            if self._leaving.is_set():
                return EXIT_DRAINED  # other replicas have resumed the requests

    async def _serve(self, uplink: Uplink) -> None:
        """Serve over one connection. Raise the reason for its end."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(reason: str) -> None:
            if not ended.done():
                uplink.say(EngineEnded(reason))
                ended.set_exception(EngineEndedError(reason))

        tasks = [
            asyncio.ensure_future(work)
            for work in (
                uplink.keep_alive(),
                uplink.watch(),
                self._obey(uplink, on_end),
                self._say_farewell(uplink),
                ended,
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            if self._engine is not None:
                self._engine.unplug()

    async def _obey(self, uplink: Uplink, on_end: Callable[[str], None]) -> None:
        """Obey commands of the server. Raise DismissedError."""
        while True:
            message = await uplink.receive()
            if isinstance(message, bytes):
                if self._engine is not None:
                    await self._engine.send(message)
            elif isinstance(message, StartEngine):
                await self._start(message, uplink.relay, on_end)

    async def _start(self, order: StartEngine, relay: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        if self._engine is not None and self._engine.order == order:
            ready = await self._engine.reset()
            if ready is not None:
                relay(_encoder.encode(ready))
                self._engine.plug(relay, on_end)
                return
        await self.close()
        try:
            config = EngineConfig(**{**order.config, **self._own})
            number, replicas = self._place
            share = dataclasses.replace(divide_machine(config, replicas)[number], peers=self._peers)
            self._engine = LocalEngine(order, self._progress, self.ready.set)
            self._engine.plug(relay, on_end)
            await self._engine.start(config, share)
        except (WeftError, TypeError, OSError) as error:
            on_end(f"cannot start an engine: {error}")

    async def _say_farewell(self, uplink: Uplink) -> None:
        await self._leaving.wait()
        self._tell("draining: requests finish or resume elsewhere; Ctrl-C again stops at once")
        uplink.say(Leaving())

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._progress.say(text)

    @property
    def _where(self) -> str:
        return self._address.removeprefix("tcp://")


class LocalEngine:
    """The engine process of an agent, attached to one connection at a time. A process that does not answer a reset
    within RESET_S is ended, and the agent starts another."""

    def __init__(self, order: StartEngine, progress: StartProgress, on_ready: Callable[[], None]) -> None:
        self.order = order
        self._progress = progress
        self._on_ready = on_ready
        self._link = EngineLink()
        self._info: ModelInfo | None = None
        self._relay: Callable[[bytes], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._reset: asyncio.Future[Ready] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, config: EngineConfig, share: HostShare) -> None:
        """Start the process. Raise OSError."""
        await self._link.start(
            factory=self.order.factory, config=config, record=None, beat_s=self.order.beat_s, place=share
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._wait())]

    def plug(self, relay: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        """Give the reports to this connection from now on."""
        self._reset, self._relay, self._on_end = None, relay, on_end

    def unplug(self) -> None:
        self._relay = self._on_end = None

    async def send(self, command: bytes) -> None:
        if self._link.running:
            await self._link.send(command)

    async def reset(self) -> Ready | None:
        """Reset the process. Return the model's facts if the process serves and has dropped all requests. Reports are
        dropped until the next ``plug``."""
        self.unplug()
        if self._info is None or not self._link.running:
            return None
        self._reset = asyncio.get_running_loop().create_future()
        await self._link.send(_encoder.encode(Reset(_NO_QUESTION)))
        done, _ = await asyncio.wait((self._reset,), timeout=RESET_S)
        return self._reset.result() if done else None

    async def end(self) -> None:
        """End the process at once. Idempotent."""
        self.unplug()
        if not self._link.started or not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        await self._link.kill()
        self._link.close()

    async def _read(self) -> None:
        while True:
            raw = await self._link.receive()
            if self._info is None:
                self._look(_reports.decode(raw))
            if self._reset is not None:
                self._look_for_reset(_reports.decode(raw))
            elif self._relay is not None:
                with contextlib.suppress(LinkLostError):  # the end of the connection is about to be noticed
                    self._relay(raw)

    def _look(self, report: Report) -> None:
        if isinstance(report, Progress):
            self._progress.show(report.text)
        elif isinstance(report, Ready):
            self._info = report.info
            self._progress.say(f"the engine serves {report.info.name}")
            self._on_ready()

    def _look_for_reset(self, report: Report) -> None:
        if not isinstance(report, StepReport) or self._reset is None or self._reset.done():
            return
        if any(reply.number == _NO_QUESTION for reply in report.replies):
            assert self._info is not None
            assert report.stats is not None  # weights are reported with replies
            self._reset.set_result(Ready(self._info, report.stats))

    async def _wait(self) -> None:
        reason = await self._link.wait()
        if self._on_end is not None:
            with contextlib.suppress(LinkLostError):
                self._on_end(reason)
