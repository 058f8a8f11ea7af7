"""A trace through several replicas and the real router, on one virtual clock: ``weft simulate --replicas``.

    arrivals  -->  router.choose  -->  player 0   its own memory, scheduler and clock  (``replay``)
                        ^              player 1
                        |              ...
                        '-- reports of snapshots, first tokens, ends

The router is the code of ``weft serve``. Each player steps until its clock reaches the next arrival. The router learns
of a step only when it has ended: news of all players wait in one queue by time. A request is placed at its arrival,
with the knowledge that the router has then.

**Deaths.** ``Kill(replica, at_s)`` ends an engine. The requests go to other engines with the tokens so far, and start
their prefill again, as in ``weft.fleet``. A new engine with an empty cache joins ``restart_s`` later. While no replica
serves, requests are held.

**Roles.** A prompt that the router splits is computed on one player, whose chunks wait for its link (``handoffs``).
Once the last chunk has arrived, the request continues at another player. Players with roles are stepped in the order of
their clocks, so that no player is ahead of arriving records.

The *load* of a replica is the number of tokens that it computed; cached tokens cost nothing. Times count from the
arrival of a request to its first token, through deaths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from weft.config import Sizes
from weft.costs.fit import StepMeter
from weft.costs.step import CostModel, Work
from weft.handoff import Role
from weft.memory.frames.plan import ArenaPlan
from weft.router.protocol import ReplicaLoad, Route, RoutedRequest, Router
from weft.schedule.plan import StepPlan
from weft.schedule.snapshots import on_grid
from weft.snapshot_report import SnapshotReport
from weft.store.inbox import ROOM_S
from weft.units import PAGE_TOKENS, ceil_div
from weft_tools.sim.arms import Arm, find_arm
from weft_tools.sim.handoffs import LinkModel, VirtualLink
from weft_tools.sim.replay import OnProgress, Played, PlayedTimes, Player, VirtualClock, sizes_for
from weft_tools.sim.report import Percentiles, Timeline
from weft_tools.sim.routers import make_router
from weft_tools.sim.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PlayedReplica:
    """Totals of one replica, over all its engines. ``requests``: placed there."""

    requests: int
    computed_tokens: int
    busy_s: float
    evicted_states: int


@dataclass(frozen=True, slots=True)
class FleetReplayReport:
    """The result of a replay. ``predicted_tokens``: cached tokens that the router expected, 0 for a router without
    predictions; ``admitted_tokens``: cached tokens that engines had for the same requests. ``resumes``: requests that
    went to another engine after a death. ``gaps``: seconds between two tokens of an answer. ``splits``: requests whose
    prompt and answer were computed by different replicas; ``sent_bytes``: of their records."""

    router: str
    replicas: tuple[PlayedReplica, ...]
    memory_bytes: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    predicted_tokens: int
    admitted_tokens: int
    kills: int
    resumes: int
    ttft: Percentiles
    tpot: Percentiles
    gaps: Percentiles
    splits: int
    sent_bytes: int
    virtual_s: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def load_max_share(self) -> float:
        loads = [replica.computed_tokens for replica in self.replicas]
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    @property
    def digest(self) -> str:
        """Digest that is equal for equal runs."""
        return self.timeline.digest()

    def to_json(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if name != "timeline"}
        return {**numbers, "hit_rate": self.hit_rate, "load_max_share": self.load_max_share, "hash": self.digest}


RESTART_S = 30.0
_NEVER = float("inf")
_PROGRESS_EVERY = 16


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of the engine of ``replica`` at ``at_s``."""

    replica: int
    at_s: float


@dataclass(slots=True)
class _News:
    """Result of one step of a player. ``admitted``: requests with a first token, and the tokens of each that were
    cached. ``ended``: requests. ``report``: snapshots. ``moved``: a request whose records have arrived."""

    player: _ReplicaPlayer
    admitted: list[tuple[int, int]]
    ended: list[int]
    report: SnapshotReport | None
    moved: int | None = None


@dataclass(slots=True)
class _Order:
    """A prompt that this player computes for the replica ``decode``, which has ``start`` tokens of it. ``sent``: end of
    the last parcel, which arrives at ``arrives_s``."""

    decode: int
    start: int
    sent: int
    arrives_s: float = 0.0


