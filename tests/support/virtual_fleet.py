"""A fleet of a hundred replicas in virtual time: the real Fleet, Replica, Placement, LiveRequest and router.

    arrivals --> Fleet.requests --> router --> SimulatedEngine 0 .. N-1    seconds by costs.StepCost
                     ^                             |
                     '--- events, reports <--------'   over links with a delay of their own
    faults   --> kill, stall, partition, slow link, lost report, drain, a request that kills its engine,
                 records of a prompt that do not arrive

Only the engine process is simulated. Its event loop is real too, but its clock is virtual: where it would
wait, the clock jumps (``VirtualLoop``). So a seed always gives the same run. Engines have a cache of
prefixes, which they report as real ones do. Replicas from ``own`` on are on joined machines, and one machine
brings other weights. With ``roles`` a third of them computes prompts, a third goes on with answers: records
pass between engines, and a request moves when they are there.

The checker tests these laws during the run and after the last answer: each token comes once and in order; a request
fails only if two engines died under it; no engine, table or queue has a request left; the router's tables are bounded,
and tables that are not stale agree with the caches; a prefix of one tenant or model is never used for another; engines
with other weights get nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import selectors
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from weft.config import EngineConfig
from weft.costs.step import StepCost
from weft.engine.stats import AWAKE, WeightsState
from weft.errors import BusyError, DeadlyRequestError, EngineUnavailableError, QueueFullError, WeftError
from weft.fleet import fleet as fleet_module
from weft.fleet import replica as replica_module
from weft.fleet.fleet import Fleet
from weft.fleet.placement import Placement
from weft.handoff import LinkStats, Role
from weft.prefix_digests import prefix_digests
from weft.request import Request, SamplingParams, TokenEvent
from weft.router import seconds as seconds_module
from weft.router.seconds import Seconds
from weft.router.snapshot_table import SNAPSHOTS_MAX
from weft.rpc.client import EngineClient
from weft.rpc.link import Hello
from weft.rpc.listener import Machine
from weft.rpc.messages import Follow
from weft.snapshot_report import RemovedSnapshot, ReportedSnapshot, SnapshotReport
from weft.units import PAGE_TOKENS

COST = StepCost(fixed_s=4e-3, token_s=1.5e-4, pair_s=2e-8, decode_s=4e-4, steps=100)
START_S, STALL_S, DRAIN_S, AWAY_S = 3.0, 5.0, 2.0, 4.0
ROWS, QUEUE, CACHE = 32, 64, 200
IDENTITY = {"weights": "right", "weft": "1"}
FAULTS = ("kill", "stall", "partition", "slow link", "lost reports", "drain", "poison")
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
"""Roles of the replicas in turn, with ``roles``."""
LOST_RECORDS = 0.03
"""Share of all handoffs."""
LINK = LinkStats(kv_bytes=1 << 18, state_bytes=1 << 22)


class LawBroken(AssertionError):
    """A law was broken; the message begins with the seed."""


class _NoWait(selectors.DefaultSelector):
    """A selector that advances the virtual clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is due and nobody is done: something waits for ever"
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def token_at(seed: int, position: int) -> int:
    return (seed * 31 + position * 7919) % 30_000


@dataclass(slots=True)
class _Job:
    """A request in an engine. ``left``: tokens that each of its answers still gets, from ``at`` on."""

    request: Request
    at: dict[int, int]
    cached_tokens: int = 0


