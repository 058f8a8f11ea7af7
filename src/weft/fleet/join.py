"""``weft join``: engine processes of this machine for a server elsewhere. An agent for each replica.

    server  <== CURVE ==>  Agent  --stdin, ipc-->  engine process  (as under a server on this machine)

    connect --> session: start the engine, or reset a running one --> relay --> lost --> connect again
                                                                       |
                                      first Ctrl-C: the server drains the replica and dismisses the agent
                                      second: the engine is ended at once

The agent relays commands and reports without reading them. The engine outlives sessions: after a network cut
its requests are cancelled (they go on elsewhere), its cache stays, and it serves again. Reports of before the
reset are dropped here, late frames on the way are dropped by their epoch (``link_frames``).

The server decides the model and its configuration, ``--tp`` too: an engine starts its ranks on its own
machine. What belongs to a machine (where the model's files are, memory, device, threads, store) may be given
to `weft join`. The engines of one machine start one after the other, as each chooses its memory from what the
others left.

Exit codes: 0 drained; 2 refused (token, version, weights); 130 after the second Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import uuid
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from weft.config import EngineConfig
from weft.errors import ConfigError, WeftError
from weft.fleet.local_engine import LocalEngine
from weft.fleet.places import divide_machine
from weft.fleet.start_progress import StartProgress
from weft.rpc.link_client import DismissedError, LinkClient, LinkLostError
from weft.rpc.link_frames import BodyKind, FrameGapError
from weft.rpc.link_keys import LinkKeys
from weft.rpc.link_messages import Dismissal, EngineEnded, KillEngine, Leaving, StartEngine, decode

EXIT_DRAINED, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 2, 130
_AGAIN_S = 1.0


def join(address: str, keys: LinkKeys, own: Mapping[str, Any], replicas: int, progress: StartProgress, *,
         started_by: str = "") -> int:
    """Serves until it is dismissed or interrupted; returns the exit code. ``own``: fields of EngineConfig
    that hold on this machine instead of the server's. Call it from the main thread."""
    with asyncio.Runner() as runner:
        return runner.run(Joining(address, keys, own, replicas, progress, started_by).run())


class Joining:
    """The agents of one machine, and what signals do to them."""

    def __init__(self, address: str, keys: LinkKeys, own: Mapping[str, Any], replicas: int,
                 progress: StartProgress, started_by: str = "") -> None:
        self._context = zmq.asyncio.Context()
        divide_machine(EngineConfig(device=own.get("device", "auto")), replicas)   # refuses at once
        self._agents = [Agent(self._context, address, keys, own, (number, replicas), progress, started_by)
                        for number in range(replicas)]
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
                done, _ = await asyncio.wait({*tasks, interrupted, ready},
                                             return_when=asyncio.FIRST_COMPLETED)
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


class Agent:
    """One replica of this machine. ``place``: its number, and how many divide the machine. ``ready`` is set
    once its engine serves."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: LinkKeys, own: Mapping[str, Any],
                 place: tuple[int, int], progress: StartProgress, started_by: str = "") -> None:
        self.ready = asyncio.Event()
        self._context = context
        self._address = address
        self._keys = keys
        self._own = own
        self._place = place
        self._progress = progress
        self._started_by = started_by
        self._name = uuid.uuid4().hex
        self._attempt = 0
        self._has_joined = False
        self._said = ""
        self._engine: LocalEngine | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Once the server has drained the replica."""
        self._leaving.set()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.end()

    async def run(self) -> int:
        """Until it is dismissed; returns the exit code."""
        while True:
            client = LinkClient(self._context, self._address, self._keys)
            self._attempt += 1
            try:
                welcome = await client.greet(self._name, self._attempt, socket.gethostname(),
                                             self._started_by)
                self._has_joined = True
                self._tell(f"joined {self._where} as replica {welcome.replica}")
                await self._session(client)
            except DismissedError as error:
                if (code := _exit_code(error.dismissal)) is not None:
                    self._tell(f"{'drained' if not code else 'refused'}: {error.message}")
                    return code
                self._tell(f"{error.message}; waiting for {self._where}")
            except ConfigError as error:
                if not self._has_joined:
                    self._tell(error.message)
                    return EXIT_REFUSED
                self._tell(f"the connection to {self._where} breaks off; trying again")
            except (LinkLostError, FrameGapError) as error:
                if self._leaving.is_set():
                    return EXIT_DRAINED  # its requests go on elsewhere already
                self._tell(f"{error.message}; trying again")
            finally:
                client.close()
            await self._leaves_within(_AGAIN_S)
            if self._leaving.is_set():
                return EXIT_DRAINED

    async def _session(self, client: LinkClient) -> None:
        """Raises why it ended."""
        tasks = [asyncio.create_task(work) for work in (client.keep_alive(), self._obey(client),
                                                        self._say_farewell(client))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            if self._engine is not None:
                self._engine.unplug()

    async def _obey(self, client: LinkClient) -> None:
        """Raises DismissedError, FrameGapError."""
        while True:
            header, body = await client.receive()
            if header.kind is BodyKind.ENGINE:
                if self._engine is not None and header.life == client.life:
                    await self._engine.send(body)
                continue
            message = decode(body)
            if isinstance(message, StartEngine):
                client.life = header.life
                await self._start(client, message)
            elif isinstance(message, KillEngine) and self._engine is not None:
                await self._engine.end()
                self._engine = None
            elif isinstance(message, Dismissal):
                raise DismissedError(message)

    async def _start(self, client: LinkClient, order: StartEngine) -> None:
        life = client.life

        async def on_report(raw: bytes) -> None:
            if client.life == life:
                await client.put(BodyKind.ENGINE, raw)

        async def on_end(reason: str) -> None:
            if client.life == life:
                await client.say(EngineEnded(reason))

        if self._engine is not None and self._engine.order == order and await self._engine.reset():
            await self._engine.plug(on_report, on_end)
            return
        if self._engine is not None:
            await self._engine.end()
            self._engine = None
        try:
            config = EngineConfig(**{**order.config, **self._own})
            number, replicas = self._place
            share = divide_machine(config, replicas)[number]
            self._engine = LocalEngine(order, share, self._progress, self.ready.set)
            await self._engine.plug(on_report, on_end)
            await self._engine.start(config)
        except (WeftError, TypeError, OSError) as error:
            await client.say(EngineEnded(f"cannot start an engine: {error}"))

    async def _say_farewell(self, client: LinkClient) -> None:
        await self._leaving.wait()
        self._tell("draining: requests finish or resume elsewhere; Ctrl-C again stops at once")
        await client.say(Leaving())

    async def _leaves_within(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._progress.say(text)

    @property
    def _where(self) -> str:
        return self._address.removeprefix("tcp://")


def _exit_code(dismissal: Dismissal) -> int | None:
    """None for an agent that waits for the next server."""
    if dismissal.refused:
        return EXIT_REFUSED
    return EXIT_DRAINED if dismissal.drained else None