_AGAIN_S = 0.02
"""Seconds after which a sender asks a full receiver again."""
_ORDER_S = 1e-3
"""Difference of two players' clocks, seconds, below which they may step in any order."""


class _ReplicaPlayer(Player):
    """One engine. ``on_news`` gets the time at which a step ended, and its news."""

    def __init__(self, fleet: _FleetReplay, number: int, now_s: float) -> None:
        super().__init__(
            fleet.traffic,
            fleet.plan,
            fleet.cost,
            fleet.arm,
            fleet.sizes,
            jump=True,
            on_progress=None,
            times=fleet.times,
            link=fleet.link,
        )
        self.number = number
        self.orders: dict[int, _Order] = {}
        """Requests whose prompt is computed here for another replica."""
        self._wire = None if fleet.link is None else VirtualLink(fleet.link)
        self.meter = StepMeter()
        self.seqs: dict[int, Played] = {}
        """Requests placed here that the router knows of."""
        self.clock.advance_to(now_s)
        self._next_s = _NEVER
        self._cached: dict[int, int] = {}
        self._ended: list[int] = []
        self._follower = None
        if fleet.router.wants != "nothing":
            self._follower = self.memory.follow_snapshots(pages=fleet.router.wants == "pages")

    def full_report(self) -> SnapshotReport | None:
        return None if self._follower is None else self._follower.full_report()

    @property
    def sent_bytes(self) -> int:
        return 0 if self._wire is None else self._wire.sent_bytes

    def take(self, index: int, answered: int, route: Route, now_s: float) -> None:
        """Take request ``index`` with ``answered`` tokens of its answer."""
        if not self.scheduler.has_work:
            self.clock.advance_to(now_s)
        request, boundaries = self._traffic.requests[index], route.boundaries
        if route.decode is not None and self.link is not None:
            start = route.decode_tokens - route.decode_tokens % PAGE_TOKENS
            self.orders[index] = _Order(route.decode, start, start)
            stats = self.link.stats(self.memory.plan.arena_bytes)
            compute_s = self._cost.prefill_s(start, request.prompt_tokens)
            boundaries = (*boundaries, *stats.chunk_ends(start, request.prompt_tokens, compute_s))
        seq = self.seqs[index] = self._live[index] = Played(index, self._traffic, boundaries)
        seq.answered = answered
        if index in self.orders:
            seq.target = 1
        if request.cancelled_at_s is not None and not request.output_tokens:
            self._cancels[index] = request.cancelled_at_s
        self.scheduler.submit(seq)

    def next_news(self, at_s: float, until_s: float = _NEVER) -> tuple[float, _News] | None:
        """Run one step (or a jump up to ``until_s``), if the player has work and its clock is before ``at_s``, and
        return its time and news."""
        if not self.scheduler.has_work or self.clock() >= at_s:
            return None
        self._next_s = min(at_s, until_s)
        if self.tier is not None:
            self.tier.poll()
        for index in [index for index, due_s in self._cancels.items() if due_s <= self.clock()]:
            self._end(self._live[index])
        self._step()
        ended, self._ended = self._ended, []
        admitted = [index for index in self._cached if not np.isnan(self._times.first[index]) or index in ended]
        news = _News(
            self,
            [(index, self._cached.pop(index)) for index in admitted],
            ended,
            None if self._follower is None else self._follower.take(),
        )
        return self.clock(), news

    def _end(self, seq: Played) -> None:
        super()._end(seq)
        self._ended.append(seq.index)

    def _due_s(self) -> float:
        return min([self._next_s, self._store_due_s(), *self._cancels.values()])

    def _count(self, plan: StepPlan, work: Work) -> None:
        began_s = self.clock()
        super()._count(plan, work)
        if not plan.verify_count:
            self.meter.stepped(plan.step, work, self.clock() - began_s)

    def _settle(self, plan: StepPlan) -> bool:
        if self.orders:
            for run in range(plan.decode_count, plan.run_count):
                seq = self._live[plan.seqs[run]]
                if seq.index in self.orders:
                    self._send(seq, int(plan.starts[run] + plan.lengths[run]))
        return super()._settle(plan)

    def _send(self, seq: Played, computed: int) -> None:
        """Send complete chunks, or the rest of a prompt. The device copies them to its host first."""
        order, link = self.orders[seq.index], self.link
        assert link is not None
        assert self._wire is not None
        is_last = computed >= seq.prompt.size
        end = int(seq.prompt.size) if is_last else on_grid(computed, link.chunk_tokens)
        if end > order.sent:
            self.clock.advance(
                link.copy_s(ceil_div(end - order.sent, PAGE_TOKENS) * link.page_bytes + link.state_bytes)
            )
            order.arrives_s = self._wire.send(order.sent, end, self.clock())
            order.sent = end

    def _note_began(self, plan: StepPlan) -> None:
        super()._note_began(plan)
        for run, admission in enumerate(plan.admissions, start=plan.run_count - len(plan.admissions)):
            self._cached.setdefault(admission.seq, int(plan.starts[run]))