class SimulatedEngine:
    """An engine with the interface of ``EngineClient``. ``cache``: of an engine that was away and is back."""

    def __init__(
        self, world: World, number: int, identity: dict[str, str], cache: OrderedDict[int, tuple[str, int]] | None
    ) -> None:
        self._world, self.number = world, number
        self.link = self
        self.machine_lost = False
        self.state = "starting"
        self.death: WeftError | None = None
        self.stats: Any = None
        self.sleep_state = AWAKE
        self.weights = WeightsState()
        world.lives += 1
        self.peer = f"{number}.{world.lives}" if world.roles else ""
        """The address at which records reach this process, and no later one."""
        self.info: Any = SimpleNamespace(
            sizes=SimpleNamespace(rows_max=ROWS, max_model_len=1 << 20), identity=identity, peer=self.peer
        )
        self.cache = cache if cache is not None else OrderedDict()
        self.jobs: dict[str, _Job] = {}
        self.is_frozen = False
        self.is_gone = False
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._free_s = self._sent_s = 0.0
        self._reports = 0
        self._follows = False
        self.is_heard = True
        """Whether the last report arrived. A lost report is noticed when the next one arrives."""

    # ------------------------------------------------------------------ as Replica and Fleet use it

    async def start(self) -> None:
        return None

    async def ready(self) -> Any:
        await asyncio.sleep(START_S)
        if self.is_gone:
            raise EngineUnavailableError("it ended at its start")
        self.state = "ready"
        link = LINK if self._world.roles else None
        self.stats = SimpleNamespace(costs=COST, running=0, waiting=0, link=link, weights=self.weights)
        self._world.peers[self.peer] = self
        return self.info

    async def lost(self) -> str:
        return await asyncio.shield(self._end)

    def detach(self) -> None:
        self.state = "detached"

    async def stop(self, reason: str) -> None:
        self.is_gone, self.state = True, "ended"
        self._world.peers.pop(self.peer, None)
        self.jobs.clear()
        if not self._end.done():
            self._end.set_result(reason)

    def post(self, command: Any) -> None:
        assert isinstance(command, Follow)
        self._follows = True
        added = [ReportedSnapshot(digest, position) for digest, (_, position) in self.cache.items()]
        self._report(added, [], is_full=True)

    async def submit(self, request: Request) -> None:
        world = self._world
        await asyncio.sleep(world.delay_s(self.number))
        while self.is_frozen and not self.is_gone:
            await asyncio.sleep(STALL_S)
        if self.is_gone:
            raise EngineUnavailableError("the engine has ended")
        if len(self.jobs) >= QUEUE:
            raise QueueFullError("the queue is full", param="limits.max_queued_requests", code="queue_full")
        assert self.info.identity == IDENTITY, "an engine of other weights got a request"
        answers = (
            request.resumption.answers
            if request.resumption is not None
            else {index: [] for index in range(request.sampling.n)}
        )
        for index, tokens in answers.items():
            assert tokens == world.answer(request, index, len(tokens)), "a resumed answer is not what it was"
        job = _Job(request, {index: len(one) for index, one in answers.items()})
        self.jobs[request.request_id] = job
        tokens = [*request.prompt_tokens, *max(answers.values(), key=len, default=[])]
        digests = prefix_digests(tokens, request.salt).tolist()
        job.cached_tokens = self._find(request, digests, len(tokens))
        now_s = world.loop.time()
        self._free_s = max(self._free_s, now_s) + COST.fixed_s + COST.prefill_s(job.cached_tokens, len(tokens))
        world.loop.call_at(self._free_s, self._admitted, job, digests)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            return
        if index is None:
            job.at.clear()
        else:
            job.at.pop(index, None)
        if not job.at:
            del self.jobs[request_id]

    # ------------------------------------------------------------------ computing

    def _find(self, request: Request, digests: list[int], length: int) -> int:
        for at in range(len(digests) - 1, -1, -1):
            held = self.cache.get(digests[at])
            if held is not None and held[1] < length:
                assert held[0] == request.salt, "a hit of another tenant or model"
                self.cache.move_to_end(digests[at])
                return held[1]
        return 0

    def _admitted(self, job: _Job, digests: list[int]) -> None:
        if not self._goes_on(job):
            return
        if job.request.request_id in self._world.poison:
            self._world.kill(self)
            return
        self._keep(job.request.salt, digests, {len(digests) - 1, len(digests) // 2})
        if job.request.handoff is not None:
            computed = len(job.request.prompt_tokens)
            wait_s = LINK.wait_s(
                job.request.handoff.start, job.cached_tokens, computed, COST.prefill_s(job.cached_tokens, computed)
            )
            self._world.loop.call_later(wait_s, self._hand, job.request, digests)
        self._decode(job, 1)

    def _keep(self, salt: str, digests: list[int], places: set[int]) -> None:
        """Keep the states at the ends of these pages in the cache from now on."""
        added, removed = [], []
        for at in places:
            if at >= 0 and digests[at] not in self.cache:
                position = (at + 1) * PAGE_TOKENS
                self.cache[digests[at]] = salt, position
                self._world.salt_is(digests[at], salt)
                added.append(ReportedSnapshot(digests[at], position))
        while len(self.cache) > CACHE:
            removed.append(RemovedSnapshot(self.cache.popitem(last=False)[0]))
        if added and self._follows:
            self._report(added, removed)

    def _hand(self, request: Request, digests: list[int]) -> None:
        """Hand the records of the prompt to the other engine; that engine may be gone, or the records may be lost."""
        world = self._world
        if self.is_gone or self.is_frozen:
            return
        assert request.handoff is not None
        other = world.peers.get(request.handoff.peer)
        reason = ""
        if (
            other is None
            or other.is_gone
            or other.is_frozen
            or self.number in world.broken
            or world.chance(LOST_RECORDS)
        ):
            reason = "the records did not arrive"
        else:
            assert other.info.identity == IDENTITY, "records went to an engine of other weights"
            other._keep(request.salt, digests, {len(digests) - 1})
        world.counts["handoffs that failed" if reason else "handoffs"] += 1
        self._send(lambda: world.fleet.requests.handed(self.number, request.request_id, reason))

    def _decode(self, job: _Job, tokens: int) -> None:
        """Decode ``tokens`` tokens for each answer of the job; half of the remaining ones follow after the time of
        these."""
        if not self._goes_on(job):
            return
        limit = job.request.sampling.max_tokens
        assert limit is not None
        events = []
        for index, at in list(job.at.items()):
            end = min(limit, at + tokens)
            job.at[index] = end
            is_last = end == limit
            events.append(
                TokenEvent(
                    job.request.request_id,
                    index,
                    [self._world.token(job.request, index, place) for place in range(at, end)],
                    job.cached_tokens,
                    finish_reason="length" if is_last else None,
                )
            )
            if is_last:
                del job.at[index]
        self._send(lambda: self._world.events(self, events))
        if not job.at:
            del self.jobs[job.request.request_id]
            return
        least = min(job.at.values())
        following = max(1, (limit - least + 1) // 2)
        step_s = COST.fixed_s + COST.decode_s * len(self.jobs)
        self._world.loop.call_later(step_s * following, self._decode, job, following)

    def _goes_on(self, job: _Job) -> bool:
        return not self.is_gone and not self.is_frozen and self.jobs.get(job.request.request_id) is job

    def _report(self, added: list[ReportedSnapshot], removed: list[RemovedSnapshot], *, is_full: bool = False) -> None:
        self._reports += 1
        self.is_heard = is_full or self.number not in self._world.deaf
        report = SnapshotReport(number=self._reports, added=added, removed=removed, is_full=is_full)
        if not self.is_heard:
            self._world.counts["reports lost"] += 1
            return
        self._send(lambda: self._world.reported(self, report))

    def _send(self, deliver: Callable[[], None]) -> None:
        """Send in order (a heap of timers is not stable), after the delay of the link."""
        world = self._world
        self._sent_s = max(self._sent_s + 1e-6, world.loop.time() + world.delay_s(self.number))
        world.loop.call_at(self._sent_s, lambda: None if self.is_gone or self.state != "ready" else deliver())


class _VirtualFleet(Fleet):
    def __init__(self, world: World, config: EngineConfig, **more: Any) -> None:
        self._world = world
        super().__init__(config, **more)

    def _engine_maker(self, number: int, machine: Machine | None) -> Callable[[int], EngineClient]:
        def new_engine(start: int) -> EngineClient:
            return cast(EngineClient, self._world.new_engine(number, machine))

        return new_engine


@dataclass(slots=True)
class World:
    """The run of one seed. ``requests`` arrive at the rate that the replicas can serve; ``fault_every``: requests
    between two faults.
    """

    seed: int
    requests: int
    replicas: int = 100
    own: int = 60
    fault_every: int = 40
    load: float = 0.5
    roles: bool = False
    """Whether replicas have the ROLES in turn: prefill and decode are split."""
    counts: Counter[str] = field(default_factory=Counter)
    poison: set[str] = field(default_factory=set)
    deaf: set[int] = field(default_factory=set)
    """Replicas whose reports are lost."""
    broken: set[int] = field(default_factory=set)
    """Replicas whose records do not arrive."""
    peers: dict[str, SimulatedEngine] = field(default_factory=dict)
    lives: int = 0
    """Engine processes so far."""
    loop: VirtualLoop = field(init=False)
    fleet: _VirtualFleet = field(init=False)
    _slow: dict[int, float] = field(default_factory=dict)
    _salts: dict[int, str] = field(default_factory=dict)
    _caches: dict[int, OrderedDict[int, tuple[str, int]]] = field(default_factory=dict)
    _deaths: Counter[str] = field(default_factory=Counter)
    _machines: dict[int, Machine] = field(default_factory=dict)
    _rng: random.Random = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _next_is_poison: bool = False
    _errors: list[BaseException] = field(default_factory=list)

    # ------------------------------------------------------------------ the run

    def run(self) -> Counter[str]:
        """Run the seed. Raise LawBroken."""
        self._rng = random.Random(self.seed)
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(
            lambda loop, context: self._errors.append(context.get("exception") or AssertionError(context["message"]))
        )
        shown = SimpleNamespace(monotonic=self.loop.time)
        log = logging.getLogger("weft.server")
        level = log.level
        log.setLevel(logging.CRITICAL)  # a restart is a line there
        try:
            with mock.patch.object(fleet_module, "time", shown), mock.patch.object(replica_module, "time", shown):
                self.loop.run_until_complete(self._run())
        except AssertionError as error:
            raise LawBroken(f"seed {self.seed}: {error}") from error
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.close()
            log.setLevel(level)
        return self.counts

    async def _run(self) -> None:
        self.fleet = _VirtualFleet(
            self,
            EngineConfig(max_queued_requests=4 * QUEUE),
            replicas=self.own,
            restarts=10**9,
            router=Seconds(self.loop.time),
            roles=[ROLES[number % len(ROLES)] for number in range(self.own)] if self.roles else (),
        )
        await self.fleet.start()
        await self.fleet.ready()
        for number in range(self.own, self.replicas):
            machine = Machine(
                Hello(
                    link_version=1,
                    weft_version="1",
                    agent=str(number),
                    attempt=1,
                    host=f"host{number}",
                    role=ROLES[number % len(ROLES)] if self.roles else "both",
                )
            )
            self._connect(machine)
            machine.number = self.fleet.add_remote(machine).number
            self._machines[machine.number] = machine
        await asyncio.sleep(2 * START_S)
        turns = _turns(self._rng, self.seed)
        apart_s = 1 / (self.load * self.replicas * 8)
        for number in range(self.requests):
            await asyncio.sleep(self._rng.expovariate(1 / apart_s))
            request = next(turns)
            if self._next_is_poison:
                self.poison.add(request.request_id)
                self._next_is_poison = False
            self._spawn(self._client(request))
            self._check_errors()
            if number % self.fault_every == self.fault_every - 1:
                self._fault(self._rng.choice((*FAULTS, "broken records") if self.roles else FAULTS))
        self.deaf.clear()
        self.broken.clear()
        self._slow.clear()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await asyncio.sleep(10 * STALL_S + 10 * START_S)
        self._check_errors()
        self._check_end()
        await self.fleet.stop("the end")
        self.counts["virtual seconds"] += round(self.loop.time())

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    def _check_errors(self) -> None:
        if self._errors:
            raise self._errors[0]

    # ------------------------------------------------------------------ clients

    async def _client(self, request: Request) -> None:
        rid = request.request_id
        self.counts["requests"] += 1
        leaves_after = self._rng.randrange(3) if self._rng.random() < 0.03 else None
        requests = self.fleet.requests
        stream = None
        try:
            stream = await requests.submit([request])
            got: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
            looks = 0
            while got:
                if leaves_after is not None and looks >= leaves_after:
                    requests.cancel(rid)
                    self.counts["left"] += 1
                    return
                looks += 1
                for event in await stream.events():
                    got[event.index] += event.tokens
                    if event.finish_reason is not None:
                        answer = got.pop(event.index)
                        right = self.answer(request, event.index, request.sampling.max_tokens or 0)
                        assert answer == right, f"{rid}: {len(answer)} tokens are not the answer"
            self.counts["answered"] += 1
            assert rid not in self.poison, "a request that kills engines was answered"
        except QueueFullError:
            self.counts["refused: the queue is full"] += 1
        except DeadlyRequestError:
            assert self._deaths[rid] > 1, f"{rid} was ended after {self._deaths[rid]} deaths"
            self.counts["ended: engines died under it"] += 1
        finally:
            if stream is not None:
                requests.close(stream)
            self._deaths.pop(rid, None)
            self.poison.discard(rid)

    def token(self, request: Request, index: int, position: int) -> int:
        assert request.sampling.seed is not None
        return token_at(request.sampling.seed + index, position)

    def answer(self, request: Request, index: int, length: int) -> list[int]:
        return [self.token(request, index, position) for position in range(length)]

    # ------------------------------------------------------------------ calls by engines

    def new_engine(self, number: int, machine: Machine | None) -> SimulatedEngine:
        is_other = machine is not None and number == self.replicas - 1
        return SimulatedEngine(
            self, number, {**IDENTITY, "weights": "other"} if is_other else IDENTITY, self._caches.pop(number, None)
        )

    def chance(self, share: float) -> bool:
        return self._rng.random() < share

    def delay_s(self, number: int) -> float:
        return self._slow.get(number, 0.001)

    def events(self, engine: SimulatedEngine, events: list[TokenEvent]) -> None:
        self.counts["events"] += len(events)
        for event in events:
            self._deaths.pop(event.request_id, None)
        self.fleet.requests.take(events)

    def reported(self, engine: SimulatedEngine, report: SnapshotReport) -> None:
        self.counts["reports"] += 1
        self.fleet._on_snapshots(engine.number, report)

    def salt_is(self, digest: int, salt: str) -> None:
        assert self._salts.setdefault(digest, salt) == salt, "one digest for two tenants"

    # ------------------------------------------------------------------ faults

    def _serving(self, *, joined: bool | None = None) -> SimulatedEngine | None:
        ready = [replica for replica in self.fleet.replicas if replica.ready]
        those = [replica.engine for replica in ready if joined in (None, replica.machine is not None)]
        if not those or len(ready) <= self.replicas // 2:
            return None
        return cast(SimulatedEngine, self._rng.choice(those))

    def _fault(self, kind: str) -> None:
        engine = self._serving(joined=True if kind == "partition" else False if kind == "drain" else None)
        if engine is None:
            return
        self.counts[f"fault: {kind}"] += 1
        if kind == "kill":
            self.kill(engine)
        elif kind == "stall":
            engine.is_frozen = True
            self.loop.call_later(STALL_S, self._end, engine, "it stalled", None)
        elif kind == "partition":
            self._caches[engine.number] = engine.cache
            self._lose_machine(engine, "the connection is lost")
        elif kind == "slow link":
            self._slow[engine.number] = self._rng.choice((0.05, 0.5, 2.0))
            self.loop.call_later(20.0, self._slow.pop, engine.number, None)
        elif kind == "lost reports":
            self.deaf.add(engine.number)
            self.loop.call_later(10.0, self.deaf.discard, engine.number)
        elif kind == "broken records":
            self.broken.add(engine.number)
            self.loop.call_later(10.0, self.broken.discard, engine.number)
        elif kind == "drain":
            self._spawn(self._drain(engine.number))
        else:
            self._next_is_poison = True

    def kill(self, engine: SimulatedEngine) -> None:
        if engine.number >= self.own:
            self._lose_machine(engine, "its machine went down")
        else:
            self._end(engine, "it was killed", EngineUnavailableError("it was killed"))

    def _end(self, engine: SimulatedEngine, reason: str, death: WeftError | None) -> None:
        if engine.is_gone or engine._end.done():
            return
        for rid in self.fleet.requests._placed[engine.number]:
            self._deaths[rid] += 1
        engine.death = death
        engine.is_gone = True
        self.peers.pop(engine.peer, None)
        engine._end.set_result(reason)

    def _lose_machine(self, engine: SimulatedEngine, reason: str) -> None:
        machine = self._machines[engine.number]
        if machine.connection is None:
            return
        engine.machine_lost = True
        machine.connection.on_end()
        self._end(engine, reason, EngineUnavailableError(reason))
        self.loop.call_later(AWAY_S, self._connect, machine)

    def _connect(self, machine: Machine) -> None:
        machine.connect(cast(Any, SimpleNamespace(on_end=lambda: None, end=lambda reason: None)))

    async def _drain(self, number: int) -> None:
        try:
            await self.fleet.drain(number, timeout_s=DRAIN_S, restart=True)
        except (BusyError, EngineUnavailableError):
            self.counts["drains refused"] += 1

    # ------------------------------------------------------------------ laws

    def _check_end(self) -> None:
        requests, router = self.fleet.requests, self.fleet.router
        assert isinstance(router, Seconds)
        for name in ("_lives", "_streams", "_acceptances", "_held", "_offers"):
            assert not getattr(requests, name), f"Placement.{name} has some left"
        assert not any(requests._placed.values()), "a replica has a request"
        assert not any(any(load) for load in requests._loads.values()), "a load is left"
        assert not router._flights, f"{len(router._flights)} requests fly in the router"
        boundaries = router._boundaries
        longest = 4096 // PAGE_TOKENS
        seen = max(len(boundaries._young), len(boundaries._old))
        assert seen <= seconds_module.SEEN_MAX + longest
        assert len(boundaries._forks) <= seconds_module.FORKS_MAX
        for number, known in router._replicas.items():
            assert not len(known.queue), f"replica {number} has prefills in the router"
            assert known.in_flight == 0, f"replica {number} has {known.in_flight} in flight in the router"
            assert router._table.snapshots_of(number) <= SNAPSHOTS_MAX
        tables: dict[int, set[int]] = {replica.number: set() for replica in self.fleet.replicas}
        for digest, holders in router._table._holders.items():
            for holder in holders:
                tables[holder.replica].add(digest)
        for replica in self.fleet.replicas:
            self._check_replica(replica, router, tables[replica.number])
        accounted = sum(
            count
            for name, count in self.counts.items()
            if name in ("answered", "left") or name.startswith(("refused", "ended"))
        )
        assert accounted == self.counts["requests"] == self.requests, f"{self.requests - accounted} are lost"

    def _check_replica(self, replica: Any, router: Seconds, known: set[int]) -> None:
        engine = cast(SimulatedEngine, replica.engine)
        if engine.info.identity != IDENTITY:
            assert replica.state == "dead", f"other weights are {replica.state}"
            return
        assert replica.state == "ready", f"replica {replica.number} is {replica.state} at the end"
        assert not engine.jobs, f"engine {replica.number} holds {len(engine.jobs)} requests"
        if engine.is_heard and not router._table.is_stale(replica.number):
            assert known == set(engine.cache), f"the router's table of replica {replica.number} is wrong"


def _turns(rng: random.Random, seed: int) -> Iterator[Request]:
    """Yield turns of conversations: a prompt begins with the one before; tenants and models share nothing."""
    systems = [[rng.randrange(30_000) for _ in range(rng.choice((32, 128, 320)))] for _ in range(12)]
    talks: list[tuple[str, list[int]]] = []
    number = 0
    while True:
        number += 1
        if len(talks) < 300 or rng.random() < 0.1:
            talks.append((f"tenant{rng.randrange(6)}/model{rng.randrange(2)}", list(rng.choice(systems))))
        at = rng.randrange(len(talks))
        salt, history = talks[at]
        prompt = [*history, *(rng.randrange(30_000) for _ in range(rng.randrange(4, 60)))]
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 4, 12, 40)), seed=number + seed * 10**6, n=2 if rng.random() < 0.05 else 1
        )
        yield Request(request_id=f"{seed}-{number}", prompt_tokens=prompt, sampling=sampling, cache_salt=salt)
        if len(prompt) > 700 or len(talks) > 400:
            talks.pop(at)
        else:
            talks[at] = salt, [*prompt, *(token_at(number, place) for place in range(8))]


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Break a law on purpose, for controls."""
    with MUTANTS[name]():
        yield


def _patched(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


_prefix_digests = prefix_digests
_handed = Placement.handed


def _ignores_failures(placement: Placement, number: int, request_id: str, reason: str) -> None:
    if not reason:
        _handed(placement, number, request_id, reason)


def _salt_ignored(tokens: Any, salt: str) -> Any:
    return _prefix_digests(tokens, "")


MUTANTS: dict[str, Callable[[], Any]] = {
    "a flight is never ended": _patched(Seconds, "ended", lambda self, request_id: None),
    "one digest for all tenants": lambda: mock.patch(f"{__name__}.prefix_digests", _salt_ignored),
    "tokens come again": lambda: mock.patch("weft.fleet.live_request.LiveRequest.resumable", lambda self: self.request),
    "records that did not arrive are waited for": _patched(Placement, "handed", _ignores_failures),
    "other weights are let in": lambda: mock.patch("weft.fleet.joined.check_identity"),
}
