"""``weft simulate --store``: the engine's tier over a store without bytes, on a clock that its caller moves.

    match, offer, put    the index and the eviction of ``DirectoryStore``: the same code
    reads                one after the other, at the rate of the disk
    writes               one after the other, at the write limit, while no read is under way
    poll                 the events whose time has come
    packing              records are shorter by a given share; threads pack and unpack at given rates

    time     |-- read --|-- read --|       |-- read --|
    writes                         |-- w --|          |-- w --|-- w --|

A read that begins stops the write that is under way, as ``WriteThread`` stops between two pieces of a record. So reads
and writes together never move more than the disk does. A read's latency does not occupy the disk.

Left out, with the effect: volumes (no space is lost to fragments), syncs and the ledger (small compared with payloads),
checksums (10 GB/s on one core), failures.

Laws: L8, L11 (bytes that wait to be written are bounded as in ``WriteThread``).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from weft.costs.restore import RestorePrices
from weft.costs.step import CostModel
from weft.errors import ConfigError
from weft.memory.memory import Memory
from weft.memory.prefix_store import (
    DropReason,
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
    TransferBuffers,
    Uint8s,
    buffer_limit,
    token_bytes,
)
from weft.memory.usage import StoreStats
from weft.planning.roofline import STORE_LATENCY_S, parse_rate
from weft.schedule.store_tier import StoreTier
from weft.schedule.store_writes import GPU_STEP_BYTES
from weft.store.eviction import EVICTED_SHARE, evict
from weft.store.index import KvChain, StoreIndex, entries_of, is_current, prefix_of
from weft.store.ledger import root_chain
from weft.store.space import BLOCK_BYTES, blocks_for
from weft.store.writing import PutRequest, put_request, records_of
from weft.units import parse_bytes


@dataclass(frozen=True, slots=True)
class DiskModel:
    """Bytes it holds, bytes it moves in a second, seconds until the first byte, and the most bytes a second that writes
    may take."""

    capacity_bytes: int
    bytes_s: float
    latency_s: float
    write_bytes_s: float


@dataclass(frozen=True, slots=True)
class PackingModel:
    """Sizes and speeds of packed records (``packed_store``). ``kv``, ``state``: stored bytes over bytes in memory.
    ``pack_bytes_s`` and ``unpack_bytes_s``: bytes in memory, all threads together."""

    kv: float = 1.0
    state: float = 1.0
    pack_bytes_s: float = inf
    unpack_bytes_s: float = inf


NO_PACKING = PackingModel()


class VirtualDisk:
    """A disk in virtual time. ``now_s`` of every call never goes back."""

    def __init__(self, model: DiskModel) -> None:
        self.model = model
        self._now_s = self._reads_end_s = 0.0
        self._writes: deque[tuple[Ticket, float]] = deque()
        """Writes under way, with their remaining bytes."""
        self._written: list[Ticket] = []

    def read(self, nbytes: int, now_s: float) -> float:
        """Return the arrival time of a read of ``nbytes`` that begins now."""
        self._advance(now_s)
        self._reads_end_s = max(self._reads_end_s, now_s) + nbytes / self.model.bytes_s
        return self._reads_end_s + self.model.latency_s

    def write(self, ticket: Ticket, nbytes: int, now_s: float) -> None:
        self._advance(now_s)
        self._writes.append((ticket, float(nbytes)))

    def written(self, now_s: float) -> list[Ticket]:
        """Return the writes that have ended since the last call."""
        self._advance(now_s)
        tickets, self._written = self._written, []
        return tickets

    @property
    def next_written_s(self) -> float:
        """Return the time at which the next write ends if no read begins; infinity without writes."""
        if self._written:
            return self._now_s
        if not self._writes:
            return inf
        return max(self._now_s, self._reads_end_s) + self._writes[0][1] / self._write_rate

    @property
    def _write_rate(self) -> float:
        return min(self.model.write_bytes_s, self.model.bytes_s)

    def _advance(self, now_s: float) -> None:
        at_s, self._now_s = max(self._now_s, self._reads_end_s), now_s
        while self._writes:
            ticket, left = self._writes[0]
            end_s = at_s + left / self._write_rate
            if end_s > now_s:
                if at_s < now_s:
                    self._writes[0] = ticket, left - (now_s - at_s) * self._write_rate
                return
            self._writes.popleft()
            self._written.append(ticket)
            at_s = end_s


NAMESPACE = b"simulated".ljust(16, b"\0")


class VirtualStore:
    """A store without bytes. ``clock`` returns seconds. ``queue_bytes``: puts that wait; more are refused. ``exact``:
    rounded bytes do not match. ``packing``: of exact records."""

    def __init__(
        self,
        disk: DiskModel,
        clock: Callable[[], float],
        *,
        queue_bytes: int,
        exact: bool = True,
        packing: PackingModel = NO_PACKING,
    ) -> None:
        self.fetch_s = 0.0
        """Seconds from request to arrival, summed over fetches."""
        self._disk = VirtualDisk(disk)
        self._packing = packing
        self._packed_until_s = 0.0
        self._packing_puts: deque[tuple[float, Ticket]] = deque()
        """Puts that threads pack, and when they are done."""
        self._raw_bytes = self._packed_bytes = 0
        self._clock = clock
        self._exact = exact
        self._queue_bytes_max = queue_bytes
        self._index = StoreIndex()
        self._pins = Counter[int]()
        self._arrivals: list[tuple[float, int, StoreEvent, tuple[int, ...]]] = []
        """A heap of (time, ticket, event, entries): fetches, and the entries that they pin."""
        self._writes: dict[Ticket, tuple[int, tuple[int, ...]]] = {}
        """Puts that are under way: bytes, and entries that become durable."""
        self._ticket = self._number = 0
        self._used_blocks = self._queued_bytes = 0
        self._fetches = self._fetched_bytes = self._puts = self._written_bytes = self._evicted = 0
        self._dropped = Counter[str]()

    @property
    def next_event_s(self) -> float:
        """Time of the next event of ``poll``; infinity for none."""
        arrival_s = self._arrivals[0][0] if self._arrivals else inf
        packed_s = self._packing_puts[0][0] if self._packing_puts else inf
        return min(arrival_s, packed_s, self._disk.next_written_s)

    @property
    def stored_share(self) -> float:
        """Bytes that the disk has written per byte of puts, so far."""
        return self._packed_bytes / self._raw_bytes if self._raw_bytes else 1.0

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        content = token_bytes(tokens)
        hit = self._index.deepest(_root(salt), content, above=above, exact=self._exact)
        return None if hit is None else prefix_of(self._index, *hit, content, salt)

    @property
    def changes(self) -> int:
        return self._index.durable_changes

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        now_s, ticket = self._clock(), self._new_ticket()
        self._fetches += 1
        if not is_current(self._index, prefix):
            self._later(now_s, StoreEvent(ticket, "missing", "evicted"), ())
            return ticket
        nbytes = prefix.bytes_from(start)
        unpacked_bytes = nbytes / min(self._packing.kv, self._packing.state)
        end_s = self._disk.read(nbytes, now_s) + unpacked_bytes / self._packing.unpack_bytes_s
        entries = tuple(entry for entry, _ in entries_of(prefix))
        self._pins.update(entries)
        self._fetched_bytes += nbytes
        self.fetch_s += end_s - now_s
        self._later(end_s, StoreEvent(ticket, "fetched", "", nbytes, end_s - now_s), entries)
        return ticket

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        if self._queued_bytes >= self._queue_bytes_max:
            return None
        return self._index.offer(_root(salt), token_bytes(tokens[:position]), exact=exact)

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        self._puts += 1
        base = self._index.base(_root(snapshot.salt), snapshot.tokens, snapshot.start, exact=snapshot.exact)
        if base is None:
            return self._refusal("parent")
        request = put_request(base, snapshot, namespace=NAMESPACE, salt=_salt_key(snapshot.salt))
        raw_bytes = request.snapshot.nbytes
        request = self._packed(request)
        if self._queued_bytes + request.snapshot.nbytes > self._queue_bytes_max:
            return self._refusal("queue_full")
        blocks = sum(blocks_for(len(payload)) for payload in request.snapshot.payloads)
        if not self._has_room(blocks, base):
            return self._refusal("store_full")
        places = [(0, 0)] * len(request.snapshot.payloads)
        records = records_of(request, self._index, places, self._number + 1)
        self._number += len(records)
        self._used_blocks += blocks
        self._queued_bytes += request.snapshot.nbytes
        ticket = self._new_ticket()
        self._raw_bytes += raw_bytes
        self._packed_bytes += request.snapshot.nbytes
        begin_s = max(self._packed_until_s, self._clock())
        self._packed_until_s = begin_s + raw_bytes / self._packing.pack_bytes_s
        self._packing_puts.append((self._packed_until_s, ticket))
        self._writes[ticket] = request.snapshot.nbytes, tuple(record.entry for record in records)
        self._begin_writes()
        return ticket

    def poll(self) -> list[StoreEvent]:
        now_s, events = self._clock(), list[StoreEvent]()
        self._begin_writes()
        for ticket in self._disk.written(now_s):
            nbytes, written = self._writes.pop(ticket)
            self._index.make_durable(written)
            self._queued_bytes -= nbytes
            self._written_bytes += nbytes
            events.append(StoreEvent(ticket, "written", "", nbytes))
        while self._arrivals and self._arrivals[0][0] <= now_s:
            _, _, event, pinned = heapq.heappop(self._arrivals)
            if event.kind == "fetched":
                self._pins -= Counter(pinned)
                self._index.touch(pinned[-1])
            events.append(event)
        return events

    def clear(self) -> None:
        raise AssertionError("recorded traffic flushes no store")

    def stats(self) -> StoreStats:
        kinds = self._index.c["kind"][: self._index.length]
        return StoreStats(
            path="simulated",
            writable=True,
            snapshots=int((kinds == 2).sum()),
            kv_records=int((kinds == 1).sum()),
            stored_bytes=self._used_blocks * BLOCK_BYTES,
            capacity_bytes=self._disk.model.capacity_bytes,
            fetches=self._fetches,
            fetched_bytes=self._fetched_bytes,
            puts=self._puts,
            written_bytes=self._written_bytes,
            queued_bytes=self._queued_bytes,
            evicted=self._evicted,
            dropped=dict(self._dropped),
        )

    def close(self) -> None:
        """Do nothing: nothing needs to be closed."""

    def _packed(self, request: PutRequest) -> PutRequest:
        """Return ``request`` with the sizes of packed records."""

        def part(payload: memoryview, share: float, form: int) -> memoryview:
            return payload if form else payload[: ceil(len(payload) * share)]

        whole = request.snapshot
        kv = tuple(replace(piece, payload=part(piece.payload, self._packing.kv, piece.form)) for piece in whole.kv)
        state = part(whole.state, self._packing.state, whole.state_form)
        return replace(request, snapshot=replace(whole, kv=kv, state=state))

    def _begin_writes(self) -> None:
        """Begin to write puts that are packed by now."""
        while self._packing_puts and self._packing_puts[0][0] <= self._clock():
            _, ticket = self._packing_puts.popleft()
            self._disk.write(ticket, self._writes[ticket][0], self._clock())

    def _has_room(self, blocks: int, base: KvChain) -> bool:
        """Return whether ``blocks`` more fit, perhaps after eviction, which spares ``base``."""
        capacity = self._disk.model.capacity_bytes // BLOCK_BYTES
        short = self._used_blocks + blocks - capacity
        if short > 0:
            removed = evict(self._index, max(short, capacity // EVICTED_SHARE), {*self._pins, *base.entries})
            self._evicted += len(removed)
            freed = sum(blocks_for(payload_bytes) for *_, payload_bytes in removed)
            self._used_blocks -= freed
            short -= freed
        return short <= 0

    def _later(self, when_s: float, event: StoreEvent, entries: tuple[int, ...]) -> None:
        heapq.heappush(self._arrivals, (when_s, event.ticket, event, entries))

    def _refusal(self, reason: DropReason) -> Ticket | None:
        self._dropped[reason] += 1
        return None

    def _new_ticket(self) -> Ticket:
        self._ticket += 1
        return Ticket(self._ticket)


def _salt_key(salt: str | None) -> bytes:
    """Return the key of a salt: a simulated store is private to its process, so it is the salt itself."""
    return (salt or "").encode()[:16].ljust(16, b"\0")


def _root(salt: str | None) -> int:
    return root_chain(NAMESPACE, _salt_key(salt))


LINK_BYTES_S = 25e9
"""Bytes a second of a PCIe 4 link with 16 lanes."""
_GUESS_TOKENS = 1024
PACKED_SHARES = {"bfloat16": 0.69, "float32": 0.86}
"""Packed bytes over bytes in memory, by dtype. ``benchmarks/store_packing`` measured them on KV and on states of delta
nets, trained and random; these are the worst. Records in other dtypes count as they are."""
PACK_BYTES_S, UNPACK_BYTES_S = 0.3e9, 0.6e9
"""Bytes a second of one thread, by the same measurement."""
PACK_THREADS = 16
"""Packing threads of a host of 64 cores (``packed_store``)."""
NO_STORE = "none"


@dataclass(frozen=True, slots=True)
class StoreModel:
    """A store to simulate. ``page_bytes``, ``state_bytes``: of all ``ranks`` together. ``name``: as --store named
    it."""

    name: str
    disk: DiskModel
    page_bytes: int
    state_bytes: int
    ranks: int = 1
    packing: PackingModel = NO_PACKING


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Figures of a store. ``fetch_s``: seconds that fetches took, from request to arrival. ``late``: fetches past their
    deadline. ``stored_bytes``: at the end."""

    name: str
    restores: int
    restored_tokens: int
    fetch_s: float
    late: int
    written: int
    dropped: int
    skipped: int
    lost: int
    written_bytes: int
    stored_bytes: int
    evicted: int