@dataclass(slots=True)
class _Place:
    """Totals of a replica over all its engines, and its requests in flight."""

    requests: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0
    evicted_states: int = 0
    sent_bytes: int = 0
    sequences: int = 0
    known_tokens: int = 0

    def add(self, player: _ReplicaPlayer) -> None:
        """Add the totals of ``player``, whose engine has ended."""
        self.computed_tokens += player.counts.computed_tokens
        self.busy_s += player.counts.busy_s
        self.sent_bytes += player.sent_bytes
        self.evicted_states += player.memory.usage().cache.evicted_states


@dataclass(slots=True)
class _Held:
    """A request that waits for a replica, with the tokens of its answer so far."""

    index: int
    answered: int = 0


@dataclass(slots=True)
class _Events:
    """Deaths and joins to come, by time."""

    kills: deque[Kill]
    joins: deque[tuple[float, int]] = field(default_factory=deque)

    def next_s(self) -> float:
        return min(self.kills[0].at_s if self.kills else _NEVER, self.joins[0][0] if self.joins else _NEVER)


def replay_fleet(
    traffic: Traffic,
    plan: ArenaPlan,
    cost: CostModel,
    *,
    replicas: int,
    router: str = "seconds",
    arm: Arm | str = "lru",
    sizes: Sizes | None = None,
    kills: Sequence[Kill] = (),
    restart_s: float = RESTART_S,
    on_progress: OnProgress | None = None,
    roles: Sequence[Role] = (),
    link: LinkModel | None = None,
) -> FleetReplayReport:
    """Run ``traffic`` through ``replicas`` memories of geometry ``plan``, placed by the router of that name.
    ``roles`` of the replicas, which send records over ``link``; none: no prompt is split. Raises ConfigError
    for an unknown router."""
    clock = VirtualClock()
    fleet = _FleetReplay(
        traffic,
        plan,
        cost,
        find_arm(arm) if isinstance(arm, str) else arm,
        sizes or sizes_for(plan, traffic),
        make_router(router, clock),
        clock,
        replicas,
        _Events(deque(sorted(kills, key=lambda kill: (kill.at_s, kill.replica)))),
        restart_s,
        roles,
        link,
    )
    fleet.run(on_progress)
    return fleet.report(router, len(kills))


