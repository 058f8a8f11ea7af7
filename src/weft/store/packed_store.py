"""``PackedStore``: a store whose exact records are packed before they are put, and unpacked after a fetch.

    put    --threads pack parts of 8 MiB--> (poll) Store.put of packed records       in the order of the puts
    fetch  --Store.fetch into a spare buffer--> (poll) threads unpack --> event      verified twice
    offer  what the store has, and what puts that are being packed will bring
    match  the store's answer, in the sizes that the engine has in memory

The store below knows packed records as one more form (PACKED). A record that does not shrink is put as it is.
Compressed forms of the engine pass through. Reads have threads of their own, so none waits for the puts in a queue.

Laws: L8, L9 (packing delays no step; a put whose parent was refused is dropped), L11 (``queue_bytes``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from weft.memory.prefix_store import (
    EXACT_FORM,
    PACKED,
    STORED_PAGE_TOKENS,
    KvPiece,
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    Store,
    StoredPrefix,
    StoreEvent,
    Ticket,
    token_bytes,
)
from weft.memory.usage import StoreStats
from weft.store.index import places_of
from weft.store.packing import CHUNK_BYTES, HEADER_BYTES, PackingError, join_parts, pack_part, unpack
from weft.units import ceil_div

PART_BYTES = 8 * CHUNK_BYTES
THREADS_MAX = 16
CPUS_PER_THREAD = 4
"""Cores of the host per packing thread: the others belong to the engine."""
FINAL_PACKING_S = 5.0
_FIRST_TICKET = 1 << 48
"""First ticket of puts that are packed; those of the store below stay under it."""


def threads_for(cpus: int | None) -> int:
    return max(1, min(THREADS_MAX, (cpus or 1) // CPUS_PER_THREAD))


@dataclass(slots=True)
class _Put:
    """A put that is being packed. ``parts``: the packed parts of each record, None until done."""

    ticket: Ticket
    snapshot: NewSnapshot
    left: int = 0
    parts: list[list[bytes | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_dropped: bool = False
    """Whether the store was cleared while the put was packed."""
    packed: list[bytes | None] | None = None
    """Packed form by record, once all are done; None for a record that did not shrink."""


@dataclass(frozen=True, slots=True)
class UnpackedPrefix(StoredPrefix):
    """A prefix in the sizes of memory. ``below``: the same in the sizes of the store."""

    below: StoredPrefix | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Fetch:
    """A fetch of packed records. ``spare``: the bytes as they are stored. ``ended_s``: when all of them were
    unpacked."""

    prefix: UnpackedPrefix
    start: int
    into: StagingBuffers
    spare: StagingBuffers
    began_s: float
    ended_s: float = 0.0
    event: StoreEvent | None = None
    left: int = 0
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class PackedStore:
    """A store with packing in front. ``stored_page_bytes`` and ``state_bytes`` of an exact record in memory. ``packs``
    False: only unpack records that are packed already. ``clock`` measures fetches."""

    def __init__(
        self,
        store: Store,
        stored_page_bytes: int,
        state_bytes: int,
        *,
        queue_bytes: int,
        packs: bool = True,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.raw_bytes = self.packed_bytes = 0
        """Bytes of the records packed so far: before and after."""
        self._stored_page_bytes = stored_page_bytes
        self._state_bytes = state_bytes
        self._queue_bytes = queue_bytes
        self._packs = packs
        self._clock = clock
        count = threads or threads_for(os.cpu_count())
        self._packers = ThreadPoolExecutor(count, "store-pack")
        self._unpackers = ThreadPoolExecutor(count, "store-unpack")
        self._puts: deque[_Put] = deque()
        self._waiting_bytes = 0
        self._outer: dict[Ticket, Ticket] = {}
        """Tickets of the store below -> tickets that the engine knows."""
        self._fetches: dict[Ticket, _Fetch] = {}
        self._unpacking: list[_Fetch] = []
        self._damaged = 0
        self._ticket = _FIRST_TICKET

    @property
    def changes(self) -> int:
        return self.store.changes

    @property
    def stored_share(self) -> float:
        """Bytes that a store writes per byte of a put: the ratio of the records packed so far, 1 before the first."""
        return self.packed_bytes / self.raw_bytes if self.raw_bytes else 1.0

    # ------------------------------------------------------------------ reading

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        below = self.store.match(salt, tokens, above)
        if below is None or not (below.state_form == PACKED or any(span.form == PACKED for span in below.spans)):
            return below
        spans = tuple(
            span
            if span.form != PACKED
            else replace(
                span,
                form=EXACT_FORM,
                stored_bytes=span.payload_bytes,
                payload_bytes=ceil_div(span.end - span.start, STORED_PAGE_TOKENS) * self._stored_page_bytes,
            )
            for span in below.spans
        )
        state_bytes, form, stored = below.state_bytes, below.state_form, 0
        if form == PACKED:
            state_bytes, form, stored = self._state_bytes, EXACT_FORM, below.state_bytes
        return UnpackedPrefix(
            below.snapshot,
            below.entry,
            below.position,
            spans,
            state_bytes,
            form,
            below.exact,
            below.tokens,
            below.remote,
            below.salt,
            stored_state_bytes=stored,
            below=below,
        )

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        if not isinstance(prefix, UnpackedPrefix) or prefix.below is None:
            return self.store.fetch(prefix, start, into)
        wanted = [span for span in prefix.below.spans if span.end > start]
        spare = StagingBuffers(
            np.empty(sum(span.payload_bytes for span in wanted), np.uint8).data,
            np.empty(prefix.below.state_bytes, np.uint8).data,
        )
        begin = wanted[0].start if wanted else start
        ticket = self.store.fetch(prefix.below, begin, spare)
        self._fetches[ticket] = _Fetch(prefix, start, into, spare, self._clock())
        return ticket

    def _unpack(self, fetch: _Fetch, event: StoreEvent) -> None:
        """Unpack bytes that have arrived: threads fill the buffers of the engine."""
        prefix, below = fetch.prefix, fetch.prefix.below
        assert below is not None
        into = fetch.into.kv.cast("B")
        tasks: list[Callable[[], None]] = []
        offset, stored = 0, {}
        for span in below.spans:
            if span.end > fetch.start:
                stored[span.record] = fetch.spare.kv.cast("B")[offset : offset + span.payload_bytes], span.form
                offset += span.payload_bytes
        for span, offset, length in places_of(prefix, fetch.start, fetch.into.page_bytes):
            source, form = stored[span.record]
            tasks.append(_task(source, form, into[offset : offset + length], span.payload_bytes))
        state = fetch.into.state.cast("B")[: prefix.state_bytes]
        tasks.append(_task(fetch.spare.state.cast("B"), below.state_form, state, prefix.state_bytes))
        fetch.event, fetch.left = event, len(tasks)
        self._unpacking.append(fetch)
        for task in tasks:
            self._unpackers.submit(_run, fetch, task, self._clock)

    # ------------------------------------------------------------------ writing

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        offer = self.store.offer(salt, tokens, position, exact=exact)
        if offer is None or not self._puts:
            return offer
        content = token_bytes(tokens[:position])
        for earlier in (put.snapshot for put in self._puts):
            if earlier.salt != salt or (exact and not earlier.exact):
                continue
            if earlier.tokens == content:
                return None
            ends = [
                piece.end
                for piece in earlier.kv
                if piece.end % STORED_PAGE_TOKENS == 0 or 4 * piece.end == len(content)
            ]
            covered = max(
                (
                    end
                    for end in ends
                    if offer.start < end <= position and earlier.tokens[: 4 * end] == content[: 4 * end]
                ),
                default=offer.start,
            )
            above = earlier.position if content.startswith(earlier.tokens) else 0
            offer = PutOffer(covered, position, max(offer.above, above))
        return offer

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        self._ticket += 1
        put = _Put(Ticket(self._ticket), snapshot)
        forms = [*(piece.form for piece in snapshot.kv), snapshot.state_form]
        if not self._puts and not (self._packs and EXACT_FORM in forms):
            return self.store.put(snapshot)
        if self._waiting_bytes + snapshot.nbytes > self._queue_bytes:
            return None
        self._waiting_bytes += snapshot.nbytes
        self._puts.append(put)
        tasks = []
        for record, (payload, form) in enumerate(zip(snapshot.payloads, forms, strict=True)):
            packs = self._packs and form == EXACT_FORM
            parts = range(0, len(payload), PART_BYTES) if packs else range(0)
            put.parts.append([None] * len(parts))
            tasks += [(record, number, payload[begin : begin + PART_BYTES]) for number, begin in enumerate(parts)]
        put.left = len(tasks)
        if not tasks:
            put.packed = [None] * len(forms)
        for record, number, part in tasks:
            self._packers.submit(_pack, put, record, number, part)
        return put.ticket

    def _put_packed(self, put: _Put) -> StoreEvent | None:
        """Put ``put``, whose records are all packed. Return an event if the store refuses it."""
        assert put.packed is not None
        snapshot = put.snapshot
        self._waiting_bytes -= snapshot.nbytes
        if put.is_dropped:
            return StoreEvent(put.ticket, "dropped", "flushed")
        kv = tuple(
            piece if packed is None else KvPiece(piece.start, piece.end, memoryview(packed), PACKED)
            for piece, packed in zip(snapshot.kv, put.packed[:-1], strict=True)
        )
        last = put.packed[-1]
        state, form = (snapshot.state, snapshot.state_form) if last is None else (memoryview(last), PACKED)
        stored = replace(snapshot, kv=kv, state=state, state_form=form)
        ticket = self.store.put(stored)
        self.raw_bytes += snapshot.nbytes
        self.packed_bytes += stored.nbytes
        if ticket is None:
            return StoreEvent(put.ticket, "dropped", "refused")
        self._outer[ticket] = put.ticket
        return None

    # ------------------------------------------------------------------ between steps

    def clear(self) -> None:
        for put in self._puts:
            put.is_dropped = True
        self.store.clear()

    def poll(self) -> list[StoreEvent]:
        events = self._pass_on()
        for event in self.store.poll():
            fetch = self._fetches.pop(event.ticket, None)
            outer = self._outer.pop(event.ticket, None)
            if fetch is not None and event.kind == "fetched":
                self._unpack(fetch, event)
            else:
                events.append(event if outer is None else replace(event, ticket=outer))
        done = [fetch for fetch in self._unpacking if not fetch.left]
        self._unpacking = [fetch for fetch in self._unpacking if fetch not in done]
        for fetch in done:
            assert fetch.event is not None
            self._damaged += fetch.failed
            event = replace(fetch.event, seconds=fetch.ended_s - fetch.began_s)
            events.append(replace(event, kind="damaged", reason="packing") if fetch.failed else event)
        return events

    def _pass_on(self) -> list[StoreEvent]:
        """Pass puts that are packed to the store, the oldest first."""
        events = []
        while self._puts and self._puts[0].packed is not None:
            refused = self._put_packed(self._puts.popleft())
            if refused is not None:
                events.append(refused)
        return events

    def stats(self) -> StoreStats:
        stats = self.store.stats()
        damaged = {**stats.damaged, "packing": self._damaged} if self._damaged else stats.damaged
        return replace(
            stats,
            queued_bytes=stats.queued_bytes + self._waiting_bytes,
            damaged=damaged,
            raw_bytes=self.raw_bytes,
            packed_bytes=self.packed_bytes,
        )

    def close(self) -> None:
        end_s = time.monotonic() + FINAL_PACKING_S
        while self._puts and time.monotonic() < end_s:
            self._pass_on()
            time.sleep(0.001)
        for threads in (self._packers, self._unpackers):
            threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()


def _pack(put: _Put, record: int, number: int, part: memoryview) -> None:
    """Pack one part of one record, in a thread. The last one joins all parts."""
    with contextlib.suppress(PackingError, MemoryError):  # then the record is put as it is
        put.parts[record][number] = pack_part(part)
    with put.lock:
        put.left -= 1
        if put.left:
            return
    joined: list[bytes | None] = []
    for payload, parts in zip(put.snapshot.payloads, put.parts, strict=True):
        joined.append(_joined(payload, [part for part in parts if part is not None], len(parts)))
    put.packed = joined


def _joined(payload: memoryview, parts: list[bytes], count: int) -> bytes | None:
    """Return the packed form of ``payload`` if all of its ``count`` parts are done and it is shorter."""
    with contextlib.suppress(MemoryError):
        if count and len(parts) == count and HEADER_BYTES + sum(map(len, parts)) < len(payload):
            return join_parts(payload, parts)
    return None


def _task(source: memoryview, form: int, target: memoryview, whole_bytes: int) -> Callable[[], None]:
    """Return a task that fills ``target`` with the last bytes of a record of ``whole_bytes``."""

    def run() -> None:
        if form != PACKED:
            target[:] = source[len(source) - len(target) :]
        elif len(target) == whole_bytes:
            unpack(source, target)
        else:
            whole = np.empty(whole_bytes, np.uint8)
            unpack(source, whole.data)
            target[:] = whole.data[whole_bytes - len(target) :]

    return run


def _run(fetch: _Fetch, task: Callable[[], None], clock: Callable[[], float]) -> None:
    try:
        task()
    except (PackingError, MemoryError):
        fetch.failed = True
    with fetch.lock:
        fetch.ended_s = clock()
        fetch.left -= 1
