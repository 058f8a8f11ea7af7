"""An engine process on a joined machine, in the shape of ``EngineLink``: the client cannot tell them apart.

    EngineClient --send, receive, wait, kill--> RemoteLink --frames of the session--> agent --ipc--> engine

A link is used for one engine process, as the client above it. It ends with the process (the agent reports
why), or with its session. ``machine_lost`` tells the two apart: a lost machine uses up no restart of its
replica, and the process may still run and serve again.
"""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec

from weft.config import EngineConfig
from weft.fleet.seats import Seat, Session
from weft.rpc.engine_link import ANYWHERE, HostShare
from weft.rpc.link_frames import BodyKind
from weft.rpc.link_messages import EngineEnded, KillEngine, LinkMessage, StartEngine
from weft.rpc.messages import Command, Report
from weft.rpc.recording_target import RecordingTarget

_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)


class RemoteLink:
    """``seat``: where the agent of the machine is connected."""

    def __init__(self, seat: Seat) -> None:
        self.machine_lost = False
        self._seat = seat
        self._session: Session | None = None
        self._reports: asyncio.Queue[bytes] = asyncio.Queue()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.started = False

    @property
    def reachable(self) -> bool:
        """The machine is connected."""
        return self._seat.session is not None

    async def reached(self) -> None:
        """Waits until the machine is connected."""
        await self._seat.attached()

    @property
    def running(self) -> bool:
        return self._session is not None and not self._end.done()

    async def start(self, *, factory: str, config: EngineConfig, record: RecordingTarget | None,
                    beat_s: float, place: HostShare = ANYWHERE) -> None:
        """A recording is the affair of the server's own machine, and ``place`` that of the joined one."""
        self.started = True
        session = self._seat.session
        if session is None:
            self.lose(f"{self._seat.host} is not connected")
            return
        self._session = session
        session.begin_life(self)
        session.say(StartEngine(factory, dataclasses.asdict(config), beat_s))

    async def send(self, command: Command) -> None:
        self.post(command)

    def post(self, command: Command) -> None:
        """After the end of the link it does nothing; the end is what its waiters learn."""
        if self._session is not None and not self._end.done():
            self._session.put(BodyKind.ENGINE, _encoder.encode(command))

    async def receive(self) -> Report:
        report: Report = _reports.decode(await self._reports.get())
        return report

    async def wait(self) -> str:
        """Waits for the end of the process, and says why it ended."""
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        if self._session is not None and not self._end.done():
            self._session.say(KillEngine())
        self._finish("the engine process was ended")

    def close(self) -> None:
        if self._session is not None and self._session.link is self:
            self._session.link = None

    # ------------------------------------------------------------------ from the session

    def deliver(self, report: bytes) -> None:
        self._reports.put_nowait(report)

    def hear(self, message: LinkMessage) -> None:
        if isinstance(message, EngineEnded):
            self._finish(message.reason)

    def lose(self, reason: str) -> None:
        """The session is lost."""
        if not self._end.done():
            self.machine_lost = True
            self._finish(reason)

    def _finish(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)
