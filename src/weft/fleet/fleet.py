"""The engines of one server. Requests are placed on replicas, and outlive the engines that compute them.

    Fleet ----- replicas      start, watch, replace engine processes (``replica``)
          |---- joined        replicas on other machines (``joined``)
          |---- requests      hold, place, resume (``placement``, ``live_request``)
          '---- engines       questions to all engines: cache, sleep, counters (``all_engines``)

The fleet serves once each replica of this machine has been ready; if this machine has none, once a joined replica is
ready. It dies when its last replica is dead, or when the first start of a replica of this machine fails. A fleet that
other machines can join does not die for lack of replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.errors import BusyError, EngineUnavailableError, UnknownReplicaError, WeftError
from weft.fleet.all_engines import AllEngines
from weft.fleet.placement import Placement
from weft.fleet.places import divide_machine, start_at_once
from weft.fleet.replica import Replica, first_error
from weft.handoff import Role, partner_missing
from weft.info import ModelInfo
from weft.kv_events import KvEventsConfig
from weft.router.protocol import LeastLoaded, Router
from weft.rpc.client import ASSEMBLE, STALL_AFTER_S, EngineClient, follow_snapshots
from weft.rpc.messages import ANYWHERE, HostShare, PeerKeys, RecordingTarget
from weft.snapshot_report import SnapshotReport

if TYPE_CHECKING:
    from weft.fleet.joined import JoinedReplicas
    from weft.rpc.link import LinkKeys
    from weft.rpc.listener import Machine

RESTARTS = 5
_LOOK_EVERY_S = 0.05
_log = logging.getLogger("weft.server")
_STATE_WORDS = {"dead": "dead, as its restarts are used up", "away": "away"}


class Fleet:
    """The engines of one server. ``restarts`` of each replica; ``record``: where a recording goes; ``on_progress`` gets
    the lines of the first start. ``place``: the part of the machine that its replicas divide. ``listen``: where
    machines join, and with which keys. ``roles``: of the replicas of this machine; empty: all do both, and no prompt is
    split. ``peers``: how other engines send to these engines. ``kv_events``: where the engines of this machine publish
    KV events, each at its own ports. Raises ConfigError if the machine cannot be divided (``places``)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        replicas: int = 1,
        restarts: int = RESTARTS,
        factory: str = ASSEMBLE,
        record: RecordingTarget | None = None,
        stall_after_s: float = STALL_AFTER_S,
        on_progress: Callable[[str], None] = lambda text: None,
        router: Router | None = None,
        place: HostShare = ANYWHERE,
        listen: tuple[str, LinkKeys] | None = None,
        roles: Sequence[Role] = (),
        peers: PeerKeys | None = None,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        self.death: WeftError | None = None
        self.progress = "starting the engine"
        self.info: ModelInfo | None = None
        """Facts of the first replica that was ready."""
        self.on_step_tokens: Callable[[int, list[int]], None] = lambda replica, sizes: None
        self.config = config
        self._factory = factory
        self._record = record
        self._stall_after_s = stall_after_s
        self._roles = roles
        self._shares = divide_machine(config, replicas, place) if replicas else []
        if roles:
            self.config = config = _alike(config, self._shares)
            self._shares = [dataclasses.replace(share, peers=peers) for share in self._shares]
        if kv_events is not None:
            self._shares = [
                dataclasses.replace(share, kv_events=kv_events.of_rank(rank), rank=rank)
                for rank, share in enumerate(self._shares)
            ]
        self._restarts = restarts
        self._identity: dict[str, str] = {}
        """Identity of the replica that was ready last, with which joining replicas are compared."""
        self._on_progress = on_progress
        self.router: Router = router or LeastLoaded()
        self.replicas = [self._new_replica(number) for number in range(replicas)]
        self._own_count = replicas
        self._routed: set[int] = set()
        """Replicas that the router knows."""
        self.joined = None if listen is None else _joined(self, *listen)
        self.engines = AllEngines(self.replicas)
        self.requests = Placement(config, self.replicas, self.router)
        self._opened, self._died = asyncio.Event(), asyncio.Event()

    # ------------------------------------------------------------------ the engines

    async def start(self) -> None:
        """Start the processes: all at once (``places.start_at_once``), or one after the other. ``ready`` waits for all.
        Raise ConfigError if the address for joining machines cannot be used."""
        if self.joined is not None:
            self.joined.open()
        if self.replicas:
            for replica in self.replicas if start_at_once(self.config, self._shares) else self.replicas[:1]:
                replica.start()
        else:
            self._on_progress("waiting for `weft join` of other machines")

    async def ready(self) -> ModelInfo:
        """Wait until the first start is over. Raise the error of an engine that cannot start (a UserError if the user
        can correct the cause)."""
        await self._opened.wait()
        if self.death is not None:
            raise self.death
        assert self.info is not None
        return self.info

    async def died(self) -> WeftError:
        """Wait until no engine is left, and return the reason."""
        await self._died.wait()
        assert self.death is not None
        return self.death

    async def stop(self, reason: str) -> None:
        """End the processes. Open streams fail with ``reason``. Idempotent."""
        self._die(EngineUnavailableError(reason))
        if self.joined is not None:
            await self.joined.close(reason)
        await asyncio.gather(*(replica.stop(reason) for replica in self.replicas))

    def queue_lengths(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences; held sequences count as waiting."""
        stats = [stats for _, stats in self.engines.stats()]
        waiting = sum(engine_stats.waiting for engine_stats in stats) + self.requests.held_count
        return sum(engine_stats.running for engine_stats in stats), waiting

    @property
    def weight_version(self) -> str:
        """Name that the last update gave the weights; empty for the weights of the start."""
        return self.engines.weights.version

    @property
    def weights_digest(self) -> str | None:
        """Digest of the weights of the last update; empty for the weights of the start, None if unknown."""
        return self.engines.weights.digest

    @property
    def has_several(self) -> bool:
        """Whether the fleet may have several engines, however many serve at the moment."""
        return self._own_count > 1 or self.joined is not None

    @property
    def stalled(self) -> bool:
        """Whether a stall ended the fleet."""
        return self.death is not None and any(replica.ending == "stalled" for replica in self.replicas)

    @property
    def degraded_reason(self) -> str | None:
        """Engines that do not serve, with the reasons, as a text; None if all serve."""
        if all(replica.state == "left" for replica in self.replicas):
            return "no machine has joined; requests wait for one"
        missing = [
            f"engine {replica.number} {replica.ending} ({replica.reason}) and is "
            f"{_STATE_WORDS.get(replica.state, 'restarting')}"
            for replica in self.replicas
            if replica.state not in ("ready", "drained", "left")
        ]
        return "; ".join(missing) if missing else None

    def check_alive(self) -> None:
        if self.death is not None:
            raise EngineUnavailableError(self.death.message)
        if not self._opened.is_set():
            raise EngineUnavailableError(f"the engine is starting: {self.progress}")

    def add_remote(self, machine: Machine) -> Replica:
        """Add a replica for the agent of a joined machine, under the lowest free number."""
        number = next((replica.number for replica in self.replicas if replica.state == "left"), len(self.replicas))
        replica = self._new_replica(number, machine)
        if number == len(self.replicas):
            self.replicas.append(replica)
        else:
            self.replicas[number] = replica
        replica.start()
        return replica

    # ------------------------------------------------------------------ out of service, and back

    async def drain(self, number: int, *, timeout_s: float, restart: bool) -> None:
        """Drain a replica: it gets no further requests. Requests in flight get ``timeout_s`` to finish; the rest
        resumes elsewhere, or here after the restart. Return when the process has ended, or when its successor is ready.
        The last serving replica can be drained only for a restart. Raise UnknownReplicaError; BusyError for a replica
        that does not serve; EngineUnavailableError if the new process does not start."""
        replica = self.find_replica(number)
        if replica.state == "dead" and restart:
            return await self.revive(number)
        if not replica.ready:
            raise BusyError(
                f"replica {number} is {replica.shown_state}; only one that serves can be drained", code="not_ready"
            )
        if not restart and not any(other.ready for other in self.replicas if other is not replica):
            raise BusyError(
                f"replica {number} is the last one that serves; restart it "
                f"(weft drain {number} --restart), or stop the server",
                code="last_replica",
            )
        if not await self.drain_for_good(replica, timeout_s):  # died meanwhile; restarts by itself
            replica.draining = False
            raise BusyError(f"replica {number} died while it was drained: {replica.reason}", code="not_ready")
        if restart:
            await self.revive(number)

    async def drain_for_good(self, replica: Replica, timeout_s: float) -> bool:
        """Drain a replica without a restart, even the last one, whose requests then wait for the next replica. Return
        False if the process died first."""
        replica.draining = True
        end_s = time.monotonic() + timeout_s
        while replica.state == "ready" and self.requests.count_on(replica.number) and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_EVERY_S)
        if replica.state != "ready":
            return False
        await replica.retire()
        return True

    async def revive(self, number: int) -> None:
        """Start a drained or dead replica again, and return when it is ready. Raise as ``drain``."""
        replica = self.find_replica(number)
        if replica.state not in ("drained", "dead"):
            raise BusyError(
                f"replica {number} is {replica.shown_state}; only a drained or dead one can be started",
                code="not_drained",
            )
        replica.revive()
        while not replica.ready:
            if replica.error is not None:
                raise EngineUnavailableError(f"replica {number} does not start: {replica.reason}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def roll(self, *, timeout_s: float) -> None:
        """Restart each replica that serves, one after the other. Raise as ``drain``."""
        for replica in self.replicas:
            if replica.state not in ("drained", "away", "left"):
                await self.drain(replica.number, timeout_s=timeout_s, restart=True)

    def find_replica(self, number: int) -> Replica:
        """Return the replica. Raise UnknownReplicaError."""
        if not 0 <= number < len(self.replicas) or self.replicas[number].state == "left":
            raise UnknownReplicaError(
                f"there is no replica {number}; this server has 0 to {len(self.replicas) - 1} (--replicas)",
                param="replica",
            )
        return self.replicas[number]

    # ------------------------------------------------------------------ parts

    def _new_replica(self, number: int, machine: Machine | None = None) -> Replica:
        role: Role = "both" if machine is None else machine.role
        if machine is None and self._roles:
            role = self._roles[number]
        return Replica(
            number,
            self._engine_maker(number, machine),
            self._restarts,
            machine=machine,
            role=role,
            prepare=functools.partial(self._prepare, host="" if machine is None else machine.host),
            on_ready=self._on_ready,
            on_lost=self._on_lost,
        )

    def _engine_maker(self, number: int, machine: Machine | None) -> Callable[[int], EngineClient]:
        def new_engine(start: int) -> EngineClient:
            assert machine is None or machine.connection is not None
            return EngineClient(
                self.config,
                factory=self._factory,
                place=self._shares[number] if machine is None else ANYWHERE,
                link=None if machine is None else machine.connection,
                stall_after_s=self._stall_after_s,
                record=_recording(self._record, number, start),
                on_progress=lambda text: self._on_line(number, text),
                on_events=lambda events: self.requests.take(events),
                on_step_tokens=lambda sizes: self.on_step_tokens(number, sizes),
                on_snapshots=lambda report: self._on_snapshots(number, report),
                on_handoff=lambda request_id, reason: self.requests.handed(number, request_id, reason),
            )

        return new_engine

    def _follow(self, replica: Replica) -> None:
        if self.router.wants != "nothing":
            follow_snapshots(replica.engine, pages=self.router.wants == "pages")

    def _on_snapshots(self, number: int, report: SnapshotReport) -> None:
        if self.router.reported(number, report):
            self._follow(self.replicas[number])

    def _on_line(self, number: int, text: str) -> None:
        if not self._opened.is_set():
            self.progress = text if len(self.replicas) == 1 else f"engine {number}: {text}"
            self._on_progress(self.progress)

    async def _prepare(self, engine: EngineClient, host: str) -> None:
        """Prepare a new process before it counts as ready. Raise ConfigError for a joined engine with another
        identity."""
        await self.engines.follow(engine)
        if host or (self._roles and self._identity):
            from weft.fleet.joined import check_identity, identity_with

            check_identity(engine, identity_with(self._identity, self.engines.weights), host or "this machine")

    def _on_ready(self, replica: Replica) -> None:
        info = replica.engine.info
        assert info is not None
        self.info = self.info or info
        self._identity = info.identity
        self._routed.add(replica.number)
        self.router.joined(replica.number)
        self._follow(replica)
        self._say_partner(replica)
        unstarted = next((other for other in self.replicas if not other.started), None)
        if unstarted is not None:
            unstarted.start()
        if all(other.ready for other in self.replicas[: self._own_count]):
            self._opened.set()
        self.requests.dispatch()

    def _say_partner(self, replica: Replica) -> None:
        """Log a replica whose role has no partner, once all replicas of this machine serve."""
        ready = [other for other in self.replicas if other.ready]
        missing = partner_missing([other.role for other in ready])
        has_begun = all(other.ready for other in self.replicas[: self._own_count])
        if replica.role != "both" and missing and has_begun:
            _log.warning(
                "replica %d is for %s, and no replica is for %s: it serves complete requests",
                replica.number,
                replica.role,
                missing,
            )

    def _on_lost(self, replica: Replica) -> None:
        """Hold the requests of a replica that is dead, or whose engine has ended, for another replica."""
        if replica.number in self._routed:
            self._routed.remove(replica.number)
            self.router.left(replica.number)
        if replica.error is not None and replica.machine is not None and self.joined is not None:
            self.joined.refuse(replica.machine, replica.error)
        own = self.replicas[: self._own_count]
        dead = [other for other in own if other.state == "dead"]
        if (dead and not self._opened.is_set()) or (len(dead) == len(own) and self.joined is None):
            cause = first_error(dead)
            assert cause is not None
            self._die(cause)
        self.requests.lost(replica, blamed=replica.state != "drained")

    def _die(self, error: WeftError) -> None:
        """End the fleet with ``error``; the first reason stays."""
        if self.death is None:
            self.death = error
        self.requests.close_all(self.death)
        self._opened.set()
        self._died.set()


def _joined(fleet: Fleet, address: str, keys: LinkKeys) -> JoinedReplicas:
    from weft.fleet.joined import JoinedReplicas  # only a server with --listen-engines needs this import

    return JoinedReplicas(fleet, address, keys)


def _alike(config: EngineConfig, shares: Sequence[HostShare]) -> EngineConfig:
    """Return ``config`` with handoffs, and with the same number of threads for each replica: with another number of
    threads, records have other bits."""
    cores = {len(share.cores) for share in shares}
    if config.threads is None and len(cores) > 1:
        config = dataclasses.replace(config, threads=max(1, min(cores)))
    return dataclasses.replace(config, handoffs=True)


def _recording(record: RecordingTarget | None, replica: int, start: int) -> RecordingTarget | None:
    """Return the recording file of one engine process; the first process uses the name in the flag."""
    if record is None or not (replica or start):
        return record
    file = Path(record.file)
    name = f"{file.stem}.engine{replica}.{start}{file.suffix}"
    return dataclasses.replace(record, file=str(file.with_name(name)))
