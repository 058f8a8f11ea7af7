"""Taking a replica out of service, and putting it back, without an error at a client.

    drain      no further requests -> wait for those in flight, at most ``timeout_s`` -> the rest resume
               elsewhere -> the process ends
    restart    the same, and a new process starts: other weights on disk, a device that was reset
    rolling    restart of each replica, one after the other

Requests that are left after the timeout are preempted and not cancelled: another engine computes their tokens
again, or the same replica after its restart. The last replica that serves is drained only for a restart.
Its requests are held meanwhile.

Rejected: a drain that waits without bound (an answer may take an hour).
"""

from __future__ import annotations

import asyncio

from weft.errors import BusyError, EngineUnavailableError, UnknownReplicaError
from weft.fleet.fleet import Fleet
from weft.fleet.replica import Replica

_LOOK_EVERY_S = 0.05


async def drain(fleet: Fleet, number: int, *, timeout_s: float, restart: bool) -> Replica:
    """Returns when the process has ended, or with ``restart`` when its successor is ready. Raises
    UnknownReplicaError; BusyError for a replica that does not serve, and for the last one that does;
    EngineUnavailableError where the new process does not start."""
    replica = find_replica(fleet, number)
    if replica.state == "dead" and restart:
        return await revive(fleet, number)
    others = any(other.ready for other in fleet.replicas if other is not replica)
    if not replica.ready:
        raise BusyError(f"replica {number} is {state_of(replica)}; only one that serves can be drained",
                        code="not_ready")
    if not others and not restart:
        raise BusyError(f"replica {number} is the last one that serves; restart it (restart=true), or stop "
                        "the server", code="last_replica")
    replica.draining = True
    waited_s = 0.0
    while fleet.requests.count_on(number) and waited_s < timeout_s and replica.state == "ready":
        await asyncio.sleep(_LOOK_EVERY_S)
        waited_s += _LOOK_EVERY_S
    if replica.state != "ready":  # it died meanwhile, and restarts by itself
        replica.draining = False
        raise BusyError(f"replica {number} died while it was drained: {replica.reason}", code="not_ready")
    await replica.retire()
    if restart:
        await revive(fleet, number)
    return replica


async def revive(fleet: Fleet, number: int) -> Replica:
    """Starts a drained or dead replica again, and returns when it is ready. Raises as ``drain``."""
    replica = find_replica(fleet, number)
    if replica.state not in ("drained", "dead"):
        raise BusyError(f"replica {number} is {state_of(replica)}; only a drained or dead one can be started",
                        code="not_drained")
    replica.revive()
    while not replica.ready:
        if replica.error is not None:
            raise EngineUnavailableError(f"replica {number} does not start: {replica.reason}")
        await asyncio.sleep(_LOOK_EVERY_S)
    return replica


async def roll(fleet: Fleet, *, timeout_s: float) -> None:
    """Restarts each replica that serves, one after the other. Raises as ``drain``."""
    for replica in fleet.replicas:
        if replica.state not in ("drained", "away", "left"):
            await drain(fleet, replica.number, timeout_s=timeout_s, restart=True)


def find_replica(fleet: Fleet, number: int) -> Replica:
    if not 0 <= number < len(fleet.replicas) or fleet.replicas[number].state == "left":
        raise UnknownReplicaError(f"there is no replica {number}; this server has 0 to "
                                  f"{len(fleet.replicas) - 1} (--replicas)", param="replica")
    return fleet.replicas[number]


def state_of(replica: Replica) -> str:
    return "draining" if replica.draining else replica.state
