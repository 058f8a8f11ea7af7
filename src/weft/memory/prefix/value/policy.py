"""The value policy: evict first the states that save the fewest seconds per byte and second held.

    value = index  x  (seconds to compute from the snapshot above)  /  (slot bytes + KV bytes only it needs)

    events of a commit --> records, history (what is remembered)
                       --> prospects (what each record is worth) --> candidates (the lowest values)
    order              <-- candidates, each valued again as it is named

One currency covers everything in the cache: the end of a conversation, the prefix that a thousand requests
share, the middle of a document. The index (``hazard``) is learned from uses: which states are used again, and
when. Evicted states teach as well. A *ghost* is the record of an evicted state. It is remembered for GHOST_S
seconds, and a request that would have used the state counts. A snapshot leaves its prospects to the snapshot above,
the *heir*: a request that returns to an evicted end begins there. Constants are bounds, steps of tables,
and priors that a few dozen uses outweigh.

``order`` walks the candidates from the lowest value up, values each again at the present time, and names it
later if its value rose. So nothing is sorted or scanned while memory is short.

Limits: a model without recurrent layers has no snapshots, and its KV goes by recency. A preempted sequence
leaves a state that looks like the end of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.prefix.policy import (
    Clock,
    Policy,
    PrefillCost,
    only_snapshot_below,
    snapshot_above,
    snapshot_at_or_above,
)
from weft.memory.prefix.value.candidates import Candidates
from weft.memory.prefix.value.hazard import Codes, Kind, codes_of_new, codes_of_used
from weft.memory.prefix.value.history import History
from weft.memory.prefix.value.prospects import Prospects, Records
from weft.memory.values import NOTHING_RECALLED, Match, NodeId, Recall
from weft.units import PAD, SeqId

GHOST_S = 600.0
"""Seconds after its last use at which a ghost is forgotten."""
GHOSTS_MAX = 16384
HISTORY_SHARE = 256
"""Bytes of the arena per byte of tokens in the history, at least."""
HISTORY_TOKENS_MIN = 1 << 20
FORGET_PER_COMMIT = 64
_TRIES = 32
"""Most candidates that are valued again for each one that is named."""
_CLOSE = 1.02
"""Factor by which a candidate's value may rise before it loses its place."""
_LAST_SHARE = 8
_LAST_TOKENS = 512
"""Tokens that may follow a state at the end of its prompt, in addition to an eighth of the prompt."""


@dataclass(frozen=True, slots=True)
class _Context:
    """A running request: the length of its prompt at lookup, how much of that was seen before, and how many
    answers of the conversation precede it."""

    prompt_tokens: int
    seen_tokens: int
    turn: int


