"""Upper bounds for policies: the hits of an infinite cache, and the hits that knowledge of the future allows.

    root of a salt
      └─ [0..512)                     an edge is a run of tokens, named by (request, start, end)
           ├─ [512..1093)             nodes are where sequences diverge or end, or where a position is looked up
           └─ [512..768)

    time ->        begin         end                     begin
    request 3        |============|  state @ its end       .
    request 9                     '--- held? ------------->|   saves prefill_s(0, position)
    bytes            the state, and the KV of its path that is not held at that time anyway

All sequences of a trace are one ``Forest`` of shared prefixes, to the token. It only grows and holds no
tokens: an edge names the request whose tokens it has.

The oracle knows every request in advance, and when each began and ended (from a replay with the same memory). Each
possible use is a *hold*: a request, a position of its prompt at which an earlier one left its state, and the time
between. Holds are chosen greedily, the most seconds saved per byte-second first. A hold needs room at each of its
moments, in addition to the memory of the running requests. KV that two holds share is paid once. A hold with a later
position than one chosen before for the same request costs and saves only the difference.

Placement is that of ``--snapshots auto`` with every fork seen: ``wanted_positions`` of the real scheduler, given the
length of the prompt's known prefix. With ``foresight`` the last grid point that any later request will share is added.
Frames, complete pages, and steps in which memory is freed are left out, which makes the oracle look better. The greedy
choice is tested against a search through all choices on tiny instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from weft.costs.step import CostModel
from weft.schedule.snapshots import AUTO, insurance_tokens, on_grid, wanted_positions
from weft.units import CHUNK_TOKENS, PAGE_TOKENS
from weft_tools.sim.traffic import Int32s, Traffic

_SEQUENCES_AT_HAND = 64


@dataclass(eq=False, slots=True)
class Place:
    """The tokens [start, end) of sequence ``owner``, after those of ``parent``."""

    owner: int
    start: int
    end: int
    parent: Place | None = field(repr=False)
    children: dict[int, Place] = field(default_factory=dict, repr=False)
    """Children by first token."""


class Forest:
    """The prefixes of a trace. It grows one sequence at a time; ``common``: tokens of each sequence that an earlier one
    had."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._tokens: Callable[[int], Int32s] = lru_cache(_SEQUENCES_AT_HAND)(traffic.tokens)
        self._roots: dict[str, Place] = {}
        self._last: dict[int, Place] = {}

    def add(self, index: int, length: int) -> tuple[int, Place]:
        """Add the first ``length`` tokens of request ``index``. Return the number of these tokens that an earlier
        request had, and the place at their end."""
        tokens = self._tokens(index)[:length]
        root = self._roots.get(self._traffic.requests[index].salt)
        if root is None:
            root = self._roots[self._traffic.requests[index].salt] = Place(index, 0, 0, None)
        place, position = root, 0
        while position < length:
            child = place.children.get(int(tokens[position]))
            if child is None:
                child = place.children[int(tokens[position])] = Place(index, position, length, place)
                self._last[index] = child
                return position, child
            same = self._same(tokens, child)
            if same < child.end:
                place = self._split(child, same)
                position = same
                continue
            place, position = child, child.end
        self._last[index] = place
        return length, place

    def place_at(self, index: int, position: int) -> Place:
        """Return the place of request ``index``, which was added, that ends at ``position``; split an edge if
        necessary."""
        place = self._last[index]
        assert 0 < position <= place.end
        while place.start >= position:
            assert place.parent is not None
            place = place.parent
        return place if place.end == position else self._split(place, position)

    def path(self, index: int) -> list[Place]:
        """Return the places of request ``index``, from its first tokens to its last."""
        places = []
        place: Place | None = self._last[index]
        while place is not None and place.end:
            places.append(place)
            place = place.parent
        return places[::-1]

    def _same(self, tokens: Int32s, child: Place) -> int:
        """Return the position up to which ``tokens`` match the edge of ``child``."""
        end = min(child.end, tokens.size)
        differ = np.flatnonzero(tokens[child.start : end] != self._tokens(child.owner)[child.start : end])
        return child.start + int(differ[0]) if differ.size else end

    def _split(self, place: Place, position: int) -> Place:
        """Split the edge of ``place``, which becomes the lower part, and return the upper part."""
        assert place.parent is not None
        assert place.start < position < place.end
        tokens = self._tokens(place.owner)
        upper = Place(place.owner, place.start, position, place.parent)
        place.parent.children[int(tokens[place.start])] = upper
        upper.children[int(tokens[position])] = place
        place.parent, place.start = upper, position
        return upper