class _FleetReplay:
    def __init__(
        self,
        traffic: Traffic,
        plan: ArenaPlan,
        cost: CostModel,
        arm: Arm,
        sizes: Sizes,
        router: Router,
        clock: VirtualClock,
        count: int,
        events: _Events,
        restart_s: float,
        roles: Sequence[Role],
        link: LinkModel | None,
    ) -> None:
        self.link = link
        self._roles: Sequence[Role] = roles or ["both"] * count
        self._is_split = bool(roles)
        self._splits = 0
        self.traffic, self.plan, self.cost, self.arm, self.sizes = traffic, plan, cost, arm, sizes
        self.router = router
        self.times = PlayedTimes.none(len(traffic))
        self._clock = clock
        self._events = events
        self._restart_s = restart_s
        self._players: dict[int, _ReplicaPlayer] = {}
        self._places = [_Place() for _ in range(count)]
        self._held: list[_Held] = []
        self._news: list[tuple[float, int, int, _News]] = []
        self._news_count = 0
        self._resumes = 0
        self._refused = 0

    # ------------------------------------------------------------------ the clock

    def run(self, on_progress: OnProgress | None) -> None:
        requests = self.traffic.requests
        for replica in range(len(self._places)):
            self._join(replica, requests[0].at_s if requests else 0.0)
        for index, request in enumerate(requests):
            self._advance(request.at_s)
            if request.prompt_tokens + max(1, request.output_tokens) > self.sizes.max_model_len:
                self._refused += 1
            else:
                self._held.append(_Held(index))
                self._dispatch()
            if on_progress is not None and index % _PROGRESS_EVERY == 0:
                on_progress(index, len(requests))
        self._advance(_NEVER)
        if on_progress is not None:
            on_progress(len(requests), len(requests))

    def _advance(self, at_s: float) -> None:
        """Advance to ``at_s``, with all deaths and joins before it."""
        events = self._events
        while events.next_s() <= at_s and events.next_s() < _NEVER:
            event_s = events.next_s()
            self._play(event_s)
            if events.joins and events.joins[0][0] == event_s:
                self._join(events.joins.popleft()[1], event_s)
            else:
                self._kill(events.kills.popleft())
        self._play(at_s)

    def _play(self, at_s: float) -> None:
        """Step players up to ``at_s``, and tell the router of steps that ended by then, in the order of time."""
        if self._is_split:
            self._play_in_order(at_s)
        else:
            for player in self._players.values():
                while (news := player.next_news(at_s)) is not None:
                    self._tell(*news)
        self._hear_until(at_s)
        if at_s < _NEVER:
            self._clock.advance_to(at_s)

    def _play_in_order(self, at_s: float) -> None:
        """Step the player whose clock is the earliest, up to the next event elsewhere."""
        while True:
            due = sorted(
                (player.clock(), player.number) for player in self._players.values() if player.scheduler.has_work
            )
            news_s = self._news[0][0] if self._news else _NEVER
            next_s = min(due[0][0] if due else _NEVER, news_s)
            if next_s >= at_s:
                return
            if news_s == next_s:
                self._hear_until(news_s)
                continue
            others_s = min(news_s, due[1][0] if len(due) > 1 else _NEVER)
            news = self._players[due[0][1]].next_news(at_s, max(others_s, next_s + _ORDER_S))
            if news is not None:
                self._tell(*news)

    def _tell(self, when_s: float, news: _News) -> None:
        self._news_count += 1
        heappush(self._news, (when_s, news.player.number, self._news_count, news))

    def _hear_until(self, at_s: float) -> None:
        while self._news and self._news[0][0] <= at_s:
            heard_s, number, _, news = heappop(self._news)
            if self._players.get(number) is news.player:
                self._clock.advance_to(heard_s)
                self._hear(news)

    def _hear(self, news: _News) -> None:
        player = news.player
        for index, cached_tokens in news.admitted:
            self.router.admitted(str(index), cached_tokens)
        for index in news.ended:
            if index in player.orders:
                arrives_s = max(player.orders[index].arrives_s, self._clock())
                self._tell(arrives_s, _News(player, [], [], None, moved=index))
            else:
                self._take_back(player, index)
        if news.moved is not None:
            self._move(player, news.moved)
        if news.report is not None and self.router.reported(player.number, news.report):
            self._send_full_report(player)

    # ------------------------------------------------------------------ requests

    def _dispatch(self) -> None:
        while self._held and self._players:
            queued = self._held.pop(0)
            index, request = queued.index, self.traffic.requests[queued.index]
            routed = RoutedRequest(
                str(index),
                self.traffic.tokens(index)[: request.prompt_tokens + queued.answered],
                request.salt,
                boundaries=request.boundaries,
                may_split=self._is_split and request.output_tokens > 1 and not queued.answered,
            )
            choice = self.router.choose(routed, self._loads())
            self._splits += choice.decode is not None
            self._places[choice.replica].requests += not queued.answered
            self._place(routed, choice, queued)

    def _place(self, routed: RoutedRequest, choice: Route, queued: _Held) -> None:
        self.router.placed(routed, choice)
        place = self._places[choice.replica]
        place.sequences += 1
        place.known_tokens += self.traffic.requests[queued.index].prompt_tokens
        self._players[choice.replica].take(queued.index, queued.answered, choice, self._clock())

    def _move(self, player: _ReplicaPlayer, index: int) -> None:
        """Move a request to the replica of its records, as in ``weft.fleet.placement``."""
        order, request, queued = player.orders[index], self.traffic.requests[index], _Held(index, 1)
        tokens = self.traffic.tokens(index)[: request.prompt_tokens + 1]
        then, now_s = self._players.get(order.decode), self._clock()
        has_arrived = False
        if then is not None:
            assert then.inbox is not None
            has_arrived = then.inbox.arrive(str(index), request.salt, tokens[:-1], order.start)
            if not has_arrived and now_s < order.arrives_s + ROOM_S:
                self._tell(now_s + _AGAIN_S, _News(player, [], [], None, moved=index))
                return
        del player.orders[index]
        self._take_back(player, index)
        if not has_arrived:
            self._held.append(queued)
            self._dispatch()
            return
        self._place(
            RoutedRequest(str(index), tokens, request.salt),
            Route(order.decode, request.prompt_tokens, moved=True),
            queued,
        )

    def _loads(self) -> list[ReplicaLoad]:
        link = None if self.link is None else self.link.stats(self.plan.arena_bytes)
        return [
            ReplicaLoad(
                number,
                self._places[number].sequences,
                self._places[number].known_tokens,
                self.sizes.rows_max,
                player.meter.cost(),
                self._roles[number],
                link,
            )
            for number, player in self._players.items()
        ]

    def _take_back(self, player: _ReplicaPlayer, index: int) -> Played:
        self.router.ended(str(index))
        place = self._places[player.number]
        place.sequences -= 1
        place.known_tokens -= self.traffic.requests[index].prompt_tokens
        return player.seqs.pop(index)

    # ------------------------------------------------------------------ replicas

    def _join(self, replica: int, now_s: float) -> None:
        player = _ReplicaPlayer(self, replica, now_s)
        self._players[replica] = player
        self._players = dict(sorted(self._players.items()))
        self.router.joined(replica)
        self._send_full_report(player)
        self._dispatch()

    def _send_full_report(self, player: _ReplicaPlayer) -> None:
        report = player.full_report()
        if report is not None:
            self.router.reported(player.number, report)

    def _kill(self, kill: Kill) -> None:
        """End an engine. A step that was in progress is lost: its tokens do not count."""
        player = self._players.pop(kill.replica, None)
        if player is None:
            return  # it is restarting
        self.router.left(kill.replica)
        self._places[kill.replica].add(player)
        for index in list(player.seqs):
            seq = self._take_back(player, index)
            target = self.traffic.requests[index].output_tokens
            answered = min(seq.answered, target - 1) if target else 0
            if not self.times.first[index] <= kill.at_s:
                self.times.first[index], answered = float("nan"), 0
            self.times.ended[index] = float("nan")
            self._held.append(_Held(index, max(0, answered)))
            self._resumes += 1
        self._held.sort(key=lambda queued: queued.index)
        self._events.joins.append((kill.at_s + self._restart_s, kill.replica))
        self._dispatch()

    # ------------------------------------------------------------------ the sum

    def report(self, router: str, kills: int) -> FleetReplayReport:
        for number, player in self._players.items():
            self._places[number].add(player)
        counts = self.router.counts().values()
        return FleetReplayReport(
            **self.times.timeline().served(self.traffic),
            router=router,
            memory_bytes=self.plan.arena_bytes,
            refused=self._refused,
            replicas=tuple(
                PlayedReplica(place.requests, place.computed_tokens, place.busy_s, place.evicted_states)
                for place in self._places
            ),
            computed_tokens=sum(place.computed_tokens for place in self._places),
            predicted_tokens=sum(count.predicted_tokens for count in counts),
            admitted_tokens=sum(count.cached_tokens for count in counts),
            kills=kills,
            resumes=self._resumes,
            gaps=self.times.gaps.percentiles(),
            splits=self._splits,
            sent_bytes=sum(place.sent_bytes for place in self._places),
            virtual_s=self._clock(),
        )
