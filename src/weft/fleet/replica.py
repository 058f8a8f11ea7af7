"""One replica: a place for an engine process, which is started, watched, and replaced when it dies.

    starting --Ready--> ready --died, stalled--> waiting (backoff) --> starting --> ...
                          |                         |
                          |                         '-- restarts used up --> dead
                          |--retire--> drained --revive--> starting        a dead one too
                          '--its machine vanished--> away --machine is back--> starting

The first process of a replica must start; if it fails, the server fails with that error. Later processes get
``restarts`` attempts; after FORGIVEN_AFTER_S of service the count begins again. The first restart is immediate. While
engines live shorter than SHORT_LIFE_S, the delay doubles up to BACKOFF_MAX_S. A stalled process is ended too: if it
recovered, it would send tokens twice. A lost machine uses up no restart, since its process may serve again. A replica
has *left* once its agent was dismissed; the number is then free.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from weft.errors import EngineUnavailableError, UserError, WeftError
from weft.handoff import Role
from weft.rpc.client import EngineClient

if TYPE_CHECKING:
    from weft.rpc.listener import Machine

ReplicaState = Literal["starting", "ready", "waiting", "away", "drained", "dead", "left"]
Ending = Literal["died", "stalled"]

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 30.0
SHORT_LIFE_S = 5.0
FORGIVEN_AFTER_S = 600.0
FILES_RETRY_S = 1.0
_log = logging.getLogger("weft.server")


class Lives:
    """The lives of a process that is started again when it ends. After short ones it has to wait."""

    def __init__(self) -> None:
        self._short = 0
        """Short lives in a row."""

    def end(self, seconds: float) -> float:
        """Note a life of ``seconds``, and return the seconds before the next start."""
        self._short = self._short + 1 if seconds < SHORT_LIFE_S else 0
        return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (self._short - 1)) if self._short else 0.0


class Replica:
    """A place for one engine process at a time. ``new_engine(start)`` makes the client of a process, numbered from 0.
    ``prepare`` is called when a process has started, before the replica is ready. ``on_lost`` comes before a process is
    killed. ``machine``: the joined machine of the replica; None for the server's own. ``role``: the kind of requests
    that the router prefers for it."""

    def __init__(
        self,
        number: int,
        new_engine: Callable[[int], EngineClient],
        restarts: int,
        *,
        prepare: Callable[[EngineClient], Awaitable[None]],
        on_ready: Callable[[Replica], None],
        on_lost: Callable[[Replica], None],
        machine: Machine | None = None,
        role: Role = "both",
    ) -> None:
        self.number = number
        self.role: Role = role
        self.machine = machine
        self.host = "" if machine is None else machine.host
        self.state: ReplicaState = "starting"
        self.engine = new_engine(0)
        self.restart_count = 0
        """Processes that were started after the first, for the metrics."""
        self.reason = ""
        """Reason for the end of the last process."""
        self.ending: Ending = "died"
        self.error: WeftError | None = None
        """Error of a replica that is dead."""
        self._new_engine = new_engine
        self._restarts = restarts
        self._restarts_used = 0
        self._lacks_files = False
        """Whether the last start failed for lack of a free descriptor in this process, not because of the engine."""
        self._lives = Lives()
        self._ever_ready = False
        self._starts = 0
        """Number of starts, failed ones included."""
        self.draining = False
        """Whether the replica gets no further requests."""
        self._prepare = prepare
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the replica serves and takes requests."""
        return self.state == "ready" and self.engine.death is None and not self.draining

    @property
    def shown_state(self) -> str:
        return "draining" if self.draining else self.state

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def stop(self, reason: str) -> None:
        """End the process, and start no other one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self.state != "dead":
            self.state, self.error = "dead", EngineUnavailableError(reason)
        await self.engine.stop(reason)

    async def leave(self, reason: str) -> None:
        """Stop for good: the number may go to another replica."""
        await self.stop(reason)
        self.reason, self.state = reason, "left"

    async def retire(self) -> None:
        """End the process on the operator's request: its requests resume elsewhere, and no attempt is used up. The
        replica must be ready or draining."""
        assert self._task is not None
        assert self.state == "ready"
        self._task.cancel()
        await asyncio.wait((self._task,))
        self.state, self.draining = "drained", False
        self.engine.detach()
        self._on_lost(self)
        await self.engine.stop("the replica was drained")

    def revive(self) -> None:
        """Start a process on a drained or dead replica, with all attempts available again."""
        assert self.state in ("drained", "dead")
        self.error, self._restarts_used, self._lives = None, 0, Lives()
        self.state = "starting"
        self.start()

    async def _next_engine(self) -> None:
        """Take a new client for the next process; the first process has the one of the constructor."""
        if self.machine is not None and self.machine.connection is None:
            self.state = "away"
            await self.machine.connected()
        if self._starts:
            self.engine = self._new_engine(self._starts)
        self._starts += 1
        self.state = "starting"

    async def _live(self) -> None:
        while True:
            await self._next_engine()
            served_s = await self._one_life()
            if self.state == "dead":
                return
            if self.engine.link.machine_lost:
                _log.warning("engine %d on %s is away: %s", self.number, self.host, self.reason)
                continue
            if self._lacks_files:
                _log.warning(
                    "engine %d cannot start: %s; no attempt is used up, and the next one is in %g s",
                    self.number,
                    self.reason,
                    FILES_RETRY_S,
                )
                await asyncio.sleep(FILES_RETRY_S)
                continue
            if served_s >= FORGIVEN_AFTER_S:
                self._restarts_used = 0
            delay_s = self._lives.end(served_s)
            if self._restarts_used == self._restarts:
                _log.error(
                    "engine %d %s: %s; dead, as its restarts are used up (limits.restarts is %d)",
                    self.number,
                    self.ending,
                    self.reason,
                    self._restarts,
                )
                self._end(EngineUnavailableError(self.reason))
                return
            self._restarts_used += 1
            self.restart_count += 1
            _log.warning(
                "engine %d %s: %s; restart %d of %d%s",
                self.number,
                self.ending,
                self.reason,
                self._restarts_used,
                self._restarts,
                f" in {delay_s:g} s" if delay_s else "",
            )
            await asyncio.sleep(delay_s)

    async def _one_life(self) -> float:
        """Run one process to its end, and return the seconds that it served."""
        engine, ready_s = self.engine, time.monotonic()
        self._lacks_files = False
        try:
            await engine.start()
            await engine.ready()
            await self._prepare(engine)
        except Exception as error:  # any error, since the fleet waits for this replica
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            said = error if isinstance(error, WeftError) else WeftError(f"cannot start an engine: {kind}{error}")
            self.reason, self.ending = said.message, "died"
            self._lacks_files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            if not self._ever_ready and not engine.link.machine_lost:
                self._end(said)
            else:
                self.state = "waiting"
            await engine.stop(self.reason)
            return 0.0
        self._ever_ready = True
        ready_s, self.state = time.monotonic(), "ready"
        self._on_ready(self)
        self.reason = await engine.lost()
        self.ending = "died" if engine.death is not None else "stalled"
        self.state = "waiting"
        engine.detach()
        self._on_lost(self)
        await engine.stop(self.reason)
        return time.monotonic() - ready_s

    def _end(self, error: WeftError) -> None:
        self.state, self.error = "dead", error
        self._on_lost(self)


def first_error(replicas: list[Replica]) -> WeftError | None:
    """Return the error of a dead replica, preferably one that the user can correct."""
    errors = [replica.error for replica in replicas if replica.error is not None]
    return next((error for error in errors if isinstance(error, UserError)), errors[0] if errors else None)
