"""All engines behind one address: requests are placed on replicas, and outlive the engines that compute them.

    Fleet ----- replicas      start, watch, replace engine processes (``replica``)
          |---- requests      hold, place, resume (``placement``, ``live_request``)
          '---- engines       questions to all of them: cache, sleep, counters (``all_engines``)

The fleet serves once each replica has been ready. It dies when its last replica is dead, or when one cannot
start for the first time: all streams fail with the reason, and ``died`` says so to the server, which exits.

Rejected: resumption in the engine process (it is what died); a log of tokens on disk (the HTTP process has
them, and if it dies its clients are gone too); a second copy of each request on a standby engine (twice the
work to save a pause).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

from weft.checkpoint_report import CheckpointReport
from weft.config import EngineConfig
from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.all_engines import AllEngines
from weft.fleet.placement import Placement
from weft.fleet.places import divide_machine
from weft.fleet.replica import Replica, first_error
from weft.info import ModelInfo
from weft.router.blind import LeastLoaded
from weft.router.protocol import Router
from weft.server.client import ASSEMBLE, STALL_AFTER_S, EngineClient, follow_checkpoints
from weft.server.config import RecordingTarget

RESTARTS = 5


class Fleet:
    """``restarts`` of each replica; ``record``: where a recording goes; ``on_progress`` gets the lines of the
    first start. Raises ConfigError where the machine cannot be divided (``places``)."""

    def __init__(self, config: EngineConfig, *, replicas: int = 1, restarts: int = RESTARTS,
                 factory: str = ASSEMBLE, record: RecordingTarget | None = None,
                 stall_after_s: float = STALL_AFTER_S,
                 on_progress: Callable[[str], None] = lambda text: None,
                 router: Router | None = None) -> None:
        self.death: WeftError | None = None
        self.progress = "starting the engine"
        self.on_step_tokens: Callable[[int, list[int]], None] = lambda replica, sizes: None
        self._config = config
        self._factory = factory
        self._record = record
        self._stall_after_s = stall_after_s
        self._shares = divide_machine(config, replicas)
        self._on_progress = on_progress
        self.router: Router = router or LeastLoaded()
        self.replicas = [Replica(number, self._engine_maker(number), restarts, prepare=self._prepare,
                                 on_ready=self._on_ready, on_lost=self._on_lost)
                         for number in range(replicas)]
        self._joined: set[int] = set()
        """Replicas that the router counts on."""
        self.engines = AllEngines(self.replicas)
        self.requests = Placement(config, self.replicas, self.router)
        self._opened, self._died = asyncio.Event(), asyncio.Event()

    # ------------------------------------------------------------------ the engines

    async def start(self) -> None:
        """Starts the first process, and each other one when the one before it is ready: an engine chooses its
        memory from what the others have left. ``ready`` waits for all."""
        self.replicas[0].start()

    async def ready(self) -> ModelInfo:
        """Raises the error of an engine that cannot start (a UserError where the user can help it)."""
        await self._opened.wait()
        if self.death is not None:
            raise self.death
        info = self.info
        assert info is not None
        return info

    async def died(self) -> WeftError:
        """Waits until no engine is left, and says why."""
        await self._died.wait()
        assert self.death is not None
        return self.death

    async def stop(self, reason: str) -> None:
        """Ends the processes. Open streams fail with ``reason``. Idempotent."""
        self._die(EngineUnavailableError(reason))
        await asyncio.gather(*(replica.stop(reason) for replica in self.replicas))

    @property
    def info(self) -> ModelInfo | None:
        return next((replica.engine.info for replica in self.replicas if replica.engine.info), None)

    def queue_lengths(self) -> tuple[int, int]:
        """Sequences that run, and sequences that wait; held ones wait."""
        stats = [stats for _, stats in self.engines.stats()]
        waiting = sum(one.waiting for one in stats) + self.requests.held_count
        return sum(one.running for one in stats), waiting

    @property
    def stalled(self) -> bool:
        """The fleet died of a stall."""
        return self.death is not None and any(replica.ending == "stalled" for replica in self.replicas)

    @property
    def ailment(self) -> str | None:
        """Which engines do not serve, and why; None when all do."""
        missing = [f"engine {replica.number} {replica.ending} ({replica.reason}) and is "
                   f"{'gone' if replica.state == 'dead' else 'restarting'}"
                   for replica in self.replicas if replica.state not in ("ready", "drained")]
        return "; ".join(missing) if missing else None

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineUnavailableError(self.death.message)
        if not self._opened.is_set():
            raise EngineUnavailableError(f"the engine is starting: {self.progress}")

    def _engine_maker(self, number: int) -> Callable[[int], EngineClient]:
        def new_engine(start: int) -> EngineClient:
            return EngineClient(
                self._config, factory=self._factory, place=self._shares[number],
                stall_after_s=self._stall_after_s, record=_recording(self._record, number, start),
                on_progress=lambda text: self._on_line(number, text),
                on_event=lambda event: self.requests.take(event),
                on_step_tokens=lambda sizes: self.on_step_tokens(number, sizes),
                on_checkpoints=lambda report: self._on_checkpoints(number, report))
        return new_engine

    def _follow(self, replica: Replica) -> None:
        if self.router.wants != "nothing":
            follow_checkpoints(replica.engine, pages=self.router.wants == "pages")

    def _on_checkpoints(self, number: int, report: CheckpointReport) -> None:
        if self.router.reported(number, report):
            self._follow(self.replicas[number])

    def _on_line(self, number: int, text: str) -> None:
        if not self._opened.is_set():
            self.progress = text if len(self.replicas) == 1 else f"engine {number}: {text}"
            self._on_progress(self.progress)

    async def _prepare(self, engine: EngineClient) -> None:
        """Before a new process counts as ready."""
        await self.engines.sleep_again(engine)

    def _on_ready(self, replica: Replica) -> None:
        self._joined.add(replica.number)
        self.router.joined(replica.number)
        self._follow(replica)
        unstarted = next((other for other in self.replicas if not other.started), None)
        if unstarted is not None:
            unstarted.start()
        if all(other.ready for other in self.replicas):
            self._opened.set()
        self.requests.dispatch()

    def _on_lost(self, replica: Replica) -> None:
        """Its engine has ended, or its replica is dead: its requests are held for another one."""
        if replica.number in self._joined:
            self._joined.remove(replica.number)
            self.router.left(replica.number)
        dead = [other for other in self.replicas if other.state == "dead"]
        if len(dead) == len(self.replicas) or (dead and not self._opened.is_set()):
            cause = first_error(dead)
            assert cause is not None
            self._die(cause)
        self.requests.lost(replica, blamed=replica.state != "drained")

    def _die(self, error: WeftError) -> None:
        """The first reason stays."""
        if self.death is None:
            self.death = error
        self.requests.close_all(self.death)
        self._opened.set()
        self._died.set()


def _recording(record: RecordingTarget | None, replica: int, start: int) -> RecordingTarget | None:
    """Each engine process has a file of its own; the first has the name that was asked for."""
    if record is None or not (replica or start):
        return record
    file = Path(record.file)
    name = f"{file.stem}.engine{replica}.{start}{file.suffix}"
    return dataclasses.replace(record, file=str(file.with_name(name)))
