"""What leaves the prefix cache first, as a part that can be changed: what a policy is told, and what it is
asked.

    told, by a commit      opened  published  kept  evicted  narrowed  left  committed (once, at its end)
    told, between steps    costs    what computing a prompt was measured to cost
    asked, reading         recall   what it remembers of a prompt, for where states should be kept (``taps``)
                           order    of the checkpoints that are there: which should go first

A policy ranks and nothing else. Which bytes are short, what falls with a checkpoint, what must be left alone
and how much is enough are ``eviction.choose``'s: it skips what is not there, takes nothing twice, and when a
policy names too few it goes on by recency. So a policy with a bug makes worse choices and never a wrong one
(laws L1, L8, L9).

The pure half has no clock: one is passed in, and read by commits only, so that a plan asked for twice is the
same twice.

    lru        least recently used, as ``Recency`` has them
    marconi    recency and FLOP per byte (marconi.py)
    worth      seconds saved per byte (worth/)

Rejected: a policy that evicts (every policy would have to keep every law); one that is asked about pages
(bare KV of a model with states is of no use to anybody and goes first; without states it is LRU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.memory.prefix.tree import Node
from weft.memory.values import NOTHING_RECALLED, Match, NodeId, Recall
from weft.units import SeqId

Clock = Callable[[], float]
"""Seconds; never goes back."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds to compute a prompt of n tokens: ``linear`` n + ``quadratic`` n^2. Only their ratio matters to
    a policy."""

    linear: float = 1.0
    quadratic: float = 0.0

    def between(self, start: int, end: int) -> float:
        """Of the positions [start, end)."""
        return (end - start) * (self.linear + self.quadratic * (end + start))


def geometric_cost(*, hidden_size: int, attention_layers: int, parameters: float) -> PrefillCost:
    """From sizes alone, in units of the arithmetic of one token: 2 FLOP per parameter, and per pair of
    tokens and attention layer 4 FLOP per channel, with as many channels as the model is wide; half of all
    pairs count."""
    return PrefillCost(1.0, hidden_size * attention_layers / max(1.0, parameters))


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def recall(self, salt: str, tokens: bytes) -> Recall:
        """What is remembered of a prompt (int32 bytes), here or gone; reads only."""
        ...

    def costs(self, cost: PrefillCost) -> None:
        """From now on computing costs this, in the units of before."""
        ...

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        """``seq`` begins at the checkpoint ``anchor``, or at its first token."""
        ...

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        """``seq`` has computed ``tokens`` (int32 bytes) from position ``start`` on: they are in the tree
        now."""
        ...

    def kept(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        """``seq`` left a checkpoint at the end of ``node``, a new one; ``rest``: tokens of it beyond whole
        pages; ``ended``: its running state, as it went."""
        ...

    def again(self, node: Node) -> None:
        """One was left where there was one already."""
        ...

    def evicted(self, node: Node) -> None:
        """The checkpoint of ``node`` goes; it is there until this returns."""
        ...

    def left(self, seq: SeqId, node: Node | None) -> None:
        """``seq`` ended; it read the pages up to ``node``."""
        ...

    def narrowed(self, node: Node) -> None:
        """A child of ``node`` is gone: what is above, or the only thing below, holds more by itself now."""
        ...

    def committed(self) -> None:
        """The commit is done; for upkeep, bounded."""
        ...

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        """Of the checkpoints ``states``, which are in order of use, the ones to give up, the first first. It
        may name too few. Reads only, and may be asked often."""
        ...


class LeastRecentlyUsed:
    name = "lru"

    def recall(self, salt: str, tokens: bytes) -> Recall:
        return NOTHING_RECALLED

    def costs(self, cost: PrefillCost) -> None:
        pass

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        pass

    def published(self, seq: SeqId, salt: str, start: int, tokens: bytes) -> None:
        pass

    def kept(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        pass

    def again(self, node: Node) -> None:
        pass

    def evicted(self, node: Node) -> None:
        pass

    def left(self, seq: SeqId, node: Node | None) -> None:
        pass

    def narrowed(self, node: Node) -> None:
        pass

    def committed(self) -> None:
        pass

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        return iter(states.values())
