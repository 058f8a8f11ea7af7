"""The HTTP process's client of one engine process: starts the process, talks to it, and notices the end.

    submit(request)             returns when the engine accepts it, raises when the engine refuses it
    on_events([TokenEvent])     the events of a report, in order, as it arrives
    cancel(request_id, index)   at any time; unknown ids are ignored
    lost()                      waits for the end of the process, or for a stall

One task reads reports. One task waits for the process to end. One task watches the heartbeat (``weft.rpc.heartbeat``).
Death has one path: ``_die(reason)`` fails every question and every later submit with EngineUnavailableError, which is a
503 with the reason. A client serves one process; the next process of the same replica gets a new client
(``weft.fleet.replica``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from weft.adapters import Adapter
from weft.config import EngineConfig
from weft.engine.stats import AWAKE, EngineStats, NamedPrefix, Part, PinState, SleepState, WeightsState
from weft.environment import engine_variables
from weft.errors import EngineUnavailableError, WeftError
from weft.host import exit_reason
from weft.info import ModelInfo
from weft.memory.usage import CacheShape
from weft.request import Request, TokenEvent
from weft.rpc import messages
from weft.rpc.child import private_folder, start_child
from weft.rpc.heartbeat import HeartMonitor
from weft.rpc.loop_socket import LoopSocket
from weft.snapshot_report import SnapshotReport
from weft.tasks import begin_task

ASSEMBLE = "weft.assemble:assemble"
STALL_AFTER_S = 10.0
_LAST_WORDS_S = 0.5
_PATIENCE_S = 5.0
_PATIENCE_WITH_STORE_S = 40.0
"""Seconds that a stopping engine with a store may take for its last writes."""

State = Literal["starting", "ready", "dead"]

_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(messages.Report)

T = TypeVar("T")


class PendingReplies:
    """Questions to the engine that have no reply yet."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._count = 0

    @contextlib.contextmanager
    def expect(self) -> Generator[tuple[int, asyncio.Future[msgspec.Raw]]]:
        """Yield a number for a new question, and the future of its reply: a value, or the error of a refusal. Replies
        after the end of the block are dropped."""
        number, self._count = self._count, self._count + 1
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, future
        finally:
            del self._futures[number]
            if future.done() and not future.cancelled():
                future.exception()  # an error that no task waits for must not cause a warning

    def resolve(self, reply: messages.Reply) -> None:
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
    """Channel to one engine process, for commands and reports in msgpack. ``started`` is true from ``start`` on, even
    if the start failed half way. ``post`` sends as ``send`` does, without waiting. ``wait`` returns the reason of the
    end. ``machine_lost``: the process may still run, on a machine that cannot be reached."""

    machine_lost: bool

    @property
    def started(self) -> bool: ...

    @property
    def running(self) -> bool: ...

    async def start(
        self,
        *,
        factory: str,
        config: EngineConfig,
        record: messages.RecordingTarget | None,
        beat_s: float,
        place: messages.HostShare,
    ) -> None: ...

    async def send(self, command: bytes) -> None: ...

    def post(self, command: bytes) -> None: ...

    async def receive(self) -> bytes: ...

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

    async def start(
        self,
        *,
        factory: str,
        config: EngineConfig,
        record: messages.RecordingTarget | None,
        beat_s: float,
        place: messages.HostShare = messages.ANYWHERE,
    ) -> None:
        self._folder = private_folder()
        context = self._context = zmq.asyncio.Context()
        self._commands = context.socket(zmq.PUSH)
        events: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PULL)
        launch = messages.Launch(
            factory=factory,
            config=dataclasses.asdict(config),
            folder=self._folder,
            record=record,
            beat_s=beat_s,
            place=place,
        )
        self._commands.bind(launch.commands_address)
        events.bind(launch.events_address)
        self._events = LoopSocket(events)
        inherited = engine_variables(os.environ, has_bucket="://" in (config.store or ""))
        try:
            self._process = await start_child(
                "weft.rpc.engine_process",
                launch,
                descriptors=() if place.memory_turn is None else (place.memory_turn,),
                environment={**inherited, "OMP_WAIT_POLICY": "passive", **place.environment},
                own_session=not place.background,
            )
        except BaseException:
            self._events.close()  # a link that has not started is never closed
            raise

    async def send(self, command: bytes) -> None:
        await self._commands.send(command)

    def post(self, command: bytes) -> None:
        begin_task(self.send(command), self._posts)

    async def receive(self) -> bytes:
        [raw] = await self._events.receive()
        return raw

    async def wait(self) -> str:
        assert self._process is not None
        return f"the engine process {exit_reason(await self._process.wait())}"

    async def kill(self) -> None:
        """Kill the process if it runs. SIGKILL also ends a stopped process."""
        assert self._process is not None
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def close(self) -> None:
        """Close the link once the process has ended."""
        for task in self._posts:
            task.cancel()
        self._events.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineClient:
    """The HTTP process's side of one engine. ``on_progress`` gets the lines of a starting engine, ``on_events`` the
    events of its sequences, ``on_step_tokens`` the sizes of its steps in tokens. ``on_snapshots`` gets changes of the
    prefix cache, once they are followed. ``on_failure`` gets the id of a request that a fleet gave up. ``on_handoff``
    gets the id of a request whose records were sent, and the reason if they were not. ``on_weights`` gets the weights
    that answer from now on. ``place``: the part of the machine for the engine. ``record``: where a recording of the
    traffic goes. ``link``: to the process (default: a child). ``heart`` measures the seconds since the last sign of
    life, and reports a stall after ``stall_after_s`` (0: never)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = ASSEMBLE,
        place: messages.HostShare = messages.ANYWHERE,
        record: messages.RecordingTarget | None = None,
        stall_after_s: float = STALL_AFTER_S,
        link: ProcessLink | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
        on_events: Callable[[list[TokenEvent]], None] = lambda events: None,
        on_step_tokens: Callable[[list[int]], None] = lambda sizes: None,
        on_snapshots: Callable[[SnapshotReport], None] = lambda report: None,
        on_failure: Callable[[str, WeftError], None] = lambda request_id, error: None,
        on_handoff: Callable[[str, str], None] = lambda request_id, reason: None,
        on_weights: Callable[[WeightsState], None] = lambda weights: None,
    ) -> None:
        self.state: State = "starting"
        self.progress = "starting the engine"
        self.death: WeftError | None = None
        self.info: ModelInfo | None = None
        self.stats: EngineStats | None = None
        self._weights = WeightsState()
        self.heart = HeartMonitor(stall_after_s)
        self.on_events = on_events
        self._on_step_tokens = on_step_tokens
        self._on_snapshots = on_snapshots
        self._on_failure = on_failure
        self._on_handoff = on_handoff
        self._on_weights = on_weights
        self._config = config
        self._factory = factory
        self._place = place
        self._record = record
        self._on_progress = on_progress
        self.link: ProcessLink = link or EngineLink()
        self._replies = PendingReplies()
        self._started, self._died, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the process; ``ready`` waits for it."""
        await self.link.start(
            factory=self._factory, config=self._config, record=self._record, beat_s=self.heart.beat_s, place=self._place
        )
        self._tasks = [asyncio.create_task(self._read_reports()), asyncio.create_task(self._wait_for_end())]

    async def ready(self) -> ModelInfo:
        """Wait until the engine is ready. Raise the engine's error if it cannot start (a UserError if the user can
        correct the cause)."""
        await self._started.wait()
        if self.death is not None:
            raise self.death
        assert self.info is not None
        return self.info

    async def died(self) -> WeftError:
        """Wait until the engine is dead, and return the reason."""
        await self._died.wait()
        assert self.death is not None
        return self.death

    async def lost(self) -> str:
        """Wait until the engine is dead or has stalled, and return the reason."""
        died, stalled = asyncio.ensure_future(self.died()), asyncio.ensure_future(self.heart.stalled())
        try:
            await asyncio.wait((died, stalled), return_when=asyncio.FIRST_COMPLETED)
            return died.result().message if died.done() else stalled.result()
        finally:
            died.cancel()
            stalled.cancel()

    def detach(self) -> None:
        """Drop events that still arrive: other engines compute the sequences from now on."""
        self.on_events = lambda events: None
        self._on_snapshots = lambda report: None
        self._on_handoff = lambda request_id, reason: None

    # ------------------------------------------------------------------ requests

    async def submit(self, request: Request) -> None:
        """Send ``request``, and return when the engine accepts it. Raise its refusal, or EngineUnavailableError."""
        await self._ask(lambda number: messages.Submit(number, request))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Cancel a request. Never waits: the command is queued."""
        if self.state == "ready":
            self.post(messages.Cancel(request_id, index))

    # ------------------------------------------------------------------ questions

    async def flush_cache(self, *, store: bool = True) -> None:
        """Drop the engine's cached prefixes, and with ``store`` the stored ones too; return when that is done. Raise
        EngineUnavailableError."""
        await self._ask(lambda number: messages.Flush(number, store))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load ``adapter``, and return when the engine has it in memory. Raise the engine's refusal, or
        EngineUnavailableError."""
        await self._ask(lambda number: messages.LoadAdapter(number, adapter))

    async def unload_adapter(self, digest: str) -> bool:
        """Drop an adapter, and return whether the engine has dropped it: an adapter of a running request is kept."""
        return await self._value(lambda number: messages.UnloadAdapter(number, digest), bool)

    async def cache_shape(self) -> CacheShape:
        """Return the contents of the prefix cache. Raise EngineUnavailableError."""
        return await self._value(messages.GetCacheShape, CacheShape)

    @property
    def sleep_state(self) -> SleepState:
        """State of sleep from the engine's last report."""
        return AWAKE if self.stats is None else self.stats.sleep

    async def sleep(self, level: int, mode: messages.SleepMode | None, timeout_s: float) -> messages.SleepOutcome:
        """Put the engine to sleep, and return when it sleeps. Raise the engine's refusal (the status of a BusyError is
        409), or EngineUnavailableError."""
        return await self._value(lambda number: messages.Sleep(number, level, mode, timeout_s), messages.SleepOutcome)

    async def wake_up(self, tags: list[Part] | None) -> messages.SleepOutcome:
        """Wake the engine, and return when the parts are back. Raise the error of waking, or EngineUnavailableError."""
        return await self._value(lambda number: messages.Wake(number, tags), messages.SleepOutcome)

    async def pin(self, named: Sequence[NamedPrefix], *, waits: bool) -> list[PinState]:
        """Name prefixes, and return their states in the engine. ``waits``: whether to wait until the states are in the
        store, or it is clear that they will not be. Raise EngineUnavailableError."""
        return await self._value(lambda number: messages.PinPrefixes(number, list(named), waits), list[PinState])

    async def unpin(self, names: Sequence[str]) -> None:
        """Forget names of prefixes. Raise EngineUnavailableError."""
        await self._ask(lambda number: messages.UnpinPrefixes(number, list(names)))

    @property
    def weights(self) -> WeightsState:
        """Weights from the engine's last report."""
        return self._weights if self.stats is None else self.stats.weights

    async def pause(self, mode: messages.PauseMode, timeout_s: float, *, flush: bool) -> messages.WeightsOutcome:
        """Pause the engine, and return when it computes no further step. Raise its refusal, or
        EngineUnavailableError."""
        return await self._value(lambda number: messages.Pause(number, mode, timeout_s, flush), messages.WeightsOutcome)

    async def resume(self) -> messages.WeightsOutcome:
        """Let the engine go on after a pause, and return when it does. Raise EngineUnavailableError."""
        return await self._value(messages.Resume, messages.WeightsOutcome)

    async def update_weights(
        self, directory: str, version: str, mode: messages.PauseMode, timeout_s: float
    ) -> messages.WeightsOutcome:
        """Replace the weights, and return when the engine answers with those in ``directory``. Raise its refusal, or
        EngineUnavailableError."""
        return await self._value(
            lambda number: messages.UpdateWeights(number, directory, version, mode, timeout_s), messages.WeightsOutcome
        )

    def post(self, command: messages.Command) -> None:
        """Send a command without waiting."""
        self.link.post(_encoder.encode(command))

    async def _value(self, question: Callable[[int], messages.Question], kind: type[T]) -> T:
        return msgspec.msgpack.decode(await self._ask(question), type=kind)

    async def _ask(self, question: Callable[[int], messages.Question]) -> msgspec.Raw:
        self.check_alive()
        with self._replies.expect() as (number, reply):
            await self.link.send(_encoder.encode(question(number)))
            return await reply

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineUnavailableError(self.death.message)
        if self.state != "ready":
            raise EngineUnavailableError(f"the engine is starting: {self.progress}")

    # ------------------------------------------------------------------ reports and the end

    async def stop(self, reason: str, patience_s: float | None = None) -> None:
        """End the process: ask, then kill after ``patience_s``, by default longer with a store to write. A process that
        has stalled is killed at once. Open questions fail with ``reason``. Idempotent, also after a failed
        ``start``."""
        if self._stopping or not self.link.started:
            return
        self._stopping = True
        if patience_s is None:
            patience_s = _PATIENCE_S if self._config.store is None else _PATIENCE_WITH_STORE_S
        can_answer = self.state == "ready" and self.link.running and self.heart.stall is None
        self._die(EngineUnavailableError(reason))
        if can_answer:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.link.send(_encoder.encode(messages.Stop())), patience_s)
                await asyncio.wait_for(self.link.wait(), patience_s)
        await self.link.kill()
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        self.link.close()

    async def _read_reports(self) -> None:
        try:
            await self._read_each()
        except msgspec.MsgspecError as error:  # reading has ended
            self._die(EngineUnavailableError(f"the engine sent a message of another version: {error}"))

    async def _read_each(self) -> None:
        while True:
            report = _reports.decode(await self.link.receive())
            self.heart.sign_of_life(report.step_s if isinstance(report, messages.Beat) else 0.0)
            if isinstance(report, messages.StepReport):
                self._take(report)
            elif isinstance(report, messages.Progress):
                self.progress = report.text
                self._on_progress(report.text)
            elif isinstance(report, messages.Ready):
                self.info, self.stats, self.state = report.info, report.stats, "ready"
                self._started.set()
                self._tasks.append(asyncio.create_task(self.heart.watch()))
            elif isinstance(report, messages.Fatal):
                self._die(_fatal_error(report))

    def _take(self, report: messages.StepReport) -> None:
        if report.weights is not None:
            self._weights = report.weights
            self._on_weights(report.weights)
        if report.stats is not None:
            self.stats = report.stats if self.death is None else _without_requests(report.stats)
        if report.step_tokens:
            self._on_step_tokens(report.step_tokens)
        for reply in report.replies:
            self._replies.resolve(reply)
        if report.events:
            self.on_events(report.events)
        if report.snapshots is not None:
            self._on_snapshots(report.snapshots)
        for request_id, refusal in report.failures.items():
            self._on_failure(request_id, refusal.as_error())
        for request_id, reason in report.handoffs.items():
            self._on_handoff(request_id, reason)

    async def _wait_for_end(self) -> None:
        reason = await self.link.wait()
        if not self._stopping and self.death is None:
            with contextlib.suppress(asyncio.TimeoutError):  # the last reports may still be on the way
                await asyncio.wait_for(self.died(), _LAST_WORDS_S)
        self._die(EngineUnavailableError(reason))
        self._ended.set()

    def _die(self, error: WeftError) -> None:
        """Fail every question and later submit with ``error``; the first reason stays."""
        if self.death is None:
            self.death, self.state = error, "dead"
            self.stats = None if self.stats is None else _without_requests(self.stats)
        self._replies.fail_all(EngineUnavailableError(self.death.message))
        self._started.set()
        self._died.set()


def follow_snapshots(client: EngineClient, *, pages: bool) -> None:
    """Ask for a full report of the engine's snapshots, then for reports of changes. Never waits."""
    if client.state == "ready":
        client.post(messages.Follow(pages))


def _without_requests(stats: EngineStats) -> EngineStats:
    """Return ``stats`` of an engine that is dead or ending, without its sequences, which other engines compute."""
    return msgspec.structs.replace(stats, running=0, waiting=0)


def _fatal_error(report: messages.Fatal) -> WeftError:
    if report.refusal is not None:
        return report.refusal.as_error()
    return EngineUnavailableError(f"the engine failed: {report.message}")
