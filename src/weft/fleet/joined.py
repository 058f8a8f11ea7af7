"""Replicas on other machines: each comes with an agent, is checked, and leaves with the agent.

    Hello of a new agent --> a number, a Replica --> its engine starts --> same identity? --> takes requests
                                                                             no: refused, on both sides
    Leaving              --> drain --> dismissed, the number is free
    vanished             --> requests resume elsewhere; the replica waits AWAY_MAX_S for its machine

A request may begin on one replica and continue on another, so all replicas must generate the same tokens.
``ModelInfo.identity`` has the settings that determine the tokens: digests of weights, configuration and tokenizer,
dtypes, the longest context, and weft's version. Kernels may differ: their logits differ in the last bits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol

from weft.engine.stats import WeightsState
from weft.errors import ConfigError, WeftError
from weft.fleet.replica import Replica
from weft.rpc.client import EngineClient
from weft.rpc.link import Hello, LinkKeys
from weft.rpc.listener import AgentConnection, LinkListener, Machine
from weft.tasks import begin_task

AWAY_MAX_S = 600.0
"""Seconds of absence after which a machine is forgotten. Its agent may join again."""
LEAVING_DRAIN_S = 30.0
_LOOK_EVERY_S = 1.0
_log = logging.getLogger("weft.server")


class Hosting(Protocol):
    """Interface to the parts of a fleet that joined replicas use."""

    @property
    def replicas(self) -> list[Replica]: ...

    def add_remote(self, machine: Machine) -> Replica: ...

    async def drain_for_good(self, replica: Replica, timeout_s: float) -> bool: ...


class JoinedReplicas:
    """Replicas on other machines. ``address`` as ZeroMQ writes it."""

    def __init__(self, fleet: Hosting, address: str, keys: LinkKeys) -> None:
        self._fleet = fleet
        self._machines: dict[str, Machine] = {}
        self._listener = LinkListener(address, keys, on_hello=self._on_hello, on_leaving=self._on_leaving)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return self._listener.port

    def open(self) -> None:
        """Listen for agents. Raise ConfigError that names --listen-engines."""
        self._listener.bind()
        begin_task(self._forget_absent(), self._tasks)

    async def close(self, reason: str) -> None:
        """Close the connections. Agents keep their engines, and wait for the next server."""
        for task in self._tasks:
            task.cancel()
        await self._listener.close(reason)

    def refuse(self, machine: Machine, error: WeftError) -> None:
        """Dismiss an agent whose replica is dead, with the reason."""
        if self._machines.pop(machine.agent, None) is None:
            return
        _log.warning("replica %d on %s is refused: %s", machine.number, machine.host, error.message)
        if machine.connection is not None:
            machine.connection.dismiss(error.message, "refused")
        begin_task(self._fleet.replicas[machine.number].leave(error.message), self._tasks)

    def _on_hello(self, hello: Hello, connection: AgentConnection) -> int | None:
        machine = self._machines.get(hello.agent)
        if machine is None:
            machine = self._machines[hello.agent] = Machine(hello)
            machine.connect(connection)
            machine.number = self._fleet.add_remote(machine).number
            _log.info(
                "%s joined as replica %d%s",
                hello.host,
                machine.number,
                f" ({hello.started_by})" if hello.started_by else "",
            )
        elif hello.attempt <= machine.attempt:
            return None  # an old connection
        else:
            machine.connect(connection)
        machine.attempt = hello.attempt
        return machine.number

    def _on_leaving(self, connection: AgentConnection) -> None:
        for machine in self._machines.values():
            if machine.connection is connection:
                begin_task(self._drain(machine), self._tasks)

    async def _drain(self, machine: Machine) -> None:
        replica = self._fleet.replicas[machine.number]
        if replica.state == "ready" and not replica.draining:
            await self._fleet.drain_for_good(replica, LEAVING_DRAIN_S)
        await self._forget(machine, "the replica was drained", f"{machine.host} left")
        _log.info("replica %d on %s left", machine.number, machine.host)

    async def _forget(self, machine: Machine, to_agent: str, reason: str) -> None:
        self._machines.pop(machine.agent, None)
        if machine.connection is not None:
            machine.connection.dismiss(to_agent, "drained")
        await self._fleet.replicas[machine.number].leave(reason)

    async def _forget_absent(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for machine in list(self._machines.values()):
                if machine.connection is None and time.monotonic() - machine.away_since_s > AWAY_MAX_S:
                    await self._forget(machine, "", f"{machine.host} has been away for {AWAY_MAX_S:g} s")


def identity_with(identity: Mapping[str, str], weights: WeightsState) -> Mapping[str, str]:
    """Return ``identity`` with the digest of ``weights``, which may have replaced the weights of the start."""
    if not weights.updates or "weights" not in identity:
        return identity
    others = {name: value for name, value in identity.items() if name != "records"}
    return {**others, "weights": weights.digest[: len(identity["weights"])]}


def check_identity(engine: EngineClient, others: Mapping[str, str], host: str) -> None:
    """Raise ConfigError that names the differences between ``engine`` and the replicas that serve."""
    assert engine.info is not None
    own = identity_with(engine.info.identity, engine.weights)
    names = [name for name in sorted(own.keys() & others.keys()) if own[name] != others[name]]
    if names:
        # The digest of records covers the other fields, so a difference there says nothing more.
        differing = [
            f"{name} is {own[name]} there and {others[name]} here"
            for name in names
            if name != "records" or len(names) == 1
        ]
        raise ConfigError(f"the replica of {host} would give other answers: {'; '.join(differing)}")
