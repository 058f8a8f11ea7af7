"""``StoreRecords``: the current records of a directory, and the changes that outcomes of threads make.

    outcome of a write    entries become durable, or are removed with their blocks
    outcome of a mark     blocks of retired records are free
    outcome of a fetch    pins are removed; damaged records are retired with all records that need them
    a new generation      the rows of all entries get new numbers

Index, space, pins and counters change here and in a put, always in the engine's thread. A pin holds an entry for a
fetch: eviction spares it.

Blocks become free in one of two ways, never both: for a record that never became durable, with the outcome of its
write; for a durable record, when the row that retires the record is durable.

A fault under way is counted by reason. The first of its kind is a line in the log and in ``stats().notes``.

Laws: L1 (a block has one record), L8 (a record goes with all that needs it).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import fields

import numpy as np

from weft.memory.prefix_store import StoreEvent
from weft.memory.usage import StoreCounts, StoreStats
from weft.store.eviction import EVICTED_SHARE, evict, place_of, subtree
from weft.store.index import NO_ENTRY, StoreIndex
from weft.store.ledger import KV, SNAPSHOT
from weft.store.opening import OpenDirectory, StoreOptions
from weft.store.reading import RecordFetch
from weft.store.space import BLOCK_BYTES, Space, blocks_for
from weft.store.upkeep import Compacted, Refreshed
from weft.store.writing import MarkJob, PutJob, WriteOutcome, WriteThread

USES_BEFORE_WRITE = 64
"""Restores that are collected before they are written to the ledger."""
NOTES_MAX = 16
_log = logging.getLogger("weft.store")
LATENCY_BYTES_MAX = 1 << 20
"""Most bytes of a fetch that measures the latency; a larger one measures the rate."""
_NEWEST = 0.2
"""Weight of the newest fetch in the measured rate and latency."""


class StoreCounters(StoreCounts):
    def measured(self, nbytes: int, seconds: float) -> None:
        if nbytes < LATENCY_BYTES_MAX:
            self.read_latency_s += (_NEWEST if self.read_latency_s else 1.0) * (seconds - self.read_latency_s)
        elif seconds > 0:
            change = nbytes / seconds - self.read_bytes_per_second
            self.read_bytes_per_second += (_NEWEST if self.read_bytes_per_second else 1.0) * change


class StoreRecords:
    """The records of a directory; see the essay. ``events`` are read by ``poll``. ``pinned``: entries that are not
    evicted, as of now."""

    def __init__(
        self,
        opened: OpenDirectory,
        options: StoreOptions,
        namespace: bytes,
        disk_free_bytes: int,
        pinned: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._opened = opened
        self.index, self._namespace = StoreIndex(options.forms, options.sealer), namespace
        self._changes_before = 0
        """Changes of indexes that were replaced."""
        live = opened.live
        if live is not None:
            self.index.load(live, namespace)
        self.ledger = opened.ledger
        self.space = _space_of(opened, options, self.index, disk_free_bytes)
        self.writer: WriteThread | None = None
        self.counters = StoreCounters(damaged=Counter(live.dropped if live is not None else {}))
        self.pins: Counter[int] = Counter()
        self._pinned = pinned
        self.events: list[StoreEvent] = []
        self._used: Counter[int] = Counter()
        opened.live = None  # the rows: 144 bytes each, which the index no longer needs

    @property
    def changes(self) -> int:
        """Number of durable entries that came or went so far."""
        return self._changes_before + self.index.durable_changes

    def make_room(self, blocks: int, *, forced: bool) -> None:
        """Evict if ``blocks`` more would not fit. ``forced``: a placement has failed, perhaps because the free blocks
        are scattered."""
        wanted = self.space.shortage(blocks)
        if forced and self.space.retiring_blocks < blocks:
            wanted = max(wanted, blocks)
        if wanted:
            least = self.space.capacity_bytes // BLOCK_BYTES // EVICTED_SHARE
            retired = evict(self.index, max(wanted, least), {*self.pins, *self._pinned()})
            self.counters.evicted += len(retired)
            self._retire(retired)

    def clear(self) -> None:
        """Retire every record of this namespace. A put that is being written is dropped when it is done."""
        c = self.index.c
        own = [space for (namespace, _), space in self.index.spaces.items() if namespace == self._namespace]
        length = self.index.length
        first = (c["kind"][:length] != 0) & (c["parent"][:length] == NO_ENTRY) & np.isin(c["space"][:length], own)
        retired = [record for entry in np.flatnonzero(first) for record in self._drop(int(entry))]
        self._retire(retired)

    def is_entry(self, entry: int, number: int) -> bool:
        """Return whether ``entry`` still is the record with ``number``."""
        c = self.index.c
        return entry < self.index.length and bool(c["kind"][entry]) and c["number"].item(entry) == number

    def fetched(self, fetch: RecordFetch, seconds: float) -> None:
        for record in fetch.records:
            self.pins[record.entry] -= 1
            if self.pins[record.entry] <= 0:
                del self.pins[record.entry]
        if fetch.failure is None:
            self._count_use(fetch, seconds)
            return
        kind, reason, entry, number = fetch.failure
        self.counters.damaged[reason] += 1
        what = f"is damaged ({reason}) and retired" if kind == "damaged" else f"could not be read ({reason})"
        self.note(f"{self._opened.path}: a record {what}; its prompt is computed")
        self.events.append(StoreEvent(fetch.ticket, kind, reason, 0, seconds))
        if self.is_entry(entry, number):
            records = self._drop(entry)
            if kind == "damaged":
                self._retire(records)

    def written(self, outcome: WriteOutcome) -> None:
        if isinstance(outcome.job, PutJob):
            self.space.created(outcome.job.new_volumes)
        for volume in outcome.failed_volumes:
            self._lose_volume(volume)
        match outcome.job:
            case MarkJob():
                self._marked(outcome.job, durable=outcome.reason is None)
            case PutJob() if outcome.reason is not None:
                self._failed(outcome.job, outcome)
            case PutJob():
                self._durable(outcome.job, outcome.lines)

    def compacted(self, outcome: Compacted) -> None:
        """Switch to a new generation, which has the rows of durable entries, and to which later ones are appended."""
        self.ledger = outcome.ledger
        c, length = self.index.c, self.index.length
        entries = np.flatnonzero((c["kind"][:length] != 0) & c["durable"][:length])
        if len(outcome.numbers) and len(entries):
            places = np.searchsorted(outcome.numbers, c["number"][entries])
            c["line"][entries] = outcome.lines[np.minimum(places, len(outcome.lines) - 1)]

    def refreshed(self, outcome: Refreshed) -> None:
        """Take the index of a reader that has read another process's rows."""
        self._changes_before += self.index.durable_changes + 1
        self.index, self.ledger = outcome.index, outcome.ledger
        self.pins.clear()

    def flush_uses(self) -> None:
        if self._used and self.writer is not None:
            self.writer.submit(MarkJob(used=tuple(self._used.items())))
        self._used.clear()

    def snapshots_by_namespace(self) -> dict[bytes, int]:
        """Return how many snapshots each namespace has."""
        c, counts = self.index.c, Counter[bytes]()
        spaces = c["space"][: self.index.length][c["kind"][: self.index.length] == SNAPSHOT]
        by_space = np.bincount(spaces, minlength=len(self.index.spaces)).tolist()
        for (namespace, _), space in self.index.spaces.items():
            counts[namespace] += by_space[space]
        return counts

    def stats(self, queued_bytes: int) -> StoreStats:
        c, length, counters = self.index.c, self.index.length, self.counters
        kinds = c["kind"][:length]
        by_space = np.bincount(c["space"][:length][kinds == SNAPSHOT], minlength=len(self.index.spaces))
        own = [space for (namespace, _), space in self.index.spaces.items() if namespace == self._namespace]
        snapshots = int(by_space[own].sum())
        counts = {count.name: getattr(counters, count.name) for count in fields(StoreCounts)}
        counts |= {"damaged": dict(counters.damaged), "dropped": dict(counters.dropped)}
        return StoreStats(
            **counts,
            path=str(self._opened.path),
            writable=self.writer is not None,
            snapshots=snapshots,
            kv_records=int((kinds == KV).sum()),
            stored_bytes=self.space.used_bytes,
            capacity_bytes=self.space.capacity_bytes,
            queued_bytes=queued_bytes,
            notes=tuple(self._opened.notes),
            others=int(by_space.sum()) - snapshots,
        )

    def _count_use(self, fetch: RecordFetch, seconds: float) -> None:
        snapshot = fetch.records[-1]
        if self.is_entry(snapshot.entry, snapshot.number):
            self.index.touch(snapshot.entry)
            self._used[snapshot.number] += 1
        self.counters.fetched_bytes += fetch.nbytes
        self.counters.measured(fetch.nbytes, seconds)
        self.events.append(StoreEvent(fetch.ticket, "fetched", "", fetch.nbytes, seconds))
        if sum(self._used.values()) >= USES_BEFORE_WRITE:
            self.flush_uses()

    def _marked(self, job: MarkJob, *, durable: bool) -> None:
        for _, volume, first, payload_bytes in job.retired:
            self.space.retiring_blocks -= blocks_for(payload_bytes)
            if durable:
                self.space.give(volume, first, payload_bytes)

    def _failed(self, job: PutJob, outcome: WriteOutcome) -> None:
        assert outcome.reason is not None
        self.counters.dropped[outcome.reason] += 1
        if outcome.detail:
            self.note(f"{self._opened.path}: a write failed: {outcome.detail}")
        self.events.append(StoreEvent(job.ticket, "dropped", outcome.detail or outcome.reason))
        for record in job.records:
            if self.is_entry(record.entry, record.number):
                self._drop(record.entry)
            self.space.give(record.volume, record.block, record.stored_bytes)

    def _durable(self, job: PutJob, lines: tuple[int, ...]) -> None:
        stale, durable = [], []
        for record, line in zip(job.records, lines, strict=True):
            if self.is_entry(record.entry, record.number):
                self.index.c["line"][record.entry] = line
                durable.append(record.entry)
            else:
                stale.append((record.number, record.volume, record.block, record.stored_bytes))
        self.index.make_durable(durable)
        self._retire(stale)
        self.counters.written_bytes += job.nbytes
        if stale:
            self.counters.dropped["parent"] += 1
            self.events.append(StoreEvent(job.ticket, "dropped", "parent"))
        else:
            self.events.append(StoreEvent(job.ticket, "written", "", job.nbytes))

    def _drop(self, entry: int) -> list[tuple[int, int, int, int]]:
        """Remove ``entry`` and all entries that need it from the index. Return the places of the durable ones."""
        records = []
        for victim in subtree(self.index, entry):
            if self.index.c["durable"].item(victim):
                records.append(place_of(self.index, victim))
            self.index.remove(victim)
        return records

    def _retire(self, records: list[tuple[int, int, int, int]]) -> None:
        """Retire records; their blocks come back when the ledger says durably that the records are gone."""
        if records and self.writer is not None:
            self.space.retiring_blocks += sum(blocks_for(record[3]) for record in records)
            self.writer.submit(MarkJob(retired=tuple(records)))

    def _lose_volume(self, volume: int) -> None:
        """Forget a volume that could not be created, or was removed while it was open."""
        if volume not in self.space.volumes:
            return
        self.note(f"{self._opened.path}: volume {volume} is lost with its records")
        self.space.lose_volume(volume)
        c = self.index.c
        while True:
            length = self.index.length
            inside = np.flatnonzero(
                (c["kind"][:length] != 0)
                & (c["volume"][:length] == volume)
                & (c["payload"][:length] > 0)
                & c["durable"][:length]
            )
            if not len(inside):
                return
            self.counters.damaged["volume"] += 1
            self._retire(self._drop(int(inside[0])))

    def note(self, sentence: str) -> None:
        """Tell the operator, once for each sentence."""
        if sentence not in self._opened.notes and len(self._opened.notes) < NOTES_MAX:
            self._opened.notes.append(sentence)
            _log.warning(sentence)


def free_bytes(opened: OpenDirectory) -> int:
    """Return the free space of the disk; 0 if it cannot be asked."""
    with contextlib.suppress(OSError):
        return opened.disk.free_bytes(opened.path)
    return 0


def _space_of(opened: OpenDirectory, options: StoreOptions, index: StoreIndex, free: int) -> Space:
    c, length = index.c, index.length
    allocated = sum(opened.volume_blocks.values()) * BLOCK_BYTES
    capacity = options.capacity_bytes or allocated + max(0, free - options.reserve_bytes) // 2
    places = np.stack([c[name][:length].astype(np.int64) for name in ("volume", "block", "payload")], axis=1)
    last_volume = opened.live.last_volume if opened.live is not None else -1
    return Space.of(
        capacity, options.reserve_bytes, free, options.volume_bytes, opened.volume_blocks, last_volume + 1, places
    )
