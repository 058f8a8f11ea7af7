"""The engine process of an agent: started as a server would start it, and plugged into one session at a time.

    plug, start(config)   Progress*, Ready, reports --> on_report    while a session is plugged in
    unplug                reports are dropped: their session is lost
    reset, plug           every request cancelled; Ready again, and what follows

A process that does not answer a reset within RESET_S is ended, and the agent starts another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from weft.config import EngineConfig
from weft.fleet.start_progress import StartProgress
from weft.info import ModelInfo
from weft.rpc.engine_link import EngineLink, HostShare
from weft.rpc.link_messages import StartEngine
from weft.rpc.messages import Progress, Ready, Report, Reset, StepReport

RESET_S = 10.0
_NO_QUESTION = -1
_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)
OnReport = Callable[[bytes], Awaitable[None]]
OnEnd = Callable[[str], Awaitable[None]]


class LocalEngine:
    """``order``: what the server wished for. ``progress`` gets the lines of a starting engine."""

    def __init__(self, order: StartEngine, share: HostShare, progress: StartProgress,
                 on_ready: Callable[[], None]) -> None:
        self.order = order
        self._share = share
        self._progress = progress
        self._on_ready = on_ready
        self._link = EngineLink()
        self._info: ModelInfo | None = None
        self._on_report: OnReport | None = None
        self._on_end: OnEnd | None = None
        self._reset: asyncio.Future[Ready] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, config: EngineConfig) -> None:
        """Raises OSError."""
        await self._link.start(factory=self.order.factory, config=config, record=None,
                               beat_s=self.order.beat_s, place=self._share)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._wait())]

    async def plug(self, on_report: OnReport, on_end: OnEnd) -> None:
        """A session gets the reports from now on; after a reset, a Ready first."""
        reset, self._reset = self._reset, None
        if reset is not None:
            await on_report(_encoder.encode(reset.result()))
        self._on_report, self._on_end = on_report, on_end

    def unplug(self) -> None:
        self._on_report = self._on_end = None

    async def send(self, command: bytes) -> None:
        if self._link.running:
            await self._link.send_raw(command)

    async def reset(self) -> bool:
        """Whether the process lives, serves, and has dropped its requests."""
        self.unplug()
        if self._info is None or not self._link.running:
            return False
        self._reset = asyncio.get_running_loop().create_future()
        await self._link.send_raw(_encoder.encode(Reset(_NO_QUESTION)))
        done, _ = await asyncio.wait((self._reset,), timeout=RESET_S)
        return bool(done)

    async def end(self) -> None:
        """At once. Idempotent."""
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
            raw = await self._link.receive_raw()
            if self._info is None:
                self._look(_reports.decode(raw))
            if self._reset is not None:
                self._look_for_reset(_reports.decode(raw))
            elif self._on_report is not None:
                await self._on_report(raw)

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
            assert report.stats is not None  # they travel with replies
            self._reset.set_result(Ready(self._info, report.stats))

    async def _wait(self) -> None:
        reason = await self._link.wait()
        if self._on_end is not None:
            await self._on_end(reason)
