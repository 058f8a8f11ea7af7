"""``DirectoryStore``: one namespace of one directory, behind the protocol.

    engine thread: match, offer, fetch, put, poll        index, space: touched by this thread alone
                              |         ^
                         jobs v         | outcomes, read by ``poll``
    threads:         FetchThreads   WriteThread          volumes, ledger: touched by these alone

A put takes blocks and entries at once, and they become visible to ``match`` when its outcome says that they
are durable. Whatever fails is counted by reason. A damaged record is retired with all that needs it. A record
that could not be read is forgotten until the next start. No error leaves this class.

Laws: L3 (no room, no disk and no lock are values), L8, L9, L10, L11.

Rejected: locks around the index. One thread owns it, and outcomes travel by queues.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.memory.prefix_store import (
    GRAIN_TOKENS,
    DropReason,
    KvPiece,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
)
from weft.memory.usage import StoreStats
from weft.store.identity import NamespaceIdentity
from weft.store.index import NO_ENTRY, KvChain, checkpoint_above, entries_of, is_current, prefix_of, reads_of
from weft.store.ledger import root_chain, token_bytes
from weft.store.opening import OpenDirectory, StoreOptions, salt_key
from weft.store.reading import FetchThreads, RecordFetch
from weft.store.record_books import RecordBooks, free_bytes
from weft.store.space import BLOCK_BYTES, blocks_for
from weft.store.upkeep import COMPACT_ROWS_LEAST, Compacted, Refreshed, Upkeep
from weft.store.volumes import Volumes
from weft.store.writing import PutJob, WriteOutcome, WriteThread, put_request, records_of

FINAL_WRITES_S = 5.0
"""How long ``close`` waits for puts that are queued, and for reads."""
STALL_S = 5.0
"""A disk that takes longer for one call is reported."""


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """Payloads of a directory."""

    volumes: Volumes

    def read_payload(self, row: np.void, into: memoryview) -> None:
        self.volumes.read(int(row["volume"]), int(row["offset"]) // BLOCK_BYTES, into)


class DirectoryStore:
    """See the essay. ``opened`` belongs to the store from now on."""

    def __init__(self, opened: OpenDirectory, identity: NamespaceIdentity, options: StoreOptions, *,
                 clock: Callable[[], float] = time.monotonic,
                 compact_rows_least: int = COMPACT_ROWS_LEAST) -> None:
        self.opened, self.identity, self._clock = opened, identity, clock
        self._namespace = identity.digest
        self.exact = not options.accept_inexact
        self._next_number = opened.live.last_number + 1 if opened.live is not None else 1
        self._outcomes: queue.SimpleQueue[WriteOutcome | RecordFetch | Compacted | Refreshed] = \
            queue.SimpleQueue()
        free = free_bytes(opened)
        self.upkeep = Upkeep(opened, self._namespace, self._outcomes.put, free, options.forms, clock=clock,
                             compact_rows_least=compact_rows_least)
        self._reader = FetchThreads(VolumeSource(opened.volumes), self._outcomes.put,
                                    threads=options.read_threads)
        self.books = RecordBooks(opened, options, self._namespace, free)
        self._writer: WriteThread | None = None
        if opened.writable and opened.ledger is not None:
            volumes = self.books.space.volumes
            self._writer = self.books.writer = WriteThread(
                opened.ledger, opened.volumes, self._outcomes.put,
                idle=lambda ledger: self.upkeep.idle(ledger, dict(volumes)),
                reads_first=self._reader.wait_idle,
                bytes_per_second=options.write_bytes_per_second, queue_bytes_max=options.queue_bytes)
        self._ticket = self._measurements = 0
        self._under_way: dict[Ticket, float] = {}
        """When each fetch began, the oldest first."""

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        self.books.counters.matches += 1
        root = self.root(salt)
        if root is None:
            return None
        content = token_bytes(tokens)
        hit = self.books.index.deepest(root[1], content, above=above, exact=self.exact)
        return None if hit is None else prefix_of(self.books.index, *hit, content, salt)

    @property
    def changes(self) -> int:
        return self.books.changes

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        assert start % GRAIN_TOKENS == 0
        assert start <= prefix.position
        ticket = self._new_ticket()
        self.books.counters.fetches += 1
        index = self.books.index
        if self.books.ledger is None or not is_current(index, prefix):
            self.books.events.append(StoreEvent(ticket, "missing", "evicted"))
            return ticket
        self.books.pins.update(entry for entry, _ in entries_of(prefix))
        reads = tuple(reads_of(index, prefix, start, into))
        self._under_way[ticket] = self._clock()
        self._reader.submit(RecordFetch(ticket, self.books.ledger, reads, prefix.tokens, self._clock()))
        return ticket

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *,
              exact: bool) -> PutOffer | None:
        root = self.root(salt)
        if root is None or self._writer is None or self._writer.room_bytes <= 0:
            self.books.counters.dropped["queue_full" if root and self._writer else "read_only"] += 1
            return None
        index = self.books.index
        path = index.covered(root[1], token_bytes(tokens[:position]), exact=exact)
        if path.end == position and index.checkpoint_at(path, exact=exact, durable=False) != NO_ENTRY:
            return None
        return PutOffer(path.end, position, checkpoint_above(index, path, exact=exact))

    def put(self, salt: str | None, tokens: PrefixTokens, position: int, kv: Sequence[KvPiece],
            state: memoryview, *, exact: bool, seconds: float = 0.0, state_form: int = 0) -> Ticket | None:
        self.books.counters.puts += 1
        root = self.root(salt)
        if self._writer is None or root is None:
            return self._refusal("read_only")
        content = token_bytes(tokens[:position])
        base = self._base(root[1], content, kv[0].start if kv else position, exact=exact)
        if base is None:
            return self._refusal("parent")
        request = put_request(base, content, kv, state, exact=exact, seconds=seconds, state_form=state_form,
                              namespace=self._namespace, salt=root[0])
        sizes = [len(payload) for payload in request.payloads]
        if not self.books.space.fits_ever(max(sizes)) or max(sizes) >= 1 << 32:
            return self._refusal("too_large")
        if request.nbytes > self._writer.room_bytes:
            return self._refusal("queue_full")
        if self.upkeep.measurements != self._measurements:
            self._measurements = self.upkeep.measurements
            self.books.space.disk_free_bytes = self.upkeep.free_bytes
        placed = self.books.space.place(sizes)
        if placed is None:
            self.books.make_room(sum(blocks_for(size) for size in sizes), forced=True)
            return self._refusal("store_full")
        records = records_of(request, self.books.index, placed[0], self._next_number)
        self._next_number += len(records)
        ticket = self._new_ticket()
        c = self.books.index.c
        needs = frozenset(c["number"].item(entry) for entry in base.entries if not c["durable"][entry])
        self._writer.submit(PutJob(ticket, records, needs, tuple(placed[1]), request.nbytes))
        self.books.make_room(sum(blocks_for(size) for size in sizes), forced=False)
        return ticket

    def poll(self) -> list[StoreEvent]:
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                break
            match outcome:
                case RecordFetch():
                    del self._under_way[outcome.ticket]
                    self.books.fetched(outcome, self._clock() - outcome.started)
                case WriteOutcome():
                    self.books.written(outcome)
                case Compacted():
                    self.books.compacted(outcome)
                case Refreshed():
                    self.books.refreshed(outcome)
        self.upkeep.live_count = self.books.index.live_count
        self._note_stalls()
        if self._writer is None and self._clock() >= self.upkeep.next_follow:
            self.upkeep.next_follow = float("inf")
            ledger = self.books.ledger
            self._reader.run(lambda: self.upkeep.follow(ledger))
        events, self.books.events = self.books.events, []
        return events

    def stats(self) -> StoreStats:
        queued = self._writer.queued_bytes if self._writer is not None else 0
        return self.books.stats(queued)

    def close(self) -> None:
        if self._writer is not None:
            self.books.flush_uses()
            self._writer.close(FINAL_WRITES_S)
        self._reader.close(FINAL_WRITES_S)
        self.opened.close()

    def _note_stalls(self) -> None:
        """A call of the disk that does not return blocks one thread, and no request past its deadline."""
        now_s = self._clock()
        if now_s - next(iter(self._under_way.values()), now_s) > STALL_S:
            self.books.note(f"{self.opened.path}: the disk has not answered a read for {STALL_S:.0f} s; "
                            "prompts are computed")
        if self._writer is not None and self._writer.stalled_s > STALL_S:
            self.books.note(f"{self.opened.path}: the disk has not answered a write for {STALL_S:.0f} s; "
                            "writes that do not fit the queue are dropped")

    def root(self, salt: str | None) -> tuple[bytes, int] | None:
        """(salt's key, chain of its root); None for a salt without a secret."""
        if salt and self.opened.secret is None:
            return None
        key = salt_key(self.opened.secret or b"", salt)
        return key, root_chain(self._namespace, key)

    def _base(self, root: int, tokens: bytes, start: int, *, exact: bool) -> KvChain | None:
        """The stored KV that ends at ``start``; None if it was evicted after the offer."""
        return self.books.index.covered(root, tokens, exact=exact).up_to(self.books.index, start, root)

    def _refusal(self, reason: DropReason) -> Ticket | None:
        """No ticket, and a count."""
        self.books.counters.dropped[reason] += 1
        return None

    def _new_ticket(self) -> Ticket:
        self._ticket += 1
        return Ticket(self._ticket)
