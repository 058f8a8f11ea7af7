"""The policy ``worth``: give up first what saves the fewest seconds per byte and second held.

    value = index  x  (seconds to compute from the state before it)  /  (its bytes + KV bytes only it needs)

    index      expected uses per second held, at the best time to give it up    gittins, hazard, features
    seconds    linear + quadratic prefill cost                                  PrefillCost
    bytes      what would be free without it                                    holdings

One currency for all that is kept: the end of a conversation, the beginning that a thousand requests share,
the middle of a document. The index is learned from what is used again, and when, of what is there and of
what is gone: a *ghost* is remembered until it is GHOST_S old, and a request that would have used it counts.
Nothing is set for a kind of traffic; what is constant here are bounds, priors that a few dozen uses
outweigh, and the grain of tables.

A ghost also leaves its prospects to the state before it (its *heir*): who comes back to an evicted end
begins there.

How it stays cheap (law L11). Values change with age, so no order stays right. Every SWEEP_EVERY requests a
*sweep* takes the next SWEEP_ROWS records at once, as arrays: counts their waiting, values them, and puts the
lowest of those into a *pool* of candidates; the pool alone is valued again with each request. What a commit
touched is valued at its end. ``order`` takes the lowest of the pool, values it again as it is now, and names
it later when it has become worth more. So nothing is sorted or scanned when memory is short.

What it cannot see: models without recurrent layers have no checkpoints (their KV goes by recency); a
sequence that is preempted leaves a state that looks like the end of a request.

Rejected: hazard without the index (worth a tenth less at some sizes: what is soon needed and not yet is
dropped); no ghosts, no heirs, no bytes in the value (each worse, see docs/decisions); kinds by temperature,
superseded ends, a deepest ghost as a place to keep states (change nothing); a heap of all (every age bin
moves every entry).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log2

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.holdings import kept_above, kept_at_or_above, kept_only_below, pages_alone
from weft.memory.prefix.policy import Clock, PrefillCost
from weft.memory.prefix.tree import Node
from weft.memory.prefix.value.features import CODE_COUNT, Codes, Kind, codes_of_new, codes_of_used
from weft.memory.prefix.value.gittins import index_table
from weft.memory.prefix.value.hazard import FACTOR_MAX, WIDTHS, Hazard, bin_of, bins_of
from weft.memory.prefix.value.history import History
from weft.memory.prefix.value.pool import Pool
from weft.memory.prefix.value.records import Records
from weft.memory.values import NOTHING_RECALLED, Match, NodeId, Recall
from weft.units import PAD, SeqId

GHOST_S = 600.0
"""Seconds after its last use at which what is gone is forgotten."""
GHOSTS_MAX = 16384
HISTORY_SHARE = 256
"""The history takes at most one byte of tokens in so many of the arena."""
HISTORY_TOKENS_MIN = 1 << 20
SWEEP_EVERY = 32
SWEEP_ROWS = 4096
POOL_ROWS = 256
POOL_LOW = 64
FORGET_PER_COMMIT = 64
_TRIES = 32
"""Candidates that are valued anew for one that is named."""
_CLOSE = 1.02
"""What is worth so little more than it was keeps its place."""
_STEPS_PER_OCTAVE = 2
_OCTAVES = int(log2(FACTOR_MAX))
_STEPS = _OCTAVES * _STEPS_PER_OCTAVE
_FACTORS = 2.0 ** (np.arange(-_STEPS, _STEPS + 1) / _STEPS_PER_OCTAVE)
_GAP_MEMORY = 0.7
_LAST_SHARE = 8
_LAST_TOKENS = 512
"""A state so many tokens and such a share of the prompt before its end, or less, is at its end."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Context:
    """Of a running request: its prompt when it was looked up, how much of it had been seen, and how many
    answers were gone on from to come to it."""

    prompt_tokens: int
    seen_tokens: int
    turn: int


