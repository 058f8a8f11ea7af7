"""The router that knows the replicas' snapshots, and chooses the replica with the earliest first token.

    seconds  =  waiting for earlier prefills                     PrefillQueue
              + a step of the sequences that run there           costs of the replica's engine
              + prefill(position, n) from the deepest snapshot that the replica has, or will have
              + restore of that snapshot                       snapshot_table
              + cost of that prefill to others                    SharedCosts

A prompt may be split: a prefill replica computes it, and a decode replica continues. Both ways are compared up to the
moment in which the answer continues, so a split also costs

    the time until the records arrive: the last chunk, or the backlog of the link      LinkStats

There is no threshold and no weight. A hot prefix is computed on a second replica once waiting takes longer than
computing. Ties go to the replica with the fewest sequences in flight, then to the one with the least recent work.
``wants`` "pages" assumes that a model resumes where its KV ends, as routers of attention models do: ``debug.router
kv-only`` sets it for comparisons. ``split``, which splits every request that it can, is for comparisons too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from math import exp
from typing import NamedTuple

from weft.costs.step import StepCost, mean_cost
from weft.handoff import Role
from weft.prefix_digests import prefix_digests, token_array
from weft.router.protocol import ReplicaLoad, Route, RoutedRequest, RouterCounts, Wants
from weft.router.snapshot_table import CacheMatch, SnapshotTable
from weft.snapshot_report import SnapshotReport
from weft.units import CHUNK_TOKENS, PAGE_TOKENS

AMPLIFIED = 3.0
"""Factor on the cost to others: a request that is sent away from its state delays other requests, some of which are
then sent away too. Chosen on a conversation trace (docs/plan.md): a factor of 1 gives 93 % of the hits of one engine
with the memory of all; larger factors do not delay first tokens."""
_FADE = 0.99


class SharedCosts:
    """Estimate of a prefill's cost to other requests, as a factor on the seconds of the prefill.

        weight  =  sequences that decode meanwhile  +  requests that wait for it  +  displaced tokens

    A request on a replica without its snapshot may get the first token sooner, and yet cost the fleet more.

    *Decodes.* Each sequence that decodes on the same replica waits for the prefill: one second of prefill delays each
    by one second. *Waiting.* The number of requests after a prefill is estimated by the number before a request when it
    is placed: in a queue both have the same mean. *Displaced.* In a full cache each computed token pushes out another
    one. The value of such a token follows from the hits of the caches: cached tokens over computed ones. A cache that
    has evicted nothing yet displaces nothing, so a replica with room gets a prompt that no replica has. The means fade
    and cover the whole fleet, so the weight follows the traffic. Each role has its own means, as prefill and decode
    replicas do different work."""

    def __init__(self) -> None:
        self._delayed: dict[Role, float] = {}
        self._cached_tokens = 0.0
        self._computed_tokens = 0.0
        self._full: set[int] = set()
        """Replicas whose cache has evicted something."""

    def placed(self, role: Role, *, ahead: int, decodes: int) -> None:
        """Note a request placed after ``ahead`` prefills, next to ``decodes`` sequences."""
        self._delayed[role] = _FADE * self._delayed.get(role, 0.0) + (1 - _FADE) * (ahead + decodes)

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._cached_tokens = _FADE * self._cached_tokens + cached_tokens
        self._computed_tokens = _FADE * self._computed_tokens + prompt_tokens - cached_tokens

    def evicted(self, replica: int) -> None:
        self._full.add(replica)

    def left(self, replica: int) -> None:
        """Forget that the cache of ``replica`` was full: the replica left."""
        self._full.discard(replica)

    def weight(self, replica: int, role: Role = "both") -> float:
        displaced = self._cached_tokens / self._computed_tokens if self._computed_tokens else 0.0
        return AMPLIFIED * (self._delayed.get(role, 0.0) + (displaced if replica in self._full else 0.0))


LATELY_S = 600.0
_RESIDENCE_FADE = 0.95
_NO_MATCH = CacheMatch(0, 0.0)
_CHUNK_PAGES = CHUNK_TOKENS // PAGE_TOKENS


@dataclass(slots=True)
class _Flight:
    """A request on its replica."""

    replica: int
    predicted_tokens: int
    placed_s: float
    prompt_tokens: int
    is_admitted: bool = False
    moved: bool = False
    """Whether the request continues here with the records of another replica."""


class _Known:
    """The state of one replica, without its snapshots. ``residence_s``: mean time that a request stays, 0 before the
    first request has left."""

    def __init__(self) -> None:
        self.queue = PrefillQueue()
        self.counts = RouterCounts()
        self.residence_s = 0.0
        self.role: Role = "both"
        self.in_flight = 0
        """Requests placed here that have not ended."""
        self._lately_s = self._lately_at_s = 0.0

    def worked(self, seconds: float, now_s: float) -> None:
        self._lately_s, self._lately_at_s = self.lately_s(now_s) + seconds, now_s

    def lately_s(self, now_s: float) -> float:
        """Return the seconds of prefill placed here recently; work placed LATELY_S ago counts a third."""
        return self._lately_s * exp((self._lately_at_s - now_s) / LATELY_S)

    def stayed(self, seconds: float) -> None:
        fade = _RESIDENCE_FADE if self.residence_s else 0.0
        self.residence_s = fade * self.residence_s + (1 - fade) * seconds

    def row_wait_s(self, load: ReplicaLoad) -> float:
        """Return seconds until a row is free for one more sequence."""
        over = load.sequences + 1 - load.rows
        return over * self.residence_s / load.rows if over > 0 else 0.0


class _Place(NamedTuple):
    """One replica as a candidate for a prompt. ``seconds``: until the prompt is computed, plus the cost to others.
    ``ahead_s``: wait of a request here that needs no prefill. ``match``: tokens in the replica's cache now."""

    seconds: float
    load: ReplicaLoad
    position: int
    work_s: float
    ahead_s: float
    match: int


