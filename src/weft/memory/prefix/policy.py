"""``Policy``, the replaceable order of evictions: its events and its questions, and the pages that only one snapshot
holds.

    events of a commit     opened  published  saved  duplicated  evicted  child_removed  closed
                           committed (once, at the end)
    between steps          costs    the measured cost of computing a prompt
    questions              recall   what the policy remembers of a prompt; it places snapshots (``taps``)
                           order    the snapshots in memory, the first to evict first

    root --[ 0..512 )--+--[ 512..2048 )  state A     A alone holds its own node: 96 pages; [0..512) is B's too
                       '--[ 512..1024 )--[ 1024..4096 )  state B

A policy ranks and does nothing else. ``eviction.choose`` knows which bytes are short, which data goes with a snapshot,
which must stay, and how much is enough. So a faulty policy makes the cache slower and never breaks a law (L1, L8, L9).
A policy that needs a clock is passed one, and only commits read it, so two identical plans get identical answers.

If two states share all of their KV, neither holds any that the other does not need: evicting either frees only the
state. So the one that is cheaper to compute again goes first, and then the other holds all of that KV. These readings
look at STEPS_MAX nodes at most (law L11): bytes far above a snapshot carry no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weft.memory.prefix.edge import TOKEN_BYTES, Node
from weft.memory.values import NOTHING_RECALLED, Match, NodeId, Recall
from weft.units import PAD, PAGE_TOKENS, SeqId

Clock = Callable[[], float]
"""A clock in seconds that never decreases."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Cost of computing a prompt of n tokens, seconds: ``linear`` n + ``quadratic`` n^2. Only the ratio matters to a
    policy."""

    linear: float = 1.0
    quadratic: float = 0.0

    def between(self, start: int, end: int) -> float:
        """Return the seconds to compute the positions [start, end)."""
        return (end - start) * (self.linear + self.quadratic * (end + start))


def geometric_cost(*, hidden_size: int, attention_layers: int, parameters: float) -> PrefillCost:
    """Return the cost by sizes, in units of the arithmetic of one token. A token takes 2 FLOP per parameter. A pair of
    tokens takes 4 FLOP per channel and attention layer, with ``hidden_size`` channels; half of all pairs count."""
    return PrefillCost(1.0, hidden_size * attention_layers / max(1.0, parameters))


class Policy:
    """A policy by least recent use, without a memory of its own. Others override the methods where they know more."""

    name = "lru"

    def recall(self, salt: str, tokens: bytes) -> Recall:
        """Return the policy's records of a prompt (int32 bytes), cached or evicted. Changes nothing."""
        return NOTHING_RECALLED

    def costs(self, cost: PrefillCost) -> None:
        """Take a new cost of computing; the units are the same."""

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        """Note that ``seq`` opened at the snapshot ``anchor``, or at its first token."""

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        """Note that ``seq`` computed ``tokens`` (int32 bytes) from position ``start`` on, and they entered the tree."""

    def saved(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        """Note that ``seq`` added a snapshot at the end of ``node``. ``rest``: its tokens past the complete pages.
        ``ended``: the snapshot is the running slot of a sequence that closes."""

    def duplicated(self, node: Node) -> None:
        """Note that a second snapshot for the end of ``node`` was dropped as a duplicate."""

    def evicted(self, node: Node) -> None:
        """Note that the snapshot of ``node`` is evicted, right after this returns."""

    def closed(self, seq: SeqId, node: Node | None) -> None:
        """Note that ``seq`` closed; it read the pages up to ``node``."""

    def child_removed(self, node: Node) -> None:
        """Note that a child of ``node`` was removed: more KV now belongs only to its snapshot above, or to the only one
        below."""

    def committed(self) -> None:
        """Do bounded upkeep, as the commit is done."""

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        """Return the snapshots ``states``, given in order of use, in the order of their eviction. It may name too
        few. Reads only; may be called often."""
        return iter(states.values())

    def uses_of(self, node: Node) -> float | None:
        """Return the expected uses of the snapshot of ``node`` from now on; None in a policy that does not know."""
        return None


STEPS_MAX = 64


def snapshot_above(node: Node) -> Node | None:
    """Return the nearest snapshot on the path above ``node``; a tail along its tokens counts. None: no snapshot
    is near."""
    child = node
    for _ in range(STEPS_MAX):
        above = child.parent
        if above is None:
            return None
        tail = _tail_towards(above, child) if above.tail_count else None
        if tail is not None:
            return tail
        if above.slot != PAD:
            return above
        child = above
    return None


def snapshot_at_or_above(node: Node) -> Node | None:
    return node if node.slot != PAD else snapshot_above(node)


def only_snapshot_below(node: Node) -> Node | None:
    """Return the nearest snapshot below ``node``, if a single path leads down to it."""
    descendant = node
    for _ in range(STEPS_MAX):
        if len(descendant.children) != 1:
            return None
        descendant = next(iter(descendant.children.values()))
        if descendant.slot != PAD:
            return descendant
    return None


def pages_alone(node: Node) -> int:
    """Return the number of pages that no request could use without the snapshot of ``node``."""
    if node.children or node.holds:
        return 0
    pages, ancestor = node.page_count, node.parent
    for _ in range(STEPS_MAX):
        if (
            ancestor is None
            or ancestor.parent is None
            or ancestor.slot != PAD
            or ancestor.holds
            or len(ancestor.children) > 1
        ):
            break
        pages += ancestor.page_count
        ancestor = ancestor.parent
    return pages


def _tail_towards(node: Node, child: Node) -> Node | None:
    """Return the longest tail of ``node`` along the tokens of its child ``child``."""
    key = child.key
    for length in range(min(len(key), PAGE_TOKENS * TOKEN_BYTES) - TOKEN_BYTES, 0, -TOKEN_BYTES):
        tail = node.children.get(key[:length])
        if tail is not None:
            return tail
    return None
