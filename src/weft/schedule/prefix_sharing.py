"""In-flight prefix sharing: a request waits for a prefix that another sequence computes now.

    producer   [============ computed ====|------------- to compute -------------]
                                       computed         ^ point
    request    [==== cached ====|------------------------|.. own tokens ..]
                             cached                      the last position of the grid that both share

    saved by waiting:   point - cached          tokens that are not computed twice
    waited for:         point - computed        tokens that the producer must still compute

The request waits if this saves enough tokens: a page if the producer ends with this plan, as the wait is one step, else
a chunk. It does not wait if the producer is before the end of the request's own cached prefix: then the request could
compute the state earlier than it would arrive. The producer gets a tap at ``point`` for the request, even if the
snapshot policy places none there.

No request waits for ever. A producer runs now and ranks better, so it gets memory and tokens first. It stops being a
producer once it is preempted, ends, or passes the point without a free slot for the tap. Later requests in the queue do
not wait for a waiting one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.memory.values import Match
from weft.schedule.plan import Int32s
from weft.schedule.sequence import Rank, Sequence
from weft.schedule.snapshots import on_grid
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, SeqId

SAVED_TOKENS_MIN = CHUNK_TOKENS
"""Least tokens that a wait for a running producer saves."""
SAVED_BY_CLOSING_MIN = PAGE_TOKENS
"""Least tokens that a wait for a closing producer saves. The wait is one step, and this is the next turn of a
conversation whose client had its answer before the plan that closes the turn: each page of that turn hits."""


@dataclass(frozen=True, slots=True)
class PrefixProducer:
    """A sequence that computes a prefix. ``known``: its tokens, the first ``computed`` of them computed. ``arriving``:
    positions of states that this plan publishes, so the next plan can match them. ``rank`` None: it ends with this
    plan, so a wait for it takes one step."""

    seq: SeqId
    salt: str
    rank: Rank | None
    known: Int32s
    computed: int
    arriving: tuple[int, ...] = ()

    @property
    def saved_min(self) -> int:
        """The least tokens that a wait for this producer saves, which is also the length of its key."""
        return SAVED_BY_CLOSING_MIN if self.rank is None else SAVED_TOKENS_MIN


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """A wait for ``producer``. ``tap``: where it should save its state, 0 if that state is arriving already."""

    producer: SeqId
    tap: int = 0


def prefix_key(tokens: Int32s, length: int) -> bytes:
    """Return the first ``length`` tokens: the least that a request must share with a producer."""
    return tokens[:length].tobytes()


def common_tokens(left: Int32s, right: Int32s) -> int:
    """Return the number of equal tokens at the front of both."""
    length = min(left.size, right.size)
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def wait_for(
    known: Int32s,
    cached: int,
    rank: Rank,
    producers: Iterable[PrefixProducer],
    *,
    stateful: bool,
    grid: int = CHUNK_TOKENS,
) -> PrefixWait | None:
    """Return the wait that saves most for a request with ``known`` tokens, ``cached`` of them in the cache; the
    first of equal ones. ``stateful`` False: the model resumes at any page, and every computed page is
    published. ``grid``: states are saved at its multiples."""
    best: PrefixWait | None = None
    saved_most = 0
    for producer in producers:
        if producer.rank is not None and producer.rank > rank:
            continue
        least = max(saved_most, producer.saved_min - 1)
        if not _may_share(producer, known, cached + least):
            continue
        shared = min(common_tokens(producer.known, known), known.size - 1)
        for point, waited_for, tap in _points(producer, shared, stateful=stateful, grid=grid):
            saved = point - cached
            if saved > least and waited_for <= saved:
                best = PrefixWait(producer.seq, tap)
                least = saved_most = saved
    return best


def position_in_flight(
    known: Int32s, cached: int, producers: Iterable[PrefixProducer], *, stateful: bool, grid: int = CHUNK_TOKENS
) -> int:
    """Return the furthest position of ``known`` whose state (or KV) a wait for one of ``producers`` would bring,
    worth the wait or not; 0 if it is not past ``cached``."""
    furthest = 0
    for producer in producers:
        if _may_share(producer, known, max(cached, furthest)):
            shared = min(common_tokens(producer.known, known), known.size - 1)
            points = _points(producer, shared, stateful=stateful, grid=grid)
            furthest = max([furthest, *(point for point, _, _ in points)])
    return furthest if furthest > cached else 0


def _may_share(producer: PrefixProducer, known: Int32s, position: int) -> bool:
    """Return False if one look shows that no more than ``position`` tokens are shared, the last of ``known`` aside.
    Most prompts with an equal front differ soon after the cached prefix."""
    return min(producer.known.size, known.size - 1) > position and bool(producer.known[position] == known[position])


def _points(producer: PrefixProducer, shared: int, *, stateful: bool, grid: int) -> Iterator[tuple[int, int, int]]:
    """Yield positions up to ``shared`` that ``producer`` brings or can bring, the tokens it computes until then,
    and the tap to ask it for."""
    for position in producer.arriving:
        if position <= shared:
            yield position, 0, 0
        elif not stateful:
            yield _page_end(shared), 0, 0
    point = on_grid(shared, grid) if stateful else _page_end(shared)
    if producer.rank is not None and point > producer.computed:
        yield point, point - producer.computed, point if stateful else 0


def _page_end(position: int) -> int:
    return position - position % PAGE_TOKENS


class PrefixProducers:
    """The producers of one plan, by salt and first tokens. ``enabled`` False: the cache is off, and no request
    waits."""

    def __init__(self, *, enabled: bool, stateful: bool, grid: int) -> None:
        self._enabled = enabled
        self._grid = grid
        self._stateful = stateful
        self._by_key: dict[tuple[str, bytes], list[PrefixProducer]] = {}
        self._seqs: set[SeqId] = set()

    def has(self, seq: Sequence) -> bool:
        return seq.id in self._seqs

    def add(self, producer: PrefixProducer) -> None:
        self._seqs.add(producer.seq)
        length = producer.saved_min
        if self._enabled and producer.known.size >= length:
            self._by_key.setdefault((producer.salt, prefix_key(producer.known, length)), []).append(producer)

    def admitted(self, seq: Sequence, known: Int32s, start: int) -> None:
        """Note that ``seq`` is admitted by this plan and starts at ``start``."""
        self.add(PrefixProducer(seq.id, seq.salt, seq.rank, known, start))

    def wait_for(self, seq: Sequence, known: Int32s, cached: int) -> PrefixWait | None:
        """Return the prefix that ``seq`` should wait for before it is admitted, None without one."""
        producers = self._of_same_prefix(seq, known, cached)
        if not producers:
            return None
        return wait_for(known, cached, seq.rank, producers, stateful=self._stateful, grid=self._grid)

    def with_not_ready(self, seq: Sequence, known: Int32s, match: Match) -> Match:
        """Return ``match`` of ``seq``, which is admitted without a wait. Tokens that producers compute at this moment
        count as lost because they are not ready."""
        producers = self._of_same_prefix(seq, known, match.cached_tokens)
        in_flight = 0
        if producers:
            in_flight = position_in_flight(
                known, match.cached_tokens, producers, stateful=self._stateful, grid=self._grid
            )
        if in_flight <= match.cached_tokens:
            return match
        return replace(match, lost=match.lost.but("not_ready", in_flight - match.cached_tokens))

    def _of_same_prefix(self, seq: Sequence, known: Int32s, cached: int) -> list[PrefixProducer]:
        """Return producers with the first tokens of ``known``; none if a wait could not save enough."""
        more = seq.reusable(known).size - 1 - cached
        if not self._by_key or more < SAVED_BY_CLOSING_MIN:
            return []
        producers = self._by_key.get((seq.salt, prefix_key(known, SAVED_BY_CLOSING_MIN)), [])
        if more >= SAVED_TOKENS_MIN:
            producers = [*producers, *self._by_key.get((seq.salt, prefix_key(known, SAVED_TOKENS_MIN)), [])]
        return producers