PARTNERS_MAX = 8
"""Most replicas of each role that are compared in pairs: those that can begin first."""
HANDOFF_AGAIN_S = 30.0
"""Seconds before records are sent again between two replicas where sending failed."""


class Seconds:
    """A ``Router`` by seconds. ``clock`` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float], wants: Wants = "states", *, always_splits: bool = False) -> None:
        self._always_splits = always_splits
        self._clock = clock
        self._wants: Wants = wants
        self._table = SnapshotTable()
        self._boundaries = Boundaries()
        self._replicas: dict[int, _Known] = {}
        self._flights: dict[str, _Flight] = {}
        self._shared_costs = SharedCosts()
        self._broken: dict[tuple[int, int], float] = {}
        """Pairs of replicas between which sending failed, with the time until which they are avoided."""

    @property
    def wants(self) -> Wants:
        return self._wants

    # ------------------------------------------------------------------ requests

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        now_s, length = self._clock(), len(request.tokens)
        prompt = token_array(request.tokens)
        page_digests = prefix_digests(prompt, request.salt)
        matches = self._table.matches(page_digests, prompt)
        digests: list[int] = page_digests[_CHUNK_PAGES - 1 :: _CHUNK_PAGES].tolist()
        guess, prompts = _mean_costs(candidates), _prompt_costs(candidates)
        places = [
            self._place(load, length, digests, matches.get(load.replica, _NO_MATCH), guess, prompts, now_s)
            for load in candidates
        ]
        best = self._soonest([place for place in places if place.load.role != "prefill"] or places, now_s)
        boundaries = self._boundaries.of(digests)
        split = self._split(places, length, now_s) if request.may_split else None
        if split is not None and (split[0] < best.seconds or self._always_splits):
            _, first, then = split
            return Route(
                first.load.replica, first.position, boundaries, digests, first.work_s, then.load.replica, then.match
            )
        return Route(best.load.replica, best.position, boundaries, digests, best.work_s)

    def _place(
        self,
        load: ReplicaLoad,
        length: int,
        digests: Sequence[int],
        match: CacheMatch,
        guess: StepCost,
        prompts: StepCost | None,
        now_s: float,
    ) -> _Place:
        known = self._known(load.replica)
        known.role = load.role
        position, restore_s = match.position, match.restore_s
        shared = min(known.queue.shared_tokens(digests), length - 1)
        if shared > position:
            position, restore_s = shared, 0.0
        costs = load.costs or guess
        prompt_costs = prompts if prompts is not None and load.role == "decode" else costs
        work_s = prompt_costs.prefill_s(position, length) + restore_s
        others_s = work_s * self._shared_costs.weight(load.replica, load.role)
        rows_s = known.row_wait_s(load)
        steps_s = costs.fixed_s + load.sequences * costs.decode_s
        seconds = known.queue.wait_s(now_s) + rows_s + work_s + others_s + steps_s
        return _Place(seconds, load, position, work_s, rows_s + steps_s, match.position)

    def _soonest(self, places: Sequence[_Place], now_s: float) -> _Place:
        best = places[0]
        for place in places[1:]:
            if place.seconds < best.seconds or (
                place.seconds == best.seconds and self._is_idler(place.load, best.load, now_s)
            ):
                best = place
        return best

    def _split(self, places: Sequence[_Place], length: int, now_s: float) -> tuple[float, _Place, _Place] | None:
        """Return the seconds until an answer continues on another replica than computes the prompt, and both replicas.
        None without partners."""
        firsts = nsmallest(
            PARTNERS_MAX,
            (place for place in places if place.load.role != "decode" and place.load.link is not None),
            key=lambda place: place.seconds,
        )
        thens = nsmallest(
            PARTNERS_MAX,
            (place for place in places if place.load.role != "prefill" and place.load.link is not None),
            key=lambda place: place.ahead_s,
        )
        best: tuple[float, _Place, _Place] | None = None
        for first, then in product(firsts, thens):
            link, pair = first.load.link, (first.load.replica, then.load.replica)
            room = then.load.link
            if (
                then is first
                or first.load.role == then.load.role
                or link is None
                or room is None
                or not room.has_room(then.match, length)
                or self._broken.get(pair, 0.0) > now_s
            ):
                continue
            seconds = (
                first.seconds
                + then.ahead_s
                + link.wait_s(then.match, first.position, length, first.work_s, is_guess=first.load.costs is None)
            )
            if best is None or seconds < best[0]:
                best = seconds, first, then
        return best

    def handoff_failed(self, prefill: int, decode: int) -> None:
        now_s = self._clock()
        self._broken = {pair: until_s for pair, until_s in self._broken.items() if until_s > now_s}
        self._broken[prefill, decode] = now_s + HANDOFF_AGAIN_S

    def placed(self, request: RoutedRequest, route: Route) -> None:
        now_s = self._clock()
        digests = route.digests
        self._flights[request.request_id] = _Flight(
            route.replica, route.predicted_tokens, now_s, len(request.tokens), moved=route.moved
        )
        known = self._known(route.replica)
        known.worked(route.work_s, now_s)
        queue = known.queue
        self._shared_costs.placed(known.role, ahead=len(queue), decodes=known.in_flight - len(queue))
        known.in_flight += 1
        queue.add(request.request_id, route.work_s, digests, now_s)
        self._boundaries.add(digests)

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        flight = self._flights.get(request_id)
        if flight is None or flight.is_admitted:
            return
        flight.is_admitted = True
        known = self._known(flight.replica)
        known.queue.remove(request_id, self._clock())
        if flight.moved:
            return  # the replica that computed the prompt has counted it
        known.counts.requests += 1
        known.counts.predicted_tokens += flight.predicted_tokens
        known.counts.cached_tokens += cached_tokens
        self._shared_costs.admitted(flight.prompt_tokens, cached_tokens)

    def ended(self, request_id: str) -> None:
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        now_s, known = self._clock(), self._known(flight.replica)
        known.queue.remove(request_id, now_s)
        known.in_flight -= 1
        if flight.is_admitted:
            known.stayed(now_s - flight.placed_s)

    # ------------------------------------------------------------------ replicas

    def joined(self, replica: int) -> None:
        self._known(replica)
        self._broken = {pair: until_s for pair, until_s in self._broken.items() if replica not in pair}
        self._table.join(replica)

    def left(self, replica: int) -> None:
        self._table.leave(replica)
        self._shared_costs.left(replica)
        known = self._known(replica)
        known.queue, known.residence_s = PrefillQueue(), 0.0

    def reported(self, replica: int, report: SnapshotReport) -> bool:
        if report.removed:
            self._shared_costs.evicted(replica)
        return self._table.apply(replica, report)

    def counts(self) -> dict[int, RouterCounts]:
        for replica, known in self._replicas.items():
            known.counts.snapshots = self._table.snapshots_of(replica)
            known.counts.is_stale = self._table.is_stale(replica)
            known.counts.gaps = self._table.gaps_of(replica)
        return {replica: known.counts for replica, known in sorted(self._replicas.items())}

    def _is_idler(self, load: ReplicaLoad, other: ReplicaLoad, now_s: float) -> bool:
        """Return whether ``load`` wins a tie."""
        first, second = [
            (each.sequences, each.known_tokens, known.lately_s(now_s), each.replica)
            for each in (load, other)
            for known in (self._replicas.get(each.replica) or _Known(),)
        ]
        return first < second

    def _known(self, replica: int) -> _Known:
        known = self._replicas.get(replica)
        if known is None:  # no setdefault: ``choose`` calls this for every replica and would create entries
            known = self._replicas[replica] = _Known()
        return known


def _mean_costs(candidates: Sequence[ReplicaLoad]) -> StepCost:
    """Return the mean costs of the replicas, for a replica that has measured nothing yet."""
    measured = [load.costs for load in candidates if load.costs is not None]
    return measured[0] if len(measured) == len(candidates) else mean_cost(measured)


def _prompt_costs(candidates: Sequence[ReplicaLoad]) -> StepCost | None:
    """Return the cost of prompts on a decode replica: the mean of the replicas that compute prompts. A decode replica's
    own prefills have only the few tokens after a snapshot, and each reads all weights: by these measurements a token
    costs seventy times more. None if no other costs are known."""
    measured = [load.costs for load in candidates if load.role != "decode" and load.costs is not None]
    return mean_cost(measured) if measured and len(measured) < len(candidates) else None


SEEN_MAX = 200_000
FORKS_MAX = 20_000
BOUNDARIES_MAX = 8
"""Boundaries that one request gets, the deepest ones."""


class Boundaries:
    """Positions where prompts diverge anywhere in the fleet, which every engine gets as boundaries.

        replica 0   [ system prompt | tools | question 1 ]
        replica 1   [ system prompt | tools | question 2 ]      diverges from the first one after the tools
                                            ^ boundary: replica 1 saves a state here, though it sees the
                                              prefix for the first time

    Digests of prompts are stored in two generations of at most SEEN_MAX: when the young one is full, it replaces the
    old one (law L11). All digests of a prompt are entered, so the known digests of a prompt are a prefix of its
    digests, found by bisection."""

    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._forks: dict[int, None] = {}

    def of(self, digests: Sequence[int]) -> tuple[int, ...]:
        """Return the boundaries in a prompt whose whole chunks have ``digests``, the deepest first."""
        depth = self._seen_depth(digests)
        positions = [page + 1 for page, digest in enumerate(digests[:depth]) if digest in self._forks]
        if depth and depth not in positions[-1:]:
            positions.append(depth)
        return tuple(CHUNK_TOKENS * page for page in reversed(positions[-BOUNDARIES_MAX:]))

    def add(self, digests: Sequence[int]) -> None:
        """Add the digests of a prompt that is placed."""
        depth = self._seen_depth(digests)
        if 0 < depth < len(digests):
            self._forks.pop(digests[depth - 1], None)
            self._forks[digests[depth - 1]] = None
            while len(self._forks) > FORKS_MAX:
                del self._forks[next(iter(self._forks))]
        if len(self._young) > SEEN_MAX:
            self._old, self._young = self._young, set()
        self._young.update(digests)

    def _seen_depth(self, digests: Sequence[int]) -> int:
        """Return how many of ``digests`` an earlier prompt had."""
        young, old = self._young, self._old
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in young or digests[middle] in old:
                low = middle + 1
            else:
                high = middle
        return low


COMPARED_MAX = 16


@dataclass(slots=True)
class _Prefill:
    work_s: float
    digests: Sequence[int]


class PrefillQueue:
    """Prefills that the router placed on a replica and that are not computed yet.

        [ head: placed, computed since began_s ][ next ][ next ]      + a new request
          work_s - elapsed                      + work_s + work_s     = seconds of waiting

    The lateness of a late head counts as waiting, so a replica that hangs gets fewer and fewer requests. A request in
    flight is also a future prefix: a later request with the same beginning waits for it and computes only the rest. One
    lookup compares at most COMPARED_MAX of them (law L11)."""

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._by_beginning: dict[int, dict[str, None]] = {}
        self._work_s = 0.0
        self._head_began_s = 0.0

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, request_id: str, work_s: float, digests: Sequence[int], now_s: float) -> None:
        if not self._prefills:
            self._head_began_s = now_s
        self._prefills[request_id] = _Prefill(work_s, digests)
        self._work_s += work_s
        if digests:
            self._by_beginning.setdefault(digests[0], {})[request_id] = None

    def remove(self, request_id: str, now_s: float) -> None:
        """Remove a request that is computed or has left. Unknown ids are ignored."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return
        if next(iter(self._prefills)) == request_id:
            self._head_began_s = now_s
        del self._prefills[request_id]
        self._work_s = self._work_s - prefill.work_s if self._prefills else 0.0
        if prefill.digests:
            same = self._by_beginning[prefill.digests[0]]
            del same[request_id]
            if not same:
                del self._by_beginning[prefill.digests[0]]

    def wait_s(self, now_s: float) -> float:
        """Return seconds until a request that is placed now begins."""
        if not self._prefills:
            return 0.0
        head = next(iter(self._prefills.values()))
        elapsed_s = now_s - self._head_began_s
        return self._work_s - head.work_s + abs(head.work_s - elapsed_s)

    def shared_tokens(self, digests: Sequence[int]) -> int:
        """Return the number of tokens that a request with ``digests`` shares with a request in flight, on the grid of
        states."""
        same = self._by_beginning.get(digests[0]) if digests else None
        if same is None:
            return 0
        longest = 0
        for position, request_id in enumerate(reversed(same)):
            if position == COMPARED_MAX:
                break
            longest = max(longest, _common(digests, self._prefills[request_id].digests, longest))
        return longest * CHUNK_TOKENS


def _common(left: Sequence[int], right: Sequence[int], least: int) -> int:
    """Return the number of equal digests at the front of both; ``least`` if there are no more."""
    high = min(len(left), len(right))
    if high <= least or left[least] != right[least]:
        return least
    low = least + 1
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
