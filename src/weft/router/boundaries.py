"""Where prompts part anywhere in the fleet: a boundary for every engine, at first sight.

    replica 0   [ system prompt | tools | question 1 ]
    replica 1   [ system prompt | tools | question 2 ]      parts from the first one behind the tools
                                        ^ boundary: replica 1 saves a state here, though it sees the
                                          prefix for the first time

An engine sees a fork only between prompts that it computed itself. A fleet divides the prompts, so each
engine would compute a shared prefix once more before it saves a state at its end. The router sees all
prompts. It adds two kinds of boundary to a request: the deepest position up to which any earlier prompt was
the same, and positions on its path where earlier prompts parted.

Positions are multiples of 64, the grid of states. Digests of prompts are stored in two generations of at most
SEEN_MAX: when the young one is full it becomes the old one, and what no prompt repeats in the meantime is
forgotten (law L11). A prompt enters all its digests, so what was seen is a prefix of them and is bisected.

Rejected: a message to all engines (the next request that passes the boundary carries it, and no other one
needs it).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.units import CHUNK_TOKENS

SEEN_MAX = 200_000
FORKS_MAX = 20_000
BOUNDARIES_MAX = 8
"""Boundaries that one request gets, the deepest ones."""


class Boundaries:
    def __init__(self) -> None:
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._forks: dict[int, None] = {}

    def of(self, digests: Sequence[int]) -> tuple[int, ...]:
        """Positions of a prompt whose whole chunks have ``digests``, the deepest first."""
        depth = self._seen_depth(digests)
        positions = [at + 1 for at, digest in enumerate(digests[:depth]) if digest in self._forks]
        if depth and depth not in positions[-1:]:
            positions.append(depth)
        return tuple(CHUNK_TOKENS * at for at in reversed(positions[-BOUNDARIES_MAX:]))

    def add(self, digests: Sequence[int]) -> None:
        """A prompt with ``digests`` is placed."""
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
        """How many of ``digests`` an earlier prompt had."""
        young, old = self._young, self._old
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in young or digests[middle] in old:
                low = middle + 1
            else:
                high = middle
        return low
