"""The snapshots in the caches of all replicas, from the replicas' reports, by digest of the prefix and by replica.

    report 7 of replica 0   + digest d2 @1024   - digest d1       --> table: d2 -> [replica 0 @1024]
    report 9 of replica 0   8 is missing: the table is stale      --> "send a full report"
    full report 10          replaces everything known about the replica

    prompt   d0  d1  d2  d3 ...      match of a replica: its deepest known digest with a matching tail

A stale table is still used, because most of it is right. A replica has at most SNAPSHOTS_MAX entries (law L11).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from weft.prefix_digests import Digests, Int32s
from weft.snapshot_report import ReportedSnapshot, SnapshotReport
from weft.units import PAGE_TOKENS

CELLS_MIN = 1 << 16
CELLS_PER_ENTRY = 16
"""Cells per entry of the filter: about 1 absent digest in 16 is still looked up."""
_FULL = 255


class DigestFilter:
    """A filter of the digests that a table may have, without a lookup for each of them.

        digests of a prompt   d0 d1 d2 d3 ...   one for each page
        low bits       cells [ 0  0  3  0  1 ... ]     0: no entry --> no lookup

    A table of 100,000 entries exceeds the CPU's caches, so each lookup waits for memory, and most of them miss. Here
    numpy reads one byte for each page. A cell counts the entries with its low bits. A full cell stays full, which costs
    lookups but hides no entry. The cells are counted again from ``entries`` when their number grows."""

    def __init__(self) -> None:
        self._count = 0
        self._resize(CELLS_MIN)

    def add(self, digest: int, entries: Collection[int]) -> None:
        """Count the new ``digest``, which is already among ``entries``."""
        self._count += 1
        if self._count * CELLS_PER_ENTRY > len(self._cells):
            self._recount(2 * len(self._cells), entries)
            return
        cell = digest & self._mask
        if self._cells[cell] < _FULL:
            self._cells[cell] += 1

    def remove(self, digest: int) -> None:
        self._count -= 1
        cell = digest & self._mask
        if self._cells[cell] < _FULL:
            self._cells[cell] -= 1

    def candidates(self, digests: Digests) -> list[int]:
        """Return indices of ``digests`` that the table may have, ascending."""
        indices: list[int] = np.flatnonzero(self._view[digests & self._mask_word]).tolist()
        return indices

    def _recount(self, size: int, entries: Collection[int]) -> None:
        self._resize(size)
        digests = np.fromiter(entries, dtype=np.uint64, count=len(entries))
        counts = np.bincount((digests & self._mask_word).astype(np.intp), minlength=size)
        self._view[:] = np.minimum(counts, _FULL)

    def _resize(self, size: int) -> None:
        self._cells = bytearray(size)
        self._view = np.frombuffer(self._cells, dtype=np.uint8)
        self._mask = size - 1
        self._mask_word = np.uint64(self._mask)


SNAPSHOTS_MAX = 400_000
ASK_AGAIN_AFTER = 64
"""Reports after which a missing full report is requested again."""


@dataclass(slots=True)
class _Holder:
    """One snapshot of one replica."""

    replica: int
    tail: tuple[int, ...]
    position: int
    restore_s: float


@dataclass(slots=True)
class _Feed:
    """The state of one replica's reports. ``number``: of the last applied report, None before the full report.
    ``unanswered``: reports since a full report was asked for."""

    number: int | None = None
    is_stale: bool = True
    unanswered: int = 0
    snapshots: int = 0


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """A position where a request resumes, after ``restore_s`` seconds."""

    position: int
    restore_s: float


class SnapshotTable:
    def __init__(self) -> None:
        self._holders: dict[int, list[_Holder]] = {}
        self._filter = DigestFilter()
        self._feeds: dict[int, _Feed] = {}
        self._gaps: dict[int, int] = {}

    # ------------------------------------------------------------------ reports

    def join(self, replica: int) -> None:
        """Begin with an empty table for an engine that has just started; its full report is on the way."""
        self.leave(replica)
        self._feeds[replica] = _Feed()

    def leave(self, replica: int) -> None:
        """Forget an engine that ended, and its cache with it."""
        feed = self._feeds.pop(replica, None)
        if feed is not None:
            self._drop(replica, feed)

    def apply(self, replica: int, report: SnapshotReport) -> bool:
        """Apply a report, and return whether a full report is needed."""
        feed = self._feeds.get(replica)
        if feed is None:
            return False
        if report.is_full:
            self._apply_full_report(replica, feed, report)
        elif feed.number is not None and report.number > feed.number:
            if report.number > feed.number + 1:
                self._gaps[replica] = self.gaps_of(replica) + 1
                if not feed.is_stale:
                    feed.is_stale, feed.unanswered = True, ASK_AGAIN_AFTER
            feed.number = report.number
            for gone in report.removed:
                feed.snapshots -= self._remove(replica, gone.digest, gone.tail)
            for snapshot in report.added:
                self._add(replica, feed, snapshot)
        return self._asks(feed)

    @staticmethod
    def _asks(feed: _Feed) -> bool:
        if not feed.is_stale:
            return False
        feed.unanswered += 1
        if feed.unanswered <= ASK_AGAIN_AFTER:
            return False
        feed.unanswered = 0
        return True

    def _apply_full_report(self, replica: int, feed: _Feed, report: SnapshotReport) -> None:
        if feed.number is not None and report.number <= feed.number:
            feed.unanswered = ASK_AGAIN_AFTER if feed.is_stale else 0
            return
        self._drop(replica, feed)
        feed.number, feed.is_stale, feed.unanswered, feed.snapshots = report.number, False, 0, 0
        for snapshot in report.added:
            self._add(replica, feed, snapshot)

    def _add(self, replica: int, feed: _Feed, snapshot: ReportedSnapshot) -> None:
        feed.snapshots -= self._remove(replica, snapshot.digest, snapshot.tail)
        if feed.snapshots < SNAPSHOTS_MAX:
            holder = _Holder(replica, snapshot.tail, snapshot.position, snapshot.restore_s)
            holders = self._holders.get(snapshot.digest)
            if holders is None:
                self._holders[snapshot.digest] = [holder]
                self._filter.add(snapshot.digest, self._holders)
            else:
                holders.append(holder)
            feed.snapshots += 1

    def _remove(self, replica: int, digest: int, tail: tuple[int, ...]) -> int:
        """Return how many entries were removed: 1 or 0."""
        holders = self._holders.get(digest, ())
        for index, holder in enumerate(holders):
            if holder.replica == replica and holder.tail == tail:
                if len(holders) == 1:
                    self._forget(digest)
                else:
                    del self._holders[digest][index]
                return 1
        return 0

    def _drop(self, replica: int, feed: _Feed) -> None:
        if not feed.snapshots:
            return  # this visits the digests of all replicas
        for digest in [
            digest
            for digest, holders in self._holders.items()
            if holders[0].replica == replica
            or (len(holders) > 1 and any(holder.replica == replica for holder in holders))
        ]:
            others = [holder for holder in self._holders[digest] if holder.replica != replica]
            if others:
                self._holders[digest] = others
            else:
                self._forget(digest)

    def _forget(self, digest: int) -> None:
        del self._holders[digest]
        self._filter.remove(digest)

    # ------------------------------------------------------------------ looking

    def matches(self, digests: Digests, prompt: Int32s) -> dict[int, CacheMatch]:
        """Return the positions where ``prompt`` can resume, by replica. ``digests``: of its whole pages. At least one
        token is left to compute."""
        best: dict[int, CacheMatch] = {}
        for page in reversed(self._filter.candidates(digests)):
            for holder in self._holders.get(int(digests[page]), ()):
                before = best.get(holder.replica)
                if (before is None or holder.position > before.position) and _agrees(holder, page, prompt):
                    best[holder.replica] = CacheMatch(holder.position, holder.restore_s)
            if len(best) == len(self._feeds):
                break
        return best

    # ------------------------------------------------------------------ numbers

    def snapshots_of(self, replica: int) -> int:
        feed = self._feeds.get(replica)
        return 0 if feed is None else feed.snapshots

    def is_stale(self, replica: int) -> bool:
        feed = self._feeds.get(replica)
        return feed is None or feed.is_stale

    def gaps_of(self, replica: int) -> int:
        """Return how often reports of this replica were lost, since the start."""
        return self._gaps.get(replica, 0)


def _agrees(holder: _Holder, page: int, prompt: Int32s) -> bool:
    """Return whether the prompt is longer than the snapshot's prefix and has the tokens of its tail. ``page``: the last
    page before the tail."""
    if holder.position >= prompt.size:
        return False
    if not holder.tail:
        return True
    first = (page + 1) * PAGE_TOKENS
    return tuple(prompt[first : first + len(holder.tail)].tolist()) == holder.tail