class ValuePolicy(Policy):
    """The policy; see the module. Only commits read ``clock``, and only those in which a sequence opens, closes or
    publishes, or a snapshot is evicted. All plans between two of them see one time, so a simulation can skip steps that
    change nothing."""

    name = "value"

    def __init__(self, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> None:
        self._clock = clock
        self._history_tokens_max = max(HISTORY_TOKENS_MIN, plan.arena_bytes // (4 * HISTORY_SHARE))
        self._history = History()
        self._records = Records()
        self._prospects = Prospects(plan, cost, self._records, clock())
        self._candidates = Candidates(self._records, self._prospects)
        self._rows: dict[NodeId, int] = {}
        self._contexts: dict[SeqId, _Context] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Rows of evicted states, the longest unused first."""
        self._touched: dict[int, None] = {}
        """Rows to value at the end of the commit."""
        self._outdated: dict[int, None] = {}
        """Rows with a value that ``order`` saw rise: the next commit values them."""

    # ------------------------------------------------------------------ reading

    def recall(self, salt: str, tokens: bytes) -> Recall:
        seen, row = self._history.find(salt, tokens)
        return Recall(len(tokens) // 4, seen, row) if tokens else NOTHING_RECALLED

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        tries = 0
        risen: list[tuple[float, int]] = []
        prospects = self._prospects
        for value, row in self._candidates.ranked():
            while risen and risen[0][0] <= value:
                yield self._node_of(heappop(risen)[1])
                tries = 0
            node = self._node_of(row)
            if tries < _TRIES:
                tries += 1
                now = prospects.value(row, prospects.rate(node))
                if now > value * _CLOSE:
                    heappush(risen, (now, row))
                    self._outdated[row] = None
                    continue
            tries = 0
            yield node
        while risen:
            yield self._node_of(heappop(risen)[1])

    def candidates(self) -> Iterator[tuple[Node, float]]:
        """Return the candidates for eviction with the values at which they are ranked, the lowest first."""
        return ((self._node_of(row), value) for value, row in self._candidates.ranked())

    def uses_of(self, node: Node) -> float | None:
        row = self._rows.get(node.id)
        return None if row is None else self._prospects.uses(row)

    def audit(self, states: Mapping[NodeId, Node]) -> None:
        """Raise AssertionError where the records and the snapshots ``states`` do not agree."""
        records = self._records
        assert set(self._rows) == set(states), "a snapshot has no record, or a record has no snapshot"
        live = [row for row, node in enumerate(records.nodes) if node is not None]
        assert sorted(self._rows.values()) == live, "two snapshots share a record"
        assert live == np.flatnonzero(records.live).tolist(), "the column of live records is wrong"
        assert self._ghosts.keys().isdisjoint(live), "a ghost is of a snapshot in memory"
        for row in (*live, *self._ghosts):
            place = records.places[row]
            assert place is not None, f"record {row} has no place in the history"
            assert place.slot == row, f"record {row} is at the place of record {place.slot}"

    def _node_of(self, row: int) -> Node:
        node = self._records.nodes[row]
        assert node is not None, f"candidate {row} is of an evicted state"
        return node

    # ------------------------------------------------------------------ events of a commit

    def costs(self, cost: PrefillCost) -> None:
        self._prospects.cost = cost

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        recall, records = match.recall, self._records
        self._prospects.now_s = self._clock()
        self._candidates.opened()
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
            self._prospects.use(row)
            if records.nodes[row] is not None:
                self._touched[row] = None
            else:
                self._ghosts.move_to_end(row)

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        self._prospects.now_s = self._clock()
        self._history.published(seq, salt, start, tokens)

    def saved(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        place = self._history.place(seq, node.end, rest)
        if place is None:
            return
        row = int(place.slot)
        if row == PAD:
            context = self._contexts.get(seq) or _Context(node.end, 0, 0)
            kind, codes = _features(context, node.end, ended=ended)
            row = self._records.add(kind, codes, context.turn, place, self._prospects.now_s)
            self._prospects.weigh(row, kind, codes)
            if kind is Kind.USED:
                self._records.uses[row] = 1
            self._history.record(place, row)
        self._ghosts.pop(row, None)
        self._records.live[row] = True
        self._records.nodes[row] = node
        self._rows[node.id] = row
        self._touched[row] = None
        self._touch(snapshot_above(node))
        self._touch(only_snapshot_below(node))

    def evicted(self, node: Node) -> None:
        row = self._rows.pop(node.id, None)
        if row is None:
            return
        prospects, records = self._prospects, self._records
        prospects.now_s = self._clock()
        prospects.count_waiting(row)
        records.live[row] = False
        records.nodes[row] = None
        self._candidates.drop(row)
        self._ghosts[row] = None
        above = snapshot_above(node)
        heir_of = self._rows.get(above.id) if above is not None else None
        if heir_of is not None:
            ghosts = (row, prospects.heir(row), prospects.heir(heir_of))
            records.heirs[heir_of] = max((ghost for ghost in ghosts if ghost != PAD), key=prospects.index)
            self._touched[heir_of] = None

    def closed(self, seq: SeqId, node: Node | None) -> None:
        self._prospects.now_s = self._clock()
        self._contexts.pop(seq, None)
        self._history.closed(seq)
        self._touch(snapshot_at_or_above(node) if node is not None else None)

    def child_removed(self, node: Node) -> None:
        self._touch(snapshot_at_or_above(node))
        self._touch(only_snapshot_below(node))

    def committed(self) -> None:
        if self._touched or self._outdated:
            self._revalue()
            self._forget()
            self._candidates.sweep_if_few(len(self._rows))
        self._candidates.update()

    def _touch(self, node: Node | None) -> None:
        """Touch the record of ``node``, as the pages that only its snapshot needs have changed."""
        row = self._rows.get(node.id) if node is not None else None
        if row is not None:
            self._touched[row] = None

    def _revalue(self) -> None:
        """Revalue the rows that this commit touched and those that ``order`` saw rise."""
        self._touched.update(self._outdated)
        for row in self._touched:
            node = self._records.nodes[row]
            if node is not None:
                self._candidates.put(row, self._prospects.rate(node))
        self._touched.clear()
        self._outdated.clear()

    def _forget(self) -> None:
        """Forget ghosts that are too old, too many, or have too many tokens in the history."""
        for _ in range(FORGET_PER_COMMIT):
            row = next(iter(self._ghosts), None)
            if row is None or (
                self._prospects.now_s - self._records.born_s.item(row) <= GHOST_S
                and len(self._ghosts) <= GHOSTS_MAX
                and self._history.token_count <= self._history_tokens_max
            ):
                return
            del self._ghosts[row]
            self._prospects.count_waiting(row)
            place = self._records.places[row]
            assert place is not None
            self._history.forget(place)
            self._records.remove(row)


def _features(context: _Context, position: int, *, ended: bool) -> tuple[Kind, Codes]:
    """Return kind and codes of a new state of the request at ``position``."""
    if not ended and position <= context.seen_tokens:
        return Kind.USED, codes_of_used(uses=1, mean_gap_s=None, origin=Kind.USED, turn=context.turn)
    kind, answer = Kind.END, position - context.prompt_tokens + 1
    if not ended:
        behind = context.prompt_tokens - position
        kind = Kind.LAST if behind <= context.prompt_tokens // _LAST_SHARE + _LAST_TOKENS else Kind.WAY
    return kind, codes_of_new(
        kind,
        prompt_tokens=context.prompt_tokens,
        known_tokens=context.seen_tokens,
        answer_tokens=max(0, answer) if ended else None,
    )
