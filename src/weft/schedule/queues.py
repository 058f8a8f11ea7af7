"""Sequences in rank order: both the waiting queue and the set of running ones.

A sorted list and binary search. The numbers are small: at most ``queue_max`` + ``rows_max``. To move a
thousand pointers costs less than one step's bookkeeping in a heap. A heap also cannot remove from its middle:
a cancelled entry would stay as a tombstone, and a queue of tombstones has no bound (law L11). """

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from weft.schedule.sequence import Rank, Sequence


class RankedQueue:
    """Ordered by ``Sequence.rank``; ranks are unique. Iteration is best first."""

    __slots__ = ("_ranks", "_seqs")

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def after(self, seq: Sequence) -> Iterator[Sequence]:
        """Those behind ``seq``, best first."""
        for at in range(bisect_left(self._ranks, seq.rank) + 1, len(self._seqs)):
            yield self._seqs[at]

    def __contains__(self, seq: Sequence) -> bool:
        at = bisect_left(self._ranks, seq.rank)
        return at < len(self._seqs) and self._seqs[at] is seq

    def add(self, seq: Sequence) -> None:
        at = bisect_left(self._ranks, seq.rank)
        assert at == len(self._ranks) or self._ranks[at] != seq.rank, f"rank {seq.rank} is taken"
        self._ranks.insert(at, seq.rank)
        self._seqs.insert(at, seq)

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._ranks, seq.rank)
        assert at < len(self._seqs), f"{seq} is not queued here"
        assert self._seqs[at] is seq, f"{seq} is not queued here"
        del self._ranks[at]
        del self._seqs[at]

    def audit(self) -> None:
        assert self._ranks == sorted(set(self._ranks))
        assert self._ranks == [seq.rank for seq in self._seqs]