def packing_of(kv_dtype: str, state_dtype: str) -> PackingModel:
    """Return the packing of a host with a GPU, for records in these dtypes."""
    return PackingModel(
        PACKED_SHARES.get(kv_dtype, 1.0),
        PACKED_SHARES.get(state_dtype, 1.0),
        PACK_THREADS * PACK_BYTES_S,
        PACK_THREADS * UNPACK_BYTES_S,
    )


def parse_disk(text: str, write_bytes_s: int) -> DiskModel | None:
    """Parse ``1TB@3GB/s`` or ``1TB@3GB/s@100us``; None for ``none``. Raise ConfigError that names the flag."""
    if text == NO_STORE:
        return None
    size, separator, rate = text.partition("@")
    if not separator:
        raise ConfigError(
            f"--store {text!r} is not a store: write its size and its rate, and its latency if "
            f"that is not {STORE_LATENCY_S * 1e3:.0f} ms, for example 1TB@3GB/s or 1TB@3GB/s@100us",
            param="--store",
        )
    capacity_bytes = parse_bytes(size, flag="--store")
    if capacity_bytes <= 0:
        raise ConfigError(f"--store {text!r}: its size must be above 0", param="--store")
    bytes_s, latency_s = parse_rate(rate)
    return DiskModel(capacity_bytes, bytes_s, latency_s, float(write_bytes_s))


