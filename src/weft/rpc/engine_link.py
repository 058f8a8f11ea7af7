"""The engine process as the HTTP process sees it: a child, two sockets, and questions that wait for replies.

    ProcessLink       what a client needs of a process, wherever it runs
    EngineLink        a child of this process: starts it, sends commands, receives reports, kills
    PendingReplies    one dict: number of a question -> the future of its reply
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import signal
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from weft.config import EngineConfig
from weft.errors import WeftError
from weft.rpc.child import private_folder, start_child
from weft.rpc.loop_socket import LoopSocket
from weft.rpc.messages import Command, Launch, RecordingTarget, Reply, Report

_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)


@dataclass(frozen=True, slots=True)
class HostShare:
    """The part of this machine that an engine may use. ``cores``: the numbers of its cores, empty for all.
    ``ram_share``: engines that divide the free RAM. ``environment``: variables besides those of this
    process, such as CUDA_VISIBLE_DEVICES. ``memory_turn``: the descriptor of a file that they lock in turn
    while they choose their memory."""

    cores: tuple[int, ...] = ()
    ram_share: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_turn: int | None = None


ANYWHERE = HostShare()


class PendingReplies:
    """Questions to the engine that have no reply yet."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._count = 0

    @contextlib.contextmanager
    def expect(self) -> Generator[tuple[int, asyncio.Future[msgspec.Raw]]]:
        """A number for a new question, and the future of its reply: a value, or the error of a refusal. A
        reply that comes after the block is dropped."""
        number, self._count = self._count, self._count + 1
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, future
        finally:
            del self._futures[number]
            if future.done() and not future.cancelled():
                future.exception()  # so that an error that is not waited for any more is no warning

    def resolve(self, reply: Reply) -> None:
        future = self._futures.get(reply.number)
        if future is None or future.done():
            return
        if reply.refusal is not None:
            future.set_exception(reply.refusal.as_error())
        else:
            future.set_result(reply.value)

    def fail_all(self, error: WeftError) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)


class ProcessLink(Protocol):
    """One engine process. ``started`` is true from ``start`` on, also when it failed half way.
    ``machine_lost``: the process may still run, on a machine that cannot be reached."""

    machine_lost: bool

    @property
    def started(self) -> bool: ...

    @property
    def running(self) -> bool: ...

    async def start(self, *, factory: str, config: EngineConfig, record: RecordingTarget | None,
                    beat_s: float, place: HostShare) -> None: ...

    async def send(self, command: Command) -> None: ...

    def post(self, command: Command) -> None: ...

    async def receive(self) -> Report: ...

    async def wait(self) -> str: ...

    async def kill(self) -> None: ...

    def close(self) -> None: ...


class EngineLink:
    """A ``ProcessLink`` to a child on this machine."""

    machine_lost = False

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._posts: set[asyncio.Task[None]] = set()

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, factory: str, config: EngineConfig, record: RecordingTarget | None,
                    beat_s: float, place: HostShare = ANYWHERE) -> None:
        self._folder = private_folder()
        context = self._context = zmq.asyncio.Context()
        self._commands = context.socket(zmq.PUSH)
        events: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PULL)
        launch = Launch(factory=factory, config=dataclasses.asdict(config), folder=self._folder,
                        record=record, beat_s=beat_s, cores=place.cores, ram_share=place.ram_share,
                        memory_turn=place.memory_turn)
        self._commands.bind(launch.commands_address)
        events.bind(launch.events_address)
        self._events = LoopSocket(events)
        try:
            self._process = await start_child(
                "weft.rpc.engine_process", launch,
                descriptors=() if place.memory_turn is None else (place.memory_turn,),
                environment={"OMP_WAIT_POLICY": "passive", **place.environment})
        except BaseException:
            self._events.close()  # nothing closes a link that has not started
            raise

    async def send(self, command: Command) -> None:
        await self.send_raw(_encoder.encode(command))

    def post(self, command: Command) -> None:
        """``send`` without waiting."""
        task = asyncio.get_running_loop().create_task(self.send(command))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def receive(self) -> Report:
        report: Report = _reports.decode(await self.receive_raw())
        return report

    async def receive_raw(self) -> bytes:
        """The next report in msgpack."""
        [raw] = await self._events.receive()
        return raw

    async def send_raw(self, command: bytes) -> None:
        """A command in msgpack."""
        await self._commands.send(command)

    async def wait(self) -> str:
        """Waits for the end of the process, and says why it ended."""
        assert self._process is not None
        return exit_reason(await self._process.wait())

    async def kill(self) -> None:
        """Ends the process if it runs. SIGKILL also ends a process that is stopped."""
        assert self._process is not None
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def close(self) -> None:
        """Once the process has ended."""
        for task in self._posts:
            task.cancel()
        self._events.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def exit_reason(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"the engine process was ended by {name}{hint}"
