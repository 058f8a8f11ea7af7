"""Replicas on other machines: they come with an agent, pass a check, and go with it.

    Hello of a new agent --> a number, a Replica --> its engine starts --> same identity? --> takes requests
                                                                             no: refused, on both sides
    Leaving              --> drain --> dismissed, the number is free
    vanished             --> requests resume elsewhere; the seat waits AWAY_MAX_S for its machine

**Identity.** A request may begin on one replica and go on at another, so all replicas must give the same
tokens. ``ModelInfo.identity`` has what decides that: digests of weights, configuration and tokenizer, dtypes,
the longest context, and weft's version. A joined replica that differs from those that serve is refused, and
the reason names what differs. Kernels may differ (a CPU beside a GPU): their logits differ in the last bits.

Rejected: a check of names and paths (the same path has other files elsewhere); a joined replica that counts
towards --replicas (a server would not start before strangers come).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from weft.errors import ConfigError, WeftError
from weft.fleet.machines import Machines
from weft.fleet.replica import Replica
from weft.fleet.seats import Seat
from weft.rpc.client import EngineClient
from weft.rpc.link_keys import LinkKeys

AWAY_MAX_S = 600.0
"""A machine that has been away for so long is forgotten. Its agent may join again."""
LEAVING_DRAIN_S = 30.0
_LOOK_EVERY_S = 1.0
_log = logging.getLogger("weft.server")


class Hosting(Protocol):
    """What joined replicas need of their fleet."""

    @property
    def replicas(self) -> list[Replica]: ...

    def add_remote(self, seat: Seat) -> Replica: ...

    async def drain_for_good(self, replica: Replica, timeout_s: float) -> None: ...


class JoinedReplicas:
    """``address`` as ZeroMQ writes it."""

    def __init__(self, fleet: Hosting, address: str, keys: LinkKeys) -> None:
        self._fleet = fleet
        self._seats: dict[int, Seat] = {}
        self._machines = Machines(address, keys, on_join=self._on_join, on_leaving=self._on_leaving)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return self._machines.port

    def open(self) -> None:
        """Raises ConfigError that names --listen-engines."""
        self._machines.bind()
        self._spawn(self._forget_absent())

    async def close(self, reason: str) -> None:
        """Agents wait for the next server, with their engines."""
        for task in self._tasks:
            task.cancel()
        await self._machines.close(reason)

    def refuse(self, replica: Replica, error: WeftError) -> None:
        """It is dead: its agent leaves with the reason."""
        seat = self._seats.pop(replica.number, None)
        if seat is None:
            return
        _log.warning("replica %d on %s is refused: %s", replica.number, seat.host, error.message)
        self._machines.dismiss(seat, error.message, refused=True)
        self._spawn(replica.leave(error.message))

    def dismiss(self, number: int, reason: str) -> None:
        """The agent of a drained replica leaves."""
        seat = self._seats.pop(number, None)
        if seat is not None:
            self._machines.dismiss(seat, reason, drained=True)

    def _on_join(self, seat: Seat) -> int:
        replica = self._fleet.add_remote(seat)
        self._seats[replica.number] = seat
        _log.info("%s joined as replica %d%s", seat.host, replica.number,
                  f" ({seat.started_by})" if seat.started_by else "")
        return replica.number

    def _on_leaving(self, seat: Seat) -> None:
        self._spawn(self._drain(seat))

    async def _drain(self, seat: Seat) -> None:
        replica = self._fleet.replicas[seat.number]
        if replica.state == "ready" and not replica.draining:
            await self._fleet.drain_for_good(replica, LEAVING_DRAIN_S)
        self.dismiss(seat.number, "the replica was drained")
        await replica.leave(f"{seat.host} left")
        _log.info("replica %d on %s left", replica.number, seat.host)

    async def _forget_absent(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for number, seat in list(self._seats.items()):
                since_s = seat.away_since_s
                if since_s is not None and time.monotonic() - since_s > AWAY_MAX_S:
                    self.dismiss(number, "away for too long")
                    await self._fleet.replicas[number].leave(f"{seat.host} has been away for "
                                                             f"{AWAY_MAX_S:g} s")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_identity(engine: EngineClient, others: Mapping[str, str], host: str) -> None:
    """Raises ConfigError that names what differs between ``engine`` and the replicas that serve."""
    assert engine.info is not None
    own = engine.info.identity
    differing = [f"{name} is {own[name]} there and {others[name]} here"
                 for name in sorted(own.keys() & others.keys()) if own[name] != others[name]]
    if differing:
        raise ConfigError(f"the replica of {host} would give other answers: {'; '.join(differing)}")