def scratch_buffers(memory: Memory, page_bytes: int, state_bytes: int, ranks: int) -> tuple[TransferBuffers, Uint8s]:
    """Return buffers over bytes that nothing reads or writes. ``page_bytes``, ``state_bytes``: of all ``ranks``
    together."""
    scratch_B = np.empty(buffer_limit(memory.plan.arena_bytes * ranks), np.uint8)
    return TransferBuffers(
        page_bytes, state_bytes, limit_bytes=len(scratch_B), allocate=lambda size_bytes: scratch_B[:size_bytes]
    ), scratch_B


def tier_for(
    model: StoreModel, memory: Memory, cost: CostModel, clock: Callable[[], float]
) -> tuple[StoreTier, VirtualStore]:
    """Return the tier of ``memory``, and the store under it."""
    buffers, scratch_B = scratch_buffers(memory, model.page_bytes, model.state_bytes, model.ranks)
    exact = not (memory.plan.compressed_pages or memory.plan.compressed_kv_bytes)
    store = VirtualStore(model.disk, clock, queue_bytes=len(scratch_B), exact=exact, packing=model.packing)
    prices = RestorePrices(
        cost.prefill_s(0, _GUESS_TOKENS) / _GUESS_TOKENS,
        read_bytes_s=model.disk.bytes_s,
        latency_s=model.disk.latency_s,
        copy_bytes_s=LINK_BYTES_S * model.ranks,
    )
    tier = StoreTier(
        store,
        memory,
        buffers,
        prices,
        clock,
        exact=exact,
        write_bytes_s=model.disk.write_bytes_s,
        step_bytes=GPU_STEP_BYTES * model.ranks,
        stored_share=lambda: store.stored_share,
    )
    return tier, store


def report_of(model: StoreModel, tier: StoreTier, store: VirtualStore) -> StoreReport:
    stats, restores, writes = store.stats(), tier.restores.counts, tier.writes.counts
    return StoreReport(
        model.name,
        restores.restores,
        restores.restored_tokens,
        store.fetch_s,
        restores.late,
        writes.written,
        writes.dropped,
        writes.skipped,
        writes.lost,
        stats.written_bytes,
        stats.stored_bytes,
        stats.evicted,
    )
