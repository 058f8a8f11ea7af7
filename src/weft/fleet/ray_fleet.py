"""Replicas that Ray places: the server's side of the placer process, and the wanted number of replicas.

    Scaler --target--> placer process --Ray--> members on nodes --join--> replicas of the fleet
       ^                                                                        |
       '------------------- waiting, admitted, ready ---------------------------'

A placer that ends is started again after a growing delay. Its members end with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections import deque
from dataclasses import dataclass

from weft.fleet.fleet import Fleet
from weft.fleet.ray_placer import PlacerOrder
from weft.fleet.replica import Lives
from weft.host import exit_reason

_LOOK_S = 1.0
_END_S = 10.0
_log = logging.getLogger("weft.server")


class RayFleet:
    """The server's side of replicas that Ray places. ``order``: for the placer, without the server's port if that is
    chosen at the start."""

    def __init__(self, fleet: Fleet, order: PlacerOrder, least: int, most: int) -> None:
        self.scaler = Scaler(least, most)
        self._fleet = fleet
        self._order = order
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the placer once the fleet listens for engines."""
        assert self._fleet.joined is not None
        host = self._order.server.rpartition(":")[0]
        self._order = dataclasses.replace(self._order, server=f"{host}:{self._fleet.joined.port}")
        self._tasks = [asyncio.create_task(self._keep_placer()), asyncio.create_task(self._scale())]

    async def stop(self) -> None:
        """Stop the placer; the members end with it."""
        for task in self._tasks:
            task.cancel()
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()

    async def _keep_placer(self) -> None:
        lives = Lives()
        while True:
            began_s = time.monotonic()
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "weft.fleet.ray_placer",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "RAY_DEDUP_LOGS": "0"},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(dataclasses.asdict(self._order)).encode() + b"\n")
            self._tell()
            async for line in process.stdout:
                _log.info("ray: %s", line.decode(errors="replace").rstrip())
            code = await process.wait()
            delay_s = max(1.0, lives.end(time.monotonic() - began_s))
            _log.warning("the placer of Ray %s; another starts in %g s", exit_reason(code), delay_s)
            await asyncio.sleep(delay_s)

    async def _scale(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            before = self.scaler.target
            if self.scaler.look(time.monotonic(), self._load()) != before:
                _log.info(
                    "%.1f s of queued work: %d replicas instead of %d", self.scaler.queued_s, self.scaler.target, before
                )
                self._tell()

    def _tell(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            process.stdin.write(json.dumps({"target": self.scaler.target}).encode() + b"\n")

    def _load(self) -> FleetLoad:
        running, waiting = self._fleet.queue_lengths()
        ready = [replica for replica in self._fleet.replicas if replica.ready]
        rows = [replica.engine.info.sizes.rows_max for replica in ready if replica.engine.info is not None]
        return FleetLoad(
            running,
            waiting,
            self._fleet.requests.admitted_count,
            len(ready),
            max(0, self.scaler.target - len(ready)),
            min(rows, default=1),
        )


GROW_AT_S = 5.0
IDLE_S = 120.0
RATE_S = 30.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The load of a fleet. ``admitted``: sequences since the start. ``ready``, ``starting``: numbers of replicas;
    ``rows``: sequences that a replica runs at once."""

    running: int
    waiting: int
    admitted: int
    ready: int
    starting: int
    rows: int


class Scaler:
    """A policy for the number of replicas, between ``least`` and ``most``. Pure: no clock and no I/O.

    waiting sequences / sequences admitted a second   = seconds of queued work
    above GROW_AT_S, and no replica is starting       -> one more
    an empty queue, and the others have room          -> one less after IDLE_S
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self.target = least
        self.queued_s = 0.0
        """Seconds of queued work, at the last call of ``look``."""
        self._looks: deque[tuple[float, int]] = deque()
        self._waiting_since_s: float | None = None
        self._roomy_since_s: float | None = None

    def look(self, now_s: float, load: FleetLoad) -> int:
        """Return the wanted number of replicas."""
        self._note(now_s, load)
        if self.queued_s > GROW_AT_S and not load.starting and load.ready >= self.target:
            self.target = min(self._most, self.target + 1)
        others_have_room = load.running <= load.rows * (self.target - 1)
        if load.waiting or load.starting or not others_have_room:
            self._roomy_since_s = None
        elif self._roomy_since_s is None:
            self._roomy_since_s = now_s
        elif now_s - self._roomy_since_s >= IDLE_S:
            self.target = max(self._least, self.target - 1)
            self._roomy_since_s = None
        return self.target

    def _note(self, now_s: float, load: FleetLoad) -> None:
        self._looks.append((now_s, load.admitted))
        while now_s - self._looks[0][0] > RATE_S:
            self._looks.popleft()
        if not load.waiting:
            self._waiting_since_s, self.queued_s = None, 0.0
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        waited_s = now_s - self._waiting_since_s
        self.queued_s = load.waiting * (last_s - first_s) / (last - first) if last > first else waited_s