class ValuePolicy:
    """See the module. ``clock`` is read by commits, and only by those in which a sequence comes, goes or
    leaves something, or something is evicted: what is planned between two of them sees one time, and steps
    that change nothing can be left out of a simulation."""

    name = "worth"

    def __init__(self, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> None:
        self._cost = cost
        self._clock = clock
        self._now_s = clock()
        self._page_bytes = plan.page_bytes
        self._slot_bytes = plan.slot_stride_bytes
        self._history_tokens_max = max(HISTORY_TOKENS_MIN, plan.arena_bytes // (4 * HISTORY_SHARE))
        self._hazard = Hazard(len(Kind), CODE_COUNT)
        self._tables: Floats = np.zeros(0)
        self._table: list[float] = []
        """The index by kind, step of the factor and age, in that order; both are the same, for many at once
        and for one."""
        self._history = History()
        self._records = Records()
        self._rows: dict[NodeId, int] = {}
        self._contexts: dict[SeqId, _Context] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Rows of what is gone, the longest unused first."""
        self._touched: dict[int, None] = {}
        """Rows to value at the end of the commit."""
        self._outdated: dict[int, None] = {}
        """Rows that readers found to be worth more than they were: the next commit values them."""
        self._pool = Pool()
        self._swept_rows = 0
        self._opened_since = 0
        self._refreshed_at = 0
        """``_opened_since`` when the pool was valued last."""
        self._learn()

    # ------------------------------------------------------------------ reading

    def recall(self, salt: str, tokens: bytes) -> Recall:
        seen, row = self._history.find(salt, tokens)
        return Recall(len(tokens) // 4, seen, row) if tokens else NOTHING_RECALLED

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        tries = 0
        risen: list[tuple[float, int]] = []
        for value, row in self._pool.ranked():
            while risen and risen[0][0] <= value:
                yield self._there(heappop(risen)[1])
                tries = 0
            node = self._there(row)
            if tries < _TRIES:
                tries += 1
                now = self._value(row, self._rate(node))
                if now > value * _CLOSE:
                    heappush(risen, (now, row))
                    self._outdated[row] = None
                    continue
            tries = 0
            yield node
        while risen:
            yield self._there(heappop(risen)[1])

    def _there(self, row: int) -> Node:
        node = self._records.nodes[row]
        assert node is not None, f"candidate {row} is of a state that is gone"
        return node

    # ------------------------------------------------------------------ told, by a commit

    def costs(self, cost: PrefillCost) -> None:
        self._cost = cost

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        recall, records = match.recall, self._records
        self._now_s = self._clock()
        self._opened_since += 1
        rows = [recall.row] if recall.row != PAD and records.used[recall.row] else []
        turn = records.turns[rows[0]] + 1 if rows and records.origins[rows[0]] is Kind.END else 0
        seen_tokens = max(recall.seen_tokens, match.cached_tokens)
        self._contexts[seq] = _Context(recall.prompt_tokens, seen_tokens, turn)
        here = self._rows.get(anchor.id) if anchor is not None else None
        if here is not None:
            place = records.places[here]
            assert place is not None
            self._history.opened(seq, place)
            if here not in rows:
                rows.append(here)
        for row in rows:
            self._use(row)

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        self._now_s = self._clock()
        self._history.published(seq, salt, start, tokens)

    def kept(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        place = self._history.place(seq, node.end, rest)
        if place is None:
            return
        row = int(place.slot)
        if row == PAD:
            context = self._contexts.get(seq) or _Context(node.end, 0, 0)
            kind, codes = _what(context, node.end, ended=ended)
            row = self._records.add(kind, codes, context.turn, place, self._now_s)
            self._weigh(row, kind, codes)
            if kind is Kind.USED:
                self._records.uses[row] = 1
            self._history.record(place, row)
        self._ghosts.pop(row, None)
        self._records.live[row] = True
        self._records.nodes[row] = node
        self._rows[node.id] = row
        self._touched[row] = None
        self._touch(kept_above(node))
        self._touch(kept_only_below(node))

    def again(self, node: Node) -> None:
        pass

    def evicted(self, node: Node) -> None:
        row = self._rows.pop(node.id, None)
        if row is None:
            return
        self._now_s = self._clock()
        self._count_waiting(row)
        self._records.live[row] = False
        self._records.nodes[row] = None
        self._pool.drop(row)
        self._ghosts[row] = None
        above = kept_above(node)
        heir_of = self._rows.get(above.id) if above is not None else None
        if heir_of is not None:
            best = max((ghost for ghost in (row, self._heir(row), self._heir(heir_of)) if ghost != PAD),
                       key=self._index)
            self._records.heirs[heir_of] = best
            self._touched[heir_of] = None

    def left(self, seq: SeqId, node: Node | None) -> None:
        self._now_s = self._clock()
        self._contexts.pop(seq, None)
        self._history.left(seq)
        self._touch(kept_at_or_above(node) if node is not None else None)

    def narrowed(self, node: Node) -> None:
        self._touch(kept_at_or_above(node))
        self._touch(kept_only_below(node))

    def committed(self) -> None:
        if self._touched or self._outdated:
            self._revalue()
            self._forget()
            if len(self._pool) < min(POOL_LOW, len(self._rows)):
                self._opened_since = SWEEP_EVERY
        if self._opened_since == self._refreshed_at:
            return
        if self._opened_since >= SWEEP_EVERY:
            self._opened_since = self._refreshed_at = 0
            self._sweep()
        else:
            self._refreshed_at = self._opened_since
            self._refresh()

    def _touch(self, node: Node | None) -> None:
        """What only the checkpoint of ``node`` needs is more or less than it was."""
        row = self._rows.get(node.id) if node is not None else None
        if row is not None:
            self._touched[row] = None

    # ------------------------------------------------------------------ learning

    def _use(self, row: int) -> None:
        """A request began there, or would have."""
        records = self._records
        age_s = self._now_s - records.born_s.item(row)
        self._count_waiting(row)
        self._hazard.used(records.kinds.item(row), records.codes_of(row), age_s)
        before = records.gaps_s[row]
        records.gaps_s[row] = age_s if before is None else _GAP_MEMORY * before + (1 - _GAP_MEMORY) * age_s
        records.uses[row] += 1
        codes = codes_of_used(uses=records.uses[row], mean_gap_s=records.gaps_s[row],
                              origin=records.origins[row], turn=records.turns[row])
        records.become(row, Kind.USED, codes, self._now_s)
        self._weigh(row, Kind.USED, codes)
        if records.nodes[row] is not None:
            self._touched[row] = None
        else:
            self._ghosts.move_to_end(row)

    def _count_waiting(self, row: int) -> None:
        records, now_s = self._records, self._now_s
        born_s = records.born_s.item(row)
        self._hazard.one_waited(records.kinds.item(row), records.codes_of(row), records.factors.item(row),
                                records.counted_s.item(row) - born_s, now_s - born_s)
        records.counted_s[row] = now_s

    def _count_rows(self, rows: Ints) -> None:
        records = self._records
        born = records.born_s[rows]
        self._hazard.waited(records.kinds[rows], records.codes[rows], records.factors[rows],
                            records.counted_s[rows] - born, self._now_s - born)
        records.counted_s[rows] = self._now_s

    def _learn(self) -> None:
        self._hazard.learn()
        self._tables = np.concatenate([index_table(rates, WIDTHS, _FACTORS).ravel()
                                       for rates in self._hazard.rates])
        self._table = self._tables.tolist()

    def _weigh(self, row: int, kind: Kind, codes: Codes) -> None:
        """Its features say something else now."""
        self._records.factors[row] = factor = self._hazard.factor_of(codes)
        step = round((log2(factor) + _OCTAVES) * _STEPS_PER_OCTAVE)
        self._records.tables[row] = (kind * len(_FACTORS) + step) * len(WIDTHS)

    def _weigh_rows(self, rows: Ints) -> None:
        records = self._records
        records.factors[rows] = factors = self._hazard.factors_of(records.codes[rows])
        steps = np.rint((np.log2(factors) + _OCTAVES) * _STEPS_PER_OCTAVE).astype(np.int64)
        records.tables[rows] = (records.kinds[rows] * len(_FACTORS) + steps) * len(WIDTHS)

    def _forget(self) -> None:
        """Ghosts that are too old, too many, or whose tokens are."""
        for _ in range(FORGET_PER_COMMIT):
            row = next(iter(self._ghosts), None)
            if row is None or (self._now_s - self._records.born_s.item(row) <= GHOST_S
                               and len(self._ghosts) <= GHOSTS_MAX
                               and self._history.token_count <= self._history_tokens_max):
                return
            del self._ghosts[row]
            self._count_waiting(row)
            place = self._records.places[row]
            assert place is not None
            self._history.forget(place)
            self._records.remove(row)

    # ------------------------------------------------------------------ valuing

    def _revalue(self) -> None:
        """What this commit, or who read since the last one, found to be worth more or less than it was."""
        self._touched.update(self._outdated)
        for row in self._touched:
            node = self._records.nodes[row]
            if node is not None:
                self._records.rates[row] = rate = self._rate(node)
                self._pool.put(row, self._value(row, rate))
        self._touched.clear()
        self._outdated.clear()

    def _sweep(self) -> None:
        records = self._records
        first = self._swept_rows if self._swept_rows < records.count else 0
        self._swept_rows = first + SWEEP_ROWS
        rows = records.rows(first, min(self._swept_rows, records.count))
        self._count_rows(rows)
        self._learn()
        self._weigh_rows(rows)
        others = self._pool.rows
        others = others[(others < first) | (others >= self._swept_rows)]
        self._fill_pool(np.concatenate([rows, others]), POOL_ROWS)

    def _refresh(self) -> None:
        """Value the candidates, a few hundred, as they are now: most are worth less, being older."""
        self._fill_pool(self._pool.rows, len(self._pool))

    def _fill_pool(self, rows: Ints, most: int) -> None:
        rows = rows[self._records.live[rows]]
        self._pool.fill(rows, self._values(rows), most)

    def _rate(self, node: Node) -> float:
        """Seconds that a use of the state at ``node`` saves, by byte that only it needs; as things are."""
        above = kept_above(node)
        saved = self._cost.between(above.end if above is not None else 0, node.end)
        return saved / (self._slot_bytes + pages_alone(node) * self._page_bytes)

    def _value(self, row: int, rate: float) -> float:
        heir = self._heir(row)
        index = self._index(row)
        return (index if heir == PAD else max(index, self._index(heir))) * rate

    def _values(self, rows: Ints) -> Floats:
        """``_value`` of many, with rates as they were when something last touched them."""
        records = self._records
        values = self._indexes(rows)
        heirs = records.heirs[rows]
        inherits = np.flatnonzero(heirs != PAD)
        inherits = inherits[records.ghosts(heirs[inherits])]
        values[inherits] = np.maximum(values[inherits], self._indexes(heirs[inherits]))
        return values * records.rates[rows]

    def _heir(self, row: int) -> int:
        heir: int = self._records.heirs.item(row)
        return heir if heir != PAD and self._records.nodes[heir] is None else PAD

    def _index(self, row: int) -> float:
        records = self._records
        return self._table[records.tables.item(row) + bin_of(self._now_s - records.born_s.item(row))]

    def _indexes(self, rows: Ints) -> Floats:
        records = self._records
        indexes: Floats = self._tables[records.tables[rows] + bins_of(self._now_s - records.born_s[rows])]
        return indexes


def _what(context: _Context, position: int, *, ended: bool) -> tuple[Kind, Codes]:
    """What a new state of the request at ``position`` is."""
    if not ended and position <= context.seen_tokens:
        return Kind.USED, codes_of_used(uses=1, mean_gap_s=None, origin=Kind.USED, turn=context.turn)
    kind, answer = Kind.END, position - context.prompt_tokens + 1
    if not ended:
        behind = context.prompt_tokens - position
        kind = Kind.LAST if behind <= context.prompt_tokens // _LAST_SHARE + _LAST_TOKENS else Kind.WAY
    return kind, codes_of_new(kind, prompt_tokens=context.prompt_tokens, known_tokens=context.seen_tokens,
                              answer_tokens=max(0, answer) if ended else None)
