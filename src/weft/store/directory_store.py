"""``DirectoryStore``: the protocol for one namespace of one directory.

    engine thread: match, offer, fetch, put, poll        index, space: touched by this thread alone
                              |         ^
                         jobs v         | outcomes, read by ``poll``
    threads:         FetchThreads   WriteThread          volumes, ledger: touched by these alone

A put takes blocks and entries at once. The entries become visible to ``match`` when the outcome of the put says that
the records are durable. Every failure is counted by reason. A damaged record is retired together with all records that
need it. A record that could not be read is forgotten until the next start. No error leaves this class.

Laws: L3 (no room, no disk and no lock are values), L8, L9, L10, L11.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable

from weft.memory.prefix_store import (
    STORED_PAGE_TOKENS,
    DropReason,
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
    token_bytes,
)
from weft.memory.usage import StoreStats
from weft.store.identity import NamespaceIdentity
from weft.store.index import entries_of, is_current, prefix_of, reads_of
from weft.store.ledger import root_chain
from weft.store.opening import OpenDirectory, StoreOptions, salt_key
from weft.store.reading import FetchThreads, RecordFetch
from weft.store.records import StoreRecords, free_bytes
from weft.store.space import BLOCK_BYTES, blocks_for
from weft.store.upkeep import COMPACT_ROWS_FEW, COMPACT_ROWS_LEAST, Compacted, Refreshed, Upkeep
from weft.store.writing import PutJob, WriteOutcome, WriteThread, put_request, records_of

FINAL_WRITES_S = 5.0
"""Seconds that ``close`` waits for queued puts, and for reads."""
STALL_S = 5.0
"""Seconds of one call of the disk above which it is reported."""
PINNED_SHARE = 0.5
"""Largest share of a store that pinned prefixes may hold; the rest stays for traffic."""


class DirectoryStore:
    """A store of one namespace in a directory, which owns ``opened`` from now on."""

    def __init__(
        self,
        opened: OpenDirectory,
        identity: NamespaceIdentity,
        options: StoreOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        compact_rows_least: int = COMPACT_ROWS_LEAST,
    ) -> None:
        self.opened, self.identity, self._clock = opened, identity, clock
        self._namespace = identity.digest
        self.exact = not options.accept_inexact
        self._next_number = opened.live.last_number + 1 if opened.live is not None else 1
        self._outcomes: queue.SimpleQueue[WriteOutcome | RecordFetch | Compacted | Refreshed] = queue.SimpleQueue()
        free = free_bytes(opened)
        self.records = StoreRecords(
            opened, options, self._namespace, free, lambda: pinned_entries(self, options.pinned())
        )
        # In a small store at most one row per block: otherwise the ledger could outgrow the records that it names.
        blocks = self.records.space.capacity_bytes // BLOCK_BYTES
        least = min(compact_rows_least, max(blocks, COMPACT_ROWS_FEW))
        self.upkeep = Upkeep(
            opened,
            self._namespace,
            self._outcomes.put,
            free,
            options.forms,
            options.sealer,
            clock=clock,
            compact_rows_least=least,
        )
        self._reader = FetchThreads(
            opened.volumes, self._outcomes.put, threads=options.read_threads, sealer=options.sealer
        )
        self._writer: WriteThread | None = None
        if opened.writable and opened.ledger is not None:
            volumes = self.records.space.volumes
            self._writer = self.records.writer = WriteThread(
                opened.ledger,
                opened.volumes,
                self._outcomes.put,
                idle=lambda ledger: self.upkeep.idle(ledger, dict(volumes)),
                reads_first=self._reader.wait_idle,
                bytes_per_second=options.write_bytes_per_second,
                queue_bytes_max=options.queue_bytes,
                sealer=options.sealer,
            )
        self._ticket = self._measurements = 0
        self._under_way: dict[Ticket, float] = {}
        """Start of each fetch, the oldest first."""

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        self.records.counters.matches += 1
        root = self.root(salt)
        if root is None:
            return None
        content = token_bytes(tokens)
        hit = self.records.index.deepest(root[1], content, above=above, exact=self.exact)
        return None if hit is None else prefix_of(self.records.index, *hit, content, salt)

    @property
    def changes(self) -> int:
        return self.records.changes

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        assert start % STORED_PAGE_TOKENS == 0
        assert start <= prefix.position
        ticket = self._new_ticket()
        self.records.counters.fetches += 1
        index = self.records.index
        if self.records.ledger is None or not is_current(index, prefix):
            self.records.events.append(StoreEvent(ticket, "missing", "evicted"))
            return ticket
        self.records.pins.update(entry for entry, _ in entries_of(prefix))
        reads = tuple(reads_of(index, prefix, start, into))
        self._under_way[ticket] = self._clock()
        self._reader.submit(RecordFetch(ticket, self.records.ledger, reads, prefix.tokens, self._clock()))
        return ticket

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        root = self.root(salt)
        if root is None or self._writer is None or self._writer.room_bytes <= 0:
            self.records.counters.dropped["queue_full" if root and self._writer else "read_only"] += 1
            return None
        return self.records.index.offer(root[1], token_bytes(tokens[:position]), exact=exact)

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        self.records.counters.puts += 1
        root = self.root(snapshot.salt)
        if self._writer is None or root is None:
            return self._refusal("read_only")
        base = self.records.index.base(root[1], snapshot.tokens, snapshot.start, exact=snapshot.exact)
        if base is None:
            return self._refusal("parent")
        request = put_request(base, snapshot, namespace=self._namespace, salt=root[0])
        sizes = [self.records.index.stored_size(len(payload)) for payload in snapshot.payloads]
        if not self.records.space.fits_ever(max(sizes)) or max(sizes) >= 1 << 32:
            return self._refusal("too_large")
        if snapshot.nbytes > self._writer.room_bytes:
            return self._refusal("queue_full")
        if self.upkeep.measurements != self._measurements:
            self._measurements = self.upkeep.measurements
            self.records.space.disk_free_bytes = self.upkeep.free_bytes
        placed = self.records.space.place(sizes)
        if placed is None:
            self.records.make_room(sum(blocks_for(size) for size in sizes), forced=True)
            return self._refusal("store_full")
        records = records_of(request, self.records.index, placed[0], self._next_number)
        self._next_number += len(records)
        ticket = self._new_ticket()
        c = self.records.index.c
        needs = frozenset(c["number"].item(entry) for entry in base.entries if not c["durable"][entry])
        self._writer.submit(PutJob(ticket, records, needs, tuple(placed[1]), snapshot.nbytes))
        self.records.make_room(sum(blocks_for(size) for size in sizes), forced=False)
        return ticket

    def clear(self) -> None:
        if self._writer is not None:
            self.records.clear()

    def poll(self) -> list[StoreEvent]:
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                break
            match outcome:
                case RecordFetch():
                    del self._under_way[outcome.ticket]
                    self.records.fetched(outcome, self._clock() - outcome.started)
                case WriteOutcome():
                    self.records.written(outcome)
                case Compacted():
                    self.records.compacted(outcome)
                case Refreshed():
                    self.records.refreshed(outcome)
        self.upkeep.live_count = self.records.index.live_count
        self._note_stalls()
        if self._writer is None and self._clock() >= self.upkeep.next_follow:
            self.upkeep.next_follow = float("inf")
            ledger = self.records.ledger
            self._reader.run(lambda: self.upkeep.follow(ledger))
        events, self.records.events = self.records.events, []
        return events

    def stats(self) -> StoreStats:
        queued = self._writer.queued_bytes if self._writer is not None else 0
        return self.records.stats(queued)

    def close(self) -> None:
        if self._writer is not None:
            self.records.flush_uses()
            self._writer.close(FINAL_WRITES_S)
        self._reader.close(FINAL_WRITES_S)
        self.opened.close()

    def _note_stalls(self) -> None:
        """Note calls of the disk that do not return. Each blocks one thread; requests wait only until their
        deadline.
        """
        now_s = self._clock()
        if now_s - next(iter(self._under_way.values()), now_s) > STALL_S:
            self.records.note(
                f"{self.opened.path}: the disk has not answered a read for {STALL_S:.0f} s; prompts are computed"
            )
        if self._writer is not None and self._writer.stalled_s > STALL_S:
            self.records.note(
                f"{self.opened.path}: the disk has not answered a write for {STALL_S:.0f} s; "
                "writes that do not fit the queue are dropped"
            )

    def root(self, salt: str | None) -> tuple[bytes, int] | None:
        """Return (salt's key, chain of its root); None for a salt without a secret."""
        if salt and self.opened.secret is None:
            return None
        key = salt_key(self.opened.secret or b"", salt)
        return key, root_chain(self._namespace, key)

    def _refusal(self, reason: DropReason) -> Ticket | None:
        """Count a refusal; the ticket is None."""
        self.records.counters.dropped[reason] += 1
        return None

    def _new_ticket(self) -> Ticket:
        self._ticket += 1
        return Ticket(self._ticket)


def pinned_entries(store: DirectoryStore, prefixes: Iterable[tuple[str, bytes]]) -> set[int]:
    """Return the entries of the stored snapshots of ``prefixes``, the first ones first, up to PINNED_SHARE of the
    store."""
    index, pinned = store.records.index, set[int]()
    left = int(store.records.space.capacity_bytes * PINNED_SHARE)
    for salt, tokens in prefixes:
        root = store.root(salt or None)
        hit = None if root is None else index.deepest(root[1], tokens, above=0, exact=store.exact)
        if hit is None:
            continue
        entries = {*hit[1].entries, hit[0]} - pinned
        size = sum(index.c["payload"].item(entry) for entry in entries)
        if size <= left:
            left -= size
            pinned |= entries
    return pinned
