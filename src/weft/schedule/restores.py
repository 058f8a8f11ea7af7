"""Restores: a request waits for a prefix that the store has, and later requests do not.

    plan      look      the store has more than the cache, and reading is cheaper --> a wish for a fetch
    commit    begin     a transfer buffer, Store.fetch, a deadline
    (poll)    READING --fetched--> READY          --damaged, missing, too late--> the request computes
    plan      load      a lease for the snapshot; a step begins to load it           READY --> LOADING
    (finish)            the load has ended, at the end of that step or later           LOADING --> LOADED
    plan      publish   the lease closes with ``keep``: its pages and slot enter the tree
    next plan           the request matches them like anything cached

A load is a lease of its own, with a sequence number of its own. So memory, the audit and the tree know
loaded bytes as they know computed ones: one owner (L1), all or nothing (L2), one salt (L10).

A fetch serves every request that waits for the same prefix, and all of them stop waiting at its deadline. The deadline
follows from the price of computing the prefix (``costs.restore``), in the seconds of all requests that computing would
delay. A request is restored once: if its prefix is evicted between load and admission, it computes. Fetches also begin
for up to AHEAD_MAX requests further back in the queue, so that the disk reads while the device computes.

Laws: L3 (without a buffer or memory there is a wait or a miss, never an error), L8, L9, L11 (fetches and
buffers are bounded).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, nextafter
from typing import NamedTuple

import numpy as np

from weft.costs.restore import RestorePrices
from weft.memory.arena_work import SnapshotLoad
from weft.memory.prefix_store import KvRows, StagingBuffers, Store, StoredPrefix, StoreEvent, Ticket, TransferBuffers
from weft.memory.values import Match, StoreLoss
from weft.schedule.plan import Int32s
from weft.schedule.sequence import Sequence
from weft.schedule.tier_values import FetchKey, FetchWish, RestoreCounts
from weft.units import PAD, PAGE_TOKENS, BufferId, SeqId, ceil_div

LOAD_SEQS_FROM = 1 << 40
"""First sequence number of loads; those of requests stay below."""
FETCHES_MAX = 16
"""Most fetches at once (law L11)."""
WAIT_S_MIN = 0.05
"""Seconds, shortest deadline of a fetch: clocks and disks are coarse."""
PINNED_WAIT_S = 5.0
"""Seconds, shortest deadline of a pinned prefix, which is read at any price."""
ANSWERS_MAX = 4096
AHEAD_MAX = 16
"""Most waiting requests after the admitted ones whose fetches may begin."""


class FetchState(Enum):
    READING = "reading"
    READY = "ready"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(slots=True)
class Restore:
    """A fetch under way. ``seqs``: requests that wait for it. ``lease``: the sequence number of its load.
    ``loaded_in``: the step that loads it. ``read_bytes``: of its read."""

    key: FetchKey
    prefix: StoredPrefix
    load: SnapshotLoad
    lease: SeqId
    began_s: float
    deadline_s: float
    read_bytes: int
    state: FetchState = FetchState.READING
    seqs: set[SeqId] = field(default_factory=set)
    loaded_in: int = -1

    @property
    def tokens(self) -> Int32s:
        return np.frombuffer(self.prefix.tokens, dtype="<u4").astype(np.int32)

    def reaches(self, cached_tokens: int) -> bool:
        """Return whether the prefix begins at ``cached_tokens`` or before, and goes further."""
        return self.load.start <= _page_floor(cached_tokens) and cached_tokens < self.load.position


class StoreLook(NamedTuple):
    """The stored prefix of a request. ``fetch``: it waits for this one, or loads it. ``wish``: it should wait for a
    fetch that this plan begins. Without both it is admitted with ``match``."""

    match: Match
    fetch: Restore | None = None
    wish: FetchWish | None = None


class _BufferRows(NamedTuple):
    """Rows of a transfer buffer for a fetch: the KV, then a compressed state."""

    kv: tuple[KvRows, ...]
    kv_count: int
    state_count: int

    @property
    def total(self) -> int:
        return self.kv_count + self.state_count


class _FailedFetch(NamedTuple):
    """A failed fetch: the reason, and the end of its prefix, which the store may not have any more."""

    loss: StoreLoss
    position: int


class _Answer(NamedTuple):
    """An answer of the store. ``changes``: of the store so far. ``read_bytes``: of a fetch of ``prefix``."""

    cached_tokens: int
    changes: int
    prefix: StoredPrefix | None
    read_bytes: int


class Restores:
    """The fetches of an engine. ``exact``: inexact prefixes are not used. ``clock`` returns seconds and never goes
    back."""

    def __init__(
        self,
        store: Store,
        buffers: TransferBuffers,
        prices: RestorePrices,
        clock: Callable[[], float],
        *,
        exact: bool,
        is_pinned: Callable[[StoredPrefix], bool] = lambda prefix: False,
    ) -> None:
        self.counts = RestoreCounts()
        self.fetches: dict[FetchKey, Restore] = {}
        self._store = store
        self._buffers = buffers
        self._prices = prices
        self._is_pinned = is_pinned
        self._clock = clock
        self._exact = exact
        self._by_ticket: dict[Ticket, FetchKey] = {}
        self._abandoned: dict[Ticket, BufferId] = {}
        """Fetches that no request waits for; their buffers are the store's until their events."""
        self._loaded: list[BufferId] = []
        """Buffers of published loads, to be freed between two steps."""
        self._ended: dict[SeqId, _FailedFetch | None] = {}
        """Requests whose fetch has ended, with its failure; None after a load."""
        self._answers: dict[SeqId, _Answer] = {}
        self._next_lease = LOAD_SEQS_FROM

    @property
    def has_leases(self) -> bool:
        """Whether a load holds memory."""
        return any(fetch.state in (FetchState.LOADING, FetchState.LOADED) for fetch in self.fetches.values())

    @property
    def next_deadline_s(self) -> float:
        """When the first fetch that is under way is late; infinity without one."""
        return min(
            (nextafter(fetch.deadline_s, inf) for fetch in self.fetches.values() if fetch.state is FetchState.READING),
            default=inf,
        )

    # ------------------------------------------------------------------ in a plan: reads only

    @property
    def may_look_ahead(self) -> bool:
        """Whether one more fetch could begin."""
        return len(self.fetches) + len(self._abandoned) < FETCHES_MAX

    def is_known(self, seq: Sequence) -> bool:
        """Return whether a fetch for ``seq`` is under way or has ended: no further one begins."""
        return seq.id in self._ended or self.fetch_of(seq.id) is not None

    def fetch_of(self, seq: SeqId) -> Restore | None:
        """Return the fetch that ``seq`` waits for."""
        return next((fetch for fetch in self.fetches.values() if seq in fetch.seqs), None)

    def look(self, seq: Sequence, known: Int32s, match: Match, wishes: Iterable[FetchWish], others: int) -> StoreLook:
        """Return the stored prefix of a request and the next action. ``wishes``: those of this plan so far. One plan
        begins one fetch. ``others``: requests that run or wait besides ``seq``."""
        waited_for = self.fetch_of(seq.id)
        if waited_for is not None:
            if waited_for.reaches(match.cached_tokens):
                return StoreLook(match, waited_for)
            return StoreLook(_with_loss(match, waited_for.prefix.position, "store_busy"))
        if seq.id in self._ended:
            failed = self._ended[seq.id]
            return StoreLook(match if failed is None else _with_loss(match, failed.position, failed.loss))
        answer = self._answer(seq, known, match.cached_tokens)
        if answer.prefix is None:
            return StoreLook(match)
        wish = self._wish(seq, answer.prefix, answer, wishes, others)
        if isinstance(wish, FetchWish):
            return StoreLook(match, wish=wish)
        return StoreLook(_with_loss(match, answer.prefix.position, wish))

    def wish_ahead(self, seq: Sequence, known: Int32s, cached_tokens: int, others: int) -> FetchWish | None:
        """Return the fetch that ``seq`` should wait for, before its turn. None: ``look`` decides in its turn, and
        counts the lost tokens.
        """
        answer = self._answer(seq, known, cached_tokens)
        if answer.prefix is None:
            return None
        wish = self._wish(seq, answer.prefix, answer, (), others)
        return wish if isinstance(wish, FetchWish) else None

    def _wish(
        self, seq: Sequence, prefix: StoredPrefix, answer: _Answer, wishes: Iterable[FetchWish], others: int
    ) -> FetchWish | StoreLoss:
        """Return a fetch that begins or is joined, or why there is none."""
        cached_tokens = answer.cached_tokens
        key = FetchKey(seq.salt, prefix.snapshot)
        fetch = self.fetches.get(key)
        if fetch is None and not prefix.near:
            queued = sum(other.read_bytes for other in self.fetches.values() if other.state is FetchState.READING)
            if self._prices.saved_s(
                cached_tokens, prefix.position, answer.read_bytes, others=others, queued_bytes=queued
            ) <= 0 and not self._is_pinned(prefix):
                return "stored"
        wish = FetchWish(seq.id, key, prefix, _page_floor(cached_tokens), others)
        if fetch is not None:
            return wish if fetch.reaches(cached_tokens) else "store_busy"
        if any(other.key not in self.fetches for other in wishes):
            return wish
        rows = _rows_of(wish, self._buffers.page_bytes).total
        if self.may_look_ahead and self._buffers.has_room(rows):
            return wish
        # Records that another engine sent wait until a buffer in use is freed: waiting is cheaper than computing.
        fits = self._buffers.bytes_for(rows) <= self._buffers.limit_bytes
        return wish if prefix.near and fits and (self.fetches or self._loaded) else "store_busy"

    def _answer(self, seq: Sequence, known: Int32s, cached_tokens: int) -> _Answer:
        """Return the stored part beyond ``cached_tokens``; remembered until either changes."""
        answer, changes = self._answers.get(seq.id), self._store.changes
        if answer is None or answer[:2] != (cached_tokens, changes):
            prefix = None
            reusable = seq.reusable(known)[: known.size - 1]
            if reusable.size:
                prefix = self._store.match(seq.salt or None, reusable, cached_tokens)
            if prefix is not None and self._exact and not prefix.exact:
                prefix = None
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            read_bytes = 0 if prefix is None else prefix.bytes_from(_page_floor(cached_tokens))
            answer = self._answers[seq.id] = _Answer(cached_tokens, changes, prefix, read_bytes)
        return answer

    # ------------------------------------------------------------------ by a commit

    def begin(self, wish: FetchWish) -> None:
        """Let a request wait from now on; its fetch begins unless it is under way. A wish without room is dropped, and
        the next plan looks again."""
        fetch = self.fetches.get(wish.key)
        if fetch is None:
            rows = _rows_of(wish, self._buffers.page_bytes)
            if not self.may_look_ahead or not self._buffers.has_room(rows.total):
                return
            fetch = self.fetches[wish.key] = self._begin(wish, rows)
        fetch.seqs.add(wish.seq)

    def _begin(self, wish: FetchWish, rows: _BufferRows) -> Restore:
        prefix, now_s = wish.prefix, self._clock()
        buffer = self._buffers.add(rows.total)
        staging = self._buffers[buffer]
        state_B = staging.pages_PB[rows.kv_count :].reshape(-1) if rows.state_count else staging.state_B
        into = StagingBuffers(
            staging.pages_PB[: rows.kv_count].reshape(-1).data, state_B.data, self._buffers.page_bytes
        )
        ticket = self._store.fetch(prefix, wish.start, into)
        self._by_ticket[ticket] = wish.key
        self._next_lease += 1
        # A record in memory is always copied, even if the machine is busy.
        least_s = PINNED_WAIT_S if self._is_pinned(prefix) else WAIT_S_MIN
        wait_s = inf if prefix.near else max(least_s, self._prices.compute_s(wish.start, prefix.position, wish.others))
        load = SnapshotLoad(
            buffer, wish.start, prefix.position, prefix.exact, rows.kv, rows.kv_count if rows.state_count else PAD
        )
        return Restore(
            wish.key, prefix, load, SeqId(self._next_lease), now_s, now_s + wait_s, prefix.bytes_from(wish.start)
        )

    def loading(self, key: FetchKey, step: int) -> None:
        """Note that step ``step`` loads the fetch ``key``."""
        fetch = self.fetches[key]
        assert fetch.state is FetchState.READY
        fetch.state, fetch.loaded_in = FetchState.LOADING, step

    def published(self, key: FetchKey) -> set[SeqId]:
        """Note that the lease of the load has closed; the tree has its pages and its state. Returns the requests that
        waited for it."""
        fetch = self.fetches.pop(key)
        start, position = fetch.load.start, fetch.load.position
        self.counts.restores += 1
        self.counts.restored_tokens += position - start
        self.counts.saved_s += self._prices.compute_s(start, position) - (self._clock() - fetch.began_s)
        self._ended.update(dict.fromkeys(fetch.seqs))
        self._loaded.append(fetch.load.buffer)
        return fetch.seqs

    def forget(self, seq: SeqId) -> None:
        """Forget ``seq``, which is admitted, or ended while it waited."""
        self._answers.pop(seq, None)
        self._ended.pop(seq, None)
        for key, fetch in list(self.fetches.items()):
            fetch.seqs.discard(seq)
            if not fetch.seqs and fetch.state in (FetchState.READING, FetchState.READY):
                self._abandon(key)

    # ------------------------------------------------------------------ between steps

    def finished(self, step: int) -> None:
        """Note that the loads of steps up to ``step`` have ended."""
        for buffer in self._loaded:
            self._buffers.free(buffer)
        self._loaded.clear()
        for fetch in self.fetches.values():
            if fetch.state is FetchState.LOADING and fetch.loaded_in <= step:
                fetch.state = FetchState.LOADED

    def take(self, event: StoreEvent) -> bool:
        """Take an event, and return whether it is of a fetch."""
        abandoned = self._abandoned.pop(event.ticket, None)
        if abandoned is not None:
            self._buffers.free(abandoned)
            return True
        key = self._by_ticket.pop(event.ticket, None)
        if key is None:
            return False
        fetch = self.fetches[key]
        if event.kind == "fetched":
            fetch.state = FetchState.READY
            arrived_s = min(self._clock(), fetch.began_s + (event.seconds or inf))
            if not fetch.prefix.near:
                self._prices.fetched(event.nbytes, fetch.began_s, arrived_s)
        else:
            self.counts.damaged += event.kind == "damaged"
            self._give_up(key, "damaged" if event.kind == "damaged" else "store_busy")
        return True

    def forget_all(self) -> None:
        """Forget all fetches, whose records are of other weights now. No load holds a lease. Requests that waited look
        again."""
        for buffer in self._loaded:
            self._buffers.free(buffer)
        self._loaded.clear()
        for key in list(self.fetches):
            self._abandon(key)
        self._answers.clear()
        self._ended.clear()

    def end_late(self) -> None:
        """End fetches past their deadline: their requests compute."""
        now_s = self._clock()
        for key, fetch in list(self.fetches.items()):
            if now_s > fetch.deadline_s and fetch.state is FetchState.READING:
                self.counts.late += 1
                self._give_up(key, "store_busy")

    def _give_up(self, key: FetchKey, loss: StoreLoss) -> None:
        fetch = self.fetches[key]
        self._ended.update(dict.fromkeys(fetch.seqs, _FailedFetch(loss, fetch.prefix.position)))
        self._abandon(key)

    def _abandon(self, key: FetchKey) -> None:
        """Abandon a fetch that no request waits for any more."""
        fetch = self.fetches.pop(key)
        ticket = next((ticket for ticket, other in self._by_ticket.items() if other == key), None)
        if ticket is None:
            self._buffers.free(fetch.load.buffer)
        else:
            del self._by_ticket[ticket]
            self._abandoned[ticket] = fetch.load.buffer


def _rows_of(wish: FetchWish, page_bytes: int) -> _BufferRows:
    kv = wish.prefix.rows_from(wish.start, page_bytes)
    state_rows = ceil_div(wish.prefix.state_bytes, page_bytes) if wish.prefix.state_form else 0
    return _BufferRows(kv, kv[-1].first + kv[-1].row_count, state_rows)


def _with_loss(match: Match, position: int, loss: StoreLoss) -> Match:
    tokens = position - match.cached_tokens
    return replace(match, lost=match.lost.but(loss, tokens)) if tokens > 0 else match


def _page_floor(position: int) -> int:
    return position - position % PAGE_TOKENS
