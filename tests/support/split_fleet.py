"""Prefill and decode on separate engines in one thread: the real placement, router, engine loops and peer stores. A
seed decides when each message between them arrives.

    placement --commands--> engine 0 (prefill) --parcels--> engine 2 (decode)
              <--reports---                    <--answers--

In each turn the seed delivers one of the messages that wait (each queue in its order), or lets an engine take a step. A
kill drops an engine, its memory and its unsent messages; another engine starts instead. The executor is the scripted
one: slots and pages hold digests, so a run that reads a wrong record finds it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.support.scripted import ScriptedExecutor, hashed_token, reference_tokens
from tests.support.workload import EOS_IDS, VOCAB_SIZE, Scenario
from weft.config import EngineConfig
from weft.costs.restore import RestorePrices
from weft.engine.engine import EngineCore
from weft.errors import EngineUnavailableError, WeftError
from weft.fleet.live_request import RequestStream
from weft.fleet.placement import Placement
from weft.handoff import Role
from weft.memory.memory import Memory
from weft.memory.prefix_store import TransferBuffers
from weft.request import Request, split_seed
from weft.router.seconds import Seconds
from weft.rpc.engine_process import EngineLoop
from weft.rpc.messages import Cancel, Command, Report, StepReport, Submit
from weft.schedule.budget import step_tokens_bound
from weft.schedule.snapshots import parse_snapshots
from weft.schedule.store_tier import StoreTier
from weft.store.inbox import FULL, Parcel
from weft.store.peer_store import NO_STORE, Outcome, PeerStore
from weft_tools.sim.replay import VirtualClock

TURNS_MAX = 60_000
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class _Flying:
    """A parcel under way; ``payload`` are the bytes that shared memory would hold."""

    sender: SimEngine
    ticket: int
    address: str
    parcel: Parcel
    payload: bytes


class SimEngine:
    """One engine process, and its client: commands and reports wait in queues."""

    def __init__(self, fleet: SplitFleet, number: int, life: int) -> None:
        self.fleet = fleet
        self.address = f"{number}/{life}"
        self.core = fleet.new_core() if fleet.new_core is not None else self._scripted()
        tier = self.core.store
        assert tier is not None
        assert isinstance(tier.store, PeerStore)
        self.peers, self.buffers = tier.store, tier.buffers
        self.peers.plug(self)
        self.reports: deque[bytes] = deque()
        events: Any = SimpleNamespace(send=self.reports.append)
        self.loop = EngineLoop(self.core, self, events)  # type: ignore[arg-type]
        self.commands: deque[bytes] = deque()
        self.answers: deque[Outcome] = deque()
        self.death: WeftError | None = None
        self.info = SimpleNamespace(sizes=self.core.sizes, peer=self.address)
        self.stats: Any = self.core.stats()
        self._replies: dict[int, asyncio.Future[None]] = {}

    def _scripted(self) -> EngineCore:
        scenario, clock = self.fleet.scenario, self.fleet.clock
        assert scenario is not None
        sizes, arena = scenario.sizes, scenario.arena
        device = ScriptedExecutor(
            arena,
            vocab_size=VOCAB_SIZE,
            rows_max=sizes.rows_max,
            max_model_len=sizes.max_model_len,
            step_tokens_bound=step_tokens_bound(sizes.step_tokens_max, sizes.rows_max),
            grid_tokens=sizes.grid_tokens,
        )
        memory = Memory(arena, cache=True)
        buffers = TransferBuffers(arena.page_bytes, arena.slot_bytes, limit_bytes=self.fleet.room_bytes)
        device.arena.transfers.buffers = buffers
        peers = PeerStore(
            NO_STORE,
            b"n" * 16,
            page_bytes=arena.page_bytes,
            state_bytes=arena.slot_bytes,
            chunk_tokens=64,
            inbox_bytes=self.fleet.room_bytes,
            clock=clock,
        )
        tier = StoreTier(peers, memory, buffers, RestorePrices(1.0), clock, exact=True, orders=peers)
        tier.link_stats = peers.link_stats
        return EngineCore(
            vocab_size=VOCAB_SIZE,
            sizes=sizes,
            memory=memory,
            executor=device,
            clock=clock,
            seed=0,
            eos_ids=EOS_IDS,
            snapshots=parse_snapshots("auto"),
            store=tier,
            pause=clock.advance,
        )

    # ------------------------------------------------------------------ as an EngineClient

    async def submit(self, request: Request) -> None:
        number = len(self._replies)
        self._replies[number] = asyncio.get_running_loop().create_future()
        self.commands.append(_encoder.encode(Submit(number, request)))
        await self._replies[number]

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.commands.append(_encoder.encode(Cancel(request_id, index)))

    def take(self, number: int) -> None:
        """Take the next report."""
        report = _reports.decode(self.reports.popleft())
        assert isinstance(report, StepReport)
        self.stats = report.stats or self.stats
        for reply in report.replies:
            future = self._replies[reply.number]
            if not future.done():
                if reply.refusal is None:
                    future.set_result(None)
                else:
                    future.set_exception(reply.refusal.as_error())
        self.fleet.placement.take(report.events)
        for request_id, reason in report.handoffs.items():
            self.fleet.placement.handed(number, request_id, reason)

    def die(self) -> None:
        self.death = EngineUnavailableError("killed")
        for future in self._replies.values():
            if not future.done():
                future.set_exception(self.death)

    # ------------------------------------------------------------------ as a Wire

    def send(self, ticket: int, address: str, parcel: Parcel, payloads: Sequence[memoryview]) -> None:
        self.fleet.flying.append(_Flying(self, ticket, address, parcel, b"".join(payloads)))

    def outcomes(self) -> list[Outcome]:
        ready, self.answers = list(self.answers), deque()
        return ready

    def close(self) -> None:
        """Close nothing, as nothing was opened."""

    # ------------------------------------------------------------------ as a process

    def obey(self) -> None:
        self.loop._obey(_commands.decode(self.commands.popleft()))

    @property
    def has_turn(self) -> bool:
        return self.core.has_work or self.peers.open or bool(self.answers) or self.core.store.is_waiting  # type: ignore[union-attr]

    def turn(self) -> None:
        if self.core.has_work:
            self.loop._report(self.loop._step())
            assert self.core.failure is None, self.core.failure
        else:
            self.core.poll_store()
        self.loop._report_when_idle()

    def check_given_back(self) -> None:
        self.core.audit()
        assert self.core.memory.usage().leases == 0, "memory is leased and no request is live"
        assert self.buffers.used_bytes == 0, "a transfer buffer was left over"
        assert not self.peers.open, "an order was left over"
        assert self.peers.inbox.held_bytes == 0, "records were left over"


class SplitFleet:
    """A fleet of engines with ``roles``. ``kill``: number of a message, and the engine that is dropped before its
    delivery. ``change``: changes bytes on the way. ``is_cut``: no parcel arrives. ``new_core``: makes an engine with a
    model instead of the scripted one. ``room_bytes``: of the transfer buffers of an engine, and of its inbox."""

    def __init__(
        self,
        scenario: Scenario | None,
        roles: Sequence[Role],
        seed: int,
        kill: tuple[int, int] | None = None,
        change: Callable[[bytes], bytes] = lambda payload: payload,
        new_core: Callable[[], EngineCore] | None = None,
        is_cut: bool = False,
        room_bytes: int = 1 << 22,
    ) -> None:
        self.is_cut, self.room_bytes = is_cut, room_bytes
        self.scenario, self.kill, self.change, self.new_core = scenario, kill, change, new_core
        self.clock = VirtualClock()
        self.messages = self.lives = 0
        self.flying: deque[_Flying] = deque()
        self._chance = Random(seed)
        self.replicas = [
            SimpleNamespace(number=number, role=role, ready=True, engine=SimEngine(self, number, 0))
            for number, role in enumerate(roles)
        ]
        router = Seconds(self.clock, always_splits=True)
        for number in range(len(roles)):
            router.joined(number)
        self.router = router
        self.placement = Placement(EngineConfig(), self.replicas, router)  # type: ignore[arg-type]

    def run(self, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
        """Return the tokens of each answer."""
        return asyncio.run(self._run(requests))

    async def _run(self, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
        stream = RequestStream([request.request_id for request in requests])
        placing = asyncio.create_task(self.placement.place(requests, stream))
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            actions = self._actions()
            if not actions and placing.done() and not self.placement._lives:
                break
            if actions:
                self._chance.choice(actions)()
            self.clock.advance(1e-4)
        await placing
        assert not self.placement._lives, "a request has no end"
        for replica in self.replicas:
            replica.engine.peers.inbox._clock = lambda: math.inf  # that of a real engine does not jump
            replica.engine.core.poll_store()
            replica.engine.check_given_back()
        answers: dict[tuple[str, int], list[int]] = {}
        for event in stream._events:
            assert event.finish_reason in (None, "stop", "length"), event
            answers.setdefault((event.request_id, event.index), []).extend(event.tokens)
        return answers

    def _actions(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        for replica in self.replicas:
            engine, number = replica.engine, replica.number
            if engine.commands:
                actions.append(self._message(engine.obey))
            if engine.reports:
                actions.append(self._message(partial(engine.take, number)))
            if engine.has_turn:
                actions.append(engine.turn)
        if self.flying:
            actions.append(self._message(self._deliver))
        return actions

    def _message(self, deliver: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            self.messages += 1
            if self.kill is not None and self.messages == self.kill[0]:
                self._die(self.kill[1])
            else:
                deliver()

        return act

    def _deliver(self) -> None:
        flying = self.flying.popleft()
        receiver = next((replica.engine for replica in self.replicas if replica.engine.address == flying.address), None)
        is_gone = receiver is None or self.is_cut
        reason = (
            "the other engine is gone"
            if is_gone
            else receiver.peers.inbox.accept(flying.parcel, memoryview(self.change(flying.payload)))
        )
        if reason == FULL:
            self.flying.appendleft(flying)  # as a link does, for some seconds
            return
        flying.sender.answers.append(Outcome(flying.ticket, reason, 1e-4))

    def _die(self, number: int) -> None:
        replica = self.replicas[number]
        replica.engine.die()
        self.flying = deque(one for one in self.flying if one.sender is not replica.engine)
        self.router.left(number)
        self.lives += 1
        replica.engine = SimEngine(self, number, self.lives)
        self.router.joined(number)
        self.placement.lost(replica)  # type: ignore[arg-type]


def expected(fleet: SplitFleet, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    """Return the answers, computed without an engine."""
    assert fleet.scenario is not None
    next_token = hashed_token(VOCAB_SIZE)
    return {
        (request.request_id, index): reference_tokens(
            request.prompt_tokens,
            request.sampling,
            seed=split_seed(request.sampling.seed or 0, index),
            eos_ids=EOS_IDS,
            max_model_len=fleet.scenario.sizes.max_model_len,
            next_token=next_token,
        )[0]
        for request in requests
        for index in range(request.sampling.n)
    }