def computed_tokens(traffic: Traffic, index: int) -> int:
    """Return the tokens of request ``index`` in memory at its end: all but the last, which is chosen but never
    computed."""
    request = traffic.requests[index]
    return request.prompt_tokens + max(0, request.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class InfiniteCache:
    """Tokens of all prompts, and of these the tokens that an infinite cache finds: a bound that no cache can exceed.

        of each prompt     the longest prefix that any request which arrived before it had, prompt and answer,
                           and one token less than the prompt, as its last logits choose the first token
        pages              that, down to a multiple of 16: where KV can be taken up
        states             that, down to a multiple of the engine's grid, or the end of an earlier request if
                           that lies further on: where a recurrent state can stand

    Arrivals count, not ends: a request may use a prefix that another has not computed yet, so that no policy that waits
    for running requests can be better."""

    prompt_tokens: int
    at_pages: int
    at_states: int

    @property
    def page_rate(self) -> float:
        return self.at_pages / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def state_rate(self) -> float:
        return self.at_states / self.prompt_tokens if self.prompt_tokens else 0.0


def infinite_cache(traffic: Traffic, grid_tokens: int = CHUNK_TOKENS) -> InfiniteCache:
    """Return the bound. ``grid_tokens``: an engine keeps states at multiples of it."""
    forest = Forest(traffic)
    ends: set[Place] = set()
    at_pages = at_states = 0
    for index, request in enumerate(traffic.requests):
        common, last = forest.add(index, computed_tokens(traffic, index))
        common = min(common, request.prompt_tokens - 1)
        at_pages += common - common % PAGE_TOKENS
        at_states += max(common - common % grid_tokens, _deepest(ends, last, common))
        ends.add(last)
    return InfiniteCache(traffic.prompt_tokens, at_pages, at_states)


def _deepest(ends: set[Place], place: Place | None, common: int) -> int:
    """Return the position of the last end of an earlier request on the path to ``place``, at most ``common``."""
    while place is not None:
        if place.end <= common and place in ends:
            return place.end
        place = place.parent
    return 0


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OracleMemory:
    """Bytes: of all memory, of a token's KV, of a state (0: the model resumes at any token). States are kept at
    multiples of ``grid_tokens``."""

    memory_bytes: float
    kv_token_bytes: float
    state_bytes: float
    grid_tokens: int = CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Span:
    """When a request began to run, had its prompt computed and ended, in seconds."""

    began_s: float
    prompt_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The oracle's result. ``cached_tokens``: by request, for requests that ran."""

    prompt_tokens: int
    cached_tokens: tuple[int, ...]
    saved_s: float

    @property
    def hit_rate(self) -> float:
        return sum(self.cached_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(eq=False, slots=True)
class Source:
    """A state that ``request`` leaves at a place, kept there from ``time_index`` on."""

    request: int
    time_index: int


@dataclass(eq=False, slots=True)
class Hold:
    """A possible use: ``request`` could begin at ``place``, whose states come from ``sources``, the latest last."""

    request: int
    place: Place
    sources: list[Source]


@dataclass(slots=True)
class Instance:
    """All possible holds of a trace, over time indexes of ``times``. ``sizes``: bytes of the KV of a place's
    edge."""

    times: Floats
    begins: list[int]
    ends: list[int]
    paths: list[list[Place]] = field(repr=False)
    holds: list[Hold] = field(repr=False)


def oracle(
    traffic: Traffic, spans: Sequence[Span | None], memory: OracleMemory, cost: CostModel, *, foresight: bool = True
) -> Hindsight:
    """Return the oracle's hits. ``spans`` by request, None for one that did not run. ``foresight``: states are also
    kept where a later request will diverge; otherwise only where ``auto`` keeps them."""
    instance = possible_holds(traffic, spans, memory, foresight=foresight)
    ledger = HoldLedger(instance, memory)
    cached = greedy(instance, ledger, cost)
    ran = [index for index, span in enumerate(spans) if span is not None]
    return Hindsight(
        sum(traffic.requests[index].prompt_tokens for index in ran),
        tuple(cached[index] for index in ran),
        sum(cost.prefill_s(0, cached[index]) for index in ran),
    )


# ---------------------------------------------------------------------- possible holds


def possible_holds(
    traffic: Traffic, spans: Sequence[Span | None], memory: OracleMemory, *, foresight: bool
) -> Instance:
    forest = Forest(traffic)
    saved, parted = _placement(traffic, spans, memory, forest)
    known = [span for span in spans if span is not None]
    times = np.unique([moment for span in known for moment in (span.began_s, span.prompt_s, span.ended_s)])
    index_of = {moment: index for index, moment in enumerate(times.tolist())}
    begins = [0 if span is None else index_of[span.began_s] for span in spans]
    ends = [0 if span is None else index_of[span.ended_s] for span in spans]
    paths = [[] if span is None else forest.path(index) for index, span in enumerate(spans)]
    sources: dict[Place, list[Source]] = {}
    for index, span in enumerate(spans):
        if span is None:
            continue
        prompt, end = traffic.requests[index].prompt_tokens, computed_tokens(traffic, index)
        for place in paths[index]:
            if place.end in (*saved[index], end) or (foresight and place in parted) or not memory.state_bytes:
                ready_s = span.prompt_s if place.end < min(prompt, end) else span.ended_s
                sources.setdefault(place, []).append(Source(index, index_of[ready_s]))
    for column in sources.values():
        column.sort(key=lambda source: (source.time_index, source.request))
    holds = [
        Hold(index, place, earlier)
        for index, span in enumerate(spans)
        if span is not None
        for place in paths[index]
        if place.end < traffic.requests[index].prompt_tokens
        if (
            earlier := [
                source
                for source in sources.get(place, ())
                if source.time_index <= begins[index] and source.request != index
            ]
        )
    ]
    return Instance(times, begins, ends, paths, holds)


def _placement(
    traffic: Traffic, spans: Sequence[Span | None], memory: OracleMemory, forest: Forest
) -> tuple[list[list[int]], set[Place]]:
    """Return positions at which each request leaves states by ``auto``, and the places where a request diverges from
    earlier prefixes. Add every request to ``forest``, with a place at each of these positions."""
    first = insurance_tokens(int(memory.state_bytes), int(PAGE_TOKENS * memory.kv_token_bytes))
    saved: list[list[int]] = []
    forks: list[int] = []
    for index, span in enumerate(spans):
        request = traffic.requests[index]
        common = 0 if span is None else forest.add(index, computed_tokens(traffic, index))[0]
        saved.append(
            []
            if span is None
            else wanted_positions(
                AUTO,
                known_tokens=request.prompt_tokens,
                start=0,
                boundaries=request.boundaries,
                marks=request.marks,
                kv_tokens=common,
                insurance_first=first,
                grid=memory.grid_tokens,
            )
        )
        forks.append(on_grid(min(common, request.prompt_tokens - 1), memory.grid_tokens))
        for position in saved[-1]:
            forest.place_at(index, position)
    return saved, {forest.place_at(index, fork) for index, fork in enumerate(forks) if fork}


# ---------------------------------------------------------------------- chosen holds


class HoldLedger:
    """Bytes in use at every moment, and the holds of each. Moment i is [times[i], times[i + 1])."""

    def __init__(self, instance: Instance, memory: OracleMemory) -> None:
        self._memory = memory
        self._paths = instance.paths
        self.durations = np.diff(instance.times, append=instance.times[-1:]) if instance.times.size else (np.empty(0))
        self.used = np.zeros(instance.times.size)
        self._kv: dict[Place, Bools] = {}
        self._states: dict[Place, Bools] = {}
        for path, begin, end in zip(instance.paths, instance.begins, instance.ends, strict=True):
            self.used[begin:end] += memory.state_bytes if path else 0
            for place in path:
                self._cover(self._kv, place, begin, end, self._kv_bytes(place))

    def needs(self, hold: Hold, begin: int, end: int) -> Floats:
        """Return the further bytes at each of the moments [begin, end) if ``hold`` is taken."""
        more = self._missing(self._states, hold.place, begin, end) * self._memory.state_bytes
        place: Place | None = hold.place
        while place is not None and place.end:
            more += self._missing(self._kv, place, begin, end) * self._kv_bytes(place)
            place = place.parent
        return more

    def fits(self, more: Floats, begin: int, end: int) -> bool:
        return bool((self.used[begin:end] + more <= self._memory.memory_bytes)[more > 0].all())

    def take(self, hold: Hold, begin: int, end: int) -> None:
        self._cover(self._states, hold.place, begin, end, self._memory.state_bytes)
        place: Place | None = hold.place
        while place is not None and place.end:
            self._cover(self._kv, place, begin, end, self._kv_bytes(place))
            place = place.parent

    def _kv_bytes(self, place: Place) -> float:
        return (place.end - place.start) * self._memory.kv_token_bytes

    def _missing(self, marks: dict[Place, Bools], place: Place, begin: int, end: int) -> Floats:
        stored = marks.get(place)
        return np.ones(end - begin) if stored is None else (~stored[begin:end]).astype(np.float64)

    def _cover(self, marks: dict[Place, Bools], place: Place, begin: int, end: int, size: float) -> None:
        stored = marks.get(place)
        if stored is None:
            stored = marks[place] = np.zeros(self.used.size, dtype=np.bool_)
        self.used[begin:end] += ~stored[begin:end] * size
        stored[begin:end] = True


class Choices:
    """The chosen begin of each request, and the requests that must compute through a place for others: a request that
    begins after a place leaves no state there.

    At first (``binding`` False) only requests that could never begin after the place count as sources. So no chosen
    hold blocks another."""

    def __init__(self, instance: Instance) -> None:
        count = len(instance.begins)
        self.cached = [0] * count
        self.binding = False
        self._most = [float("inf")] * count
        self._possible = [0] * count
        for hold in instance.holds:
            self._possible[hold.request] = max(self._possible[hold.request], hold.place.end)

    def source(self, hold: Hold) -> Source | None:
        """Return the latest usable source; None if the hold must not be chosen, or saves nothing."""
        if not self.cached[hold.request] < hold.place.end <= self._most[hold.request]:
            return None
        begins = self.cached if self.binding else self._possible
        return next((source for source in reversed(hold.sources) if begins[source.request] <= hold.place.end), None)

    def take(self, hold: Hold, source: Source) -> None:
        self.cached[hold.request] = hold.place.end
        self._most[source.request] = min(self._most[source.request], hold.place.end)


def greedy(instance: Instance, ledger: HoldLedger, cost: CostModel) -> list[int]:
    """Return cached tokens by request. Holds that block no other hold are chosen first. In the second round a request
    may begin earlier, so that it leaves states for others."""
    choices = Choices(instance)
    _take_best(instance, ledger, cost, choices)
    choices.binding = True
    _take_best(instance, ledger, cost, choices)
    return choices.cached


def _take_best(instance: Instance, ledger: HoldLedger, cost: CostModel, choices: Choices) -> None:
    """Take holds by seconds saved per byte-second, the best first; a hold is evaluated again when its turn comes, since
    earlier choices may have changed the cost or made the hold useless."""

    def worth(hold: Hold) -> tuple[float, Source | None, Floats]:
        source = choices.source(hold)
        if source is None:
            return 0.0, None, np.empty(0)
        begin, end = source.time_index, instance.begins[hold.request]
        more = ledger.needs(hold, begin, end)
        area = float((more * ledger.durations[begin:end]).sum())
        saved = cost.prefill_s(choices.cached[hold.request], hold.place.end)
        return saved / max(area, 1e-9), source, more

    heap = [(-worth(hold)[0], number) for number, hold in enumerate(instance.holds)]
    heapify(heap)
    while heap:
        claimed, number = heappop(heap)
        hold = instance.holds[number]
        value, source, more = worth(hold)
        if source is None:
            continue
        if heap and -value > heap[0][0] and -value > claimed:
            heappush(heap, (-value, number))
            continue
        begin, end = source.time_index, instance.begins[hold.request]
        if ledger.fits(more, begin, end):
            ledger.take(hold, begin, end)
            choices.take(hold, source)
