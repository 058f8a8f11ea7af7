"""Sequences of several API keys: they take turns, and ``priority`` orders those of one key.

    waiting    A (used 9.1 s): a1 a2 a3      B (used 9.0 s): b1         b1 a1 a2 a3
    running    A: a1 a2 a3                   B: b1 b2                   a1 b1 a2 b2 a3     victims: a tail

Waiting sequences are ordered by the seconds of the engine that their key has used (deficit round robin): the key with
the fewest is next, and a sequence counts as the mean of all before it is measured. A key that comes back begins where
the others are, so time without requests gives no credit. Running ones take turns by number: the key with most rows has
a victim first.

A ``priority`` above 0 yields to every key. One below 0 goes before others of only its own key, or of all keys with
``--priority-across-keys``. With one key the order is that of ``RankedQueue``.

This file reads no clock: the engine passes the seconds of its steps (``weft.shares``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.schedule.sequence import RankedQueue, Sequence
from weft.shares import KeyShares


class FairQueue:
    """A ``RankedQueue`` for each key. ``shares``: the order of keys; None: they take turns by number. ``across``: a
    priority below 0 goes before all keys."""

    def __init__(self, shares: KeyShares | None = None, *, across: bool = False) -> None:
        self._shares = shares
        self._across = across
        self._by_key: dict[str, RankedQueue] = {}
        self.keys: frozenset[str] = frozenset()
        self._order: list[Sequence] | None = None
        """All sequences in order; None: the order has changed."""

    def count(self, key: str) -> int:
        return len(self._by_key.get(key, ()))

    def of(self, key: str) -> Iterable[Sequence]:
        return self._by_key.get(key, ())

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered())

    def after(self, seq: Sequence) -> Iterator[Sequence]:
        """Yield the sequences after ``seq``, best first."""
        if len(self._by_key) == 1:
            yield from self._by_key[seq.key].after(seq)
        else:
            order = list(self._ordered())
            yield from order[order.index(seq) + 1 :]

    def __contains__(self, seq: Sequence) -> bool:
        queue = self._by_key.get(seq.key)
        return queue is not None and seq in queue

    def add(self, seq: Sequence) -> None:
        queue = self._by_key.get(seq.key)
        if queue is None:
            queue = self._by_key[seq.key] = RankedQueue()
            self.keys = frozenset(self._by_key)
        queue.add(seq)
        self._order = None

    def remove(self, seq: Sequence) -> None:
        assert seq.key in self._by_key, f"{seq} is not queued here"
        queue = self._by_key[seq.key]
        queue.remove(seq)
        if not len(queue):
            del self._by_key[seq.key]
            self.keys = frozenset(self._by_key)
        self._order = None

    def yields(self, seq: Sequence) -> int:
        """Return the priority of ``seq`` among all keys, lower first."""
        return seq.rank[0] if self._across else max(seq.rank[0], 0)

    def reorder(self) -> None:
        """Note that the shares have changed."""
        self._order = None

    def audit(self) -> None:
        for key, queue in self._by_key.items():
            queue.audit()
            assert len(queue)
            assert all(seq.key == key for seq in queue)

    def _ordered(self) -> Iterable[Sequence]:
        if len(self._by_key) == 1:
            [queue] = self._by_key.values()
            return queue
        if self._order is None:
            self._order = self._merged()
        return self._order

    def _merged(self) -> list[Sequence]:
        places = []
        for key, queue in self._by_key.items():
            start = 0.0 if self._shares is None else self._shares.used_s.get(key, 0.0)
            turn = 1.0 if self._shares is None else self._shares.turn_s
            counts: dict[int, int] = {}
            for seq in queue:
                yields = self.yields(seq)
                count = counts[yields] = counts.get(yields, -1) + 1
                places.append((yields, start + count * turn, seq.rank, seq))
        places.sort(key=lambda place: place[:3])
        return [seq for *_, seq in places]
