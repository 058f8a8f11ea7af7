"""The protocol of a prefix store, the frozen values between engine and store, and the buffers between their bytes.

    engine thread                                   threads of the store
    tokens --match--> StoredPrefix   memory only
    tokens --offer--> PutOffer       memory only
    fetch(StagingBuffers) -- Ticket --> queue of reads  --> read, verify, compare tokens --.
    put(NewSnapshot) ------- Ticket --> queue of writes --> records, tokens, ledger line --|
    poll <------------------------------- StoreEvent("fetched", "written", ...) -----------'

    load    store's thread writes a buffer --> a step copies it into pages and a slot --> freed
    store   a step copies pages and a slot into a buffer --> store's thread reads it  --> freed

A *stored page* is the KV of 16 tokens of all attention layers, unsharded and in head order: one page of an
engine on one rank. A *KV record* holds the KV of up to 256 tokens of one edge, as stored pages in a row. A
*state record* holds the state after ``position`` tokens. A *stored snapshot* is a state record with the KV
records of all tokens before it.

One thread calls every method of a ``Store``, and none of them waits for a disk or a network. A store belongs
to one namespace (``weft.store.identity``): another model, dtype or layout on the same path never matches.
Threads see buffers only, never the arena. Buffers given to ``fetch`` and ``put`` belong to the store until
``poll`` returns the event of their ticket. Cancelling the request changes nothing of that.

Laws: L8 (a hit is a snapshot with all of its KV), L9 (a put never waits: it is refused when queues are
full), L10 (``match`` compares hashes; the fetch compares the tokens themselves before its event says
``fetched``), L11 (each drop and each refusal is counted with its reason; buffers have ``limit_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from weft.memory.usage import StoreStats
from weft.units import BufferId, ceil_div

PrefixTokens = Sequence[int] | npt.NDArray[np.int32]
"""Tokens of a prompt. An array costs no list of integers."""

Ticket = NewType("Ticket", int)
"""One fetch or one put under way; each ends in exactly one ``StoreEvent``."""

STORED_PAGE_TOKENS = 16
"""Tokens of a stored page, the smallest piece of KV on disk."""
RECORD_TOKENS_MAX = 256
"""Most tokens of a KV record."""

EXACT_FORM, INT8_KV, INT4_KV, INT8_STATE, PACKED = range(5)
"""Forms of payloads: as the engine computes with them, compressed by it, or packed without rounding."""

EventKind = Literal["fetched", "damaged", "missing", "written", "dropped"]
DropReason = Literal[
    "queue_full", "store_full", "rate", "read_only", "disk_error", "disk_full", "parent", "too_large", "closed"
]


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """KV record number ``record``, with the KV of tokens [``start``, ``end``). ``form``: see ``KvPiece``. ``entry``:
    where the store has it; it means nothing to others. ``stored_bytes``: bytes that a read of it moves, 0 for
    ``payload_bytes``."""

    record: int
    entry: int
    start: int
    end: int
    payload_bytes: int
    form: int = 0
    stored_bytes: int = 0


class KvRows(NamedTuple):
    """KV of tokens [``start``, ``end``) in one form, in ``row_count`` rows of a page each, from row ``first`` of a
    buffer on. Compressed pages are consecutive, from the first byte of the first row on."""

    start: int
    end: int
    first: int
    row_count: int
    form: int = EXACT_FORM


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored snapshot: the state after ``position`` tokens and the KV of all of them.

    ``exact``: every byte is as the engine computed it, without rounding. ``remote``: bytes that are not on the local
    disk yet. ``tokens`` and ``salt`` are those of the question; a fetch compares them."""

    snapshot: int
    entry: int
    position: int
    spans: tuple[StoredSpan, ...]
    state_bytes: int
    state_form: int
    exact: bool
    tokens: bytes = field(repr=False)
    """The first ``position`` tokens as little-endian uint32."""
    remote: bool = False
    salt: str | None = field(default=None, repr=False)
    stored_state_bytes: int = 0
    """Bytes that a read of the state moves; 0 means ``state_bytes``."""
    near: bool = False
    """Whether its bytes are in this process already (another engine sent them): a read then has no price."""

    def bytes_from(self, start: int) -> int:
        """Return the bytes that a fetch of [``start``, ``position``) reads."""
        return (self.stored_state_bytes or self.state_bytes) + sum(
            span.stored_bytes or span.payload_bytes for span in self.spans if span.end > start
        )

    def rows_from(self, start: int, page_bytes: int) -> tuple[KvRows, ...]:
        """Return how a fetch of [``start``, ``position``) fills a buffer of pages: neighbours in one form follow one
        another, and each change of form begins a new row."""
        if not any(span.form for span in self.spans) or not page_bytes:
            pages = ceil_div(self.position, STORED_PAGE_TOKENS) - start // STORED_PAGE_TOKENS
            return (KvRows(start, self.position, 0, pages if page_bytes else 0),)
        rows: list[KvRows] = []
        for form, group in groupby((span for span in self.spans if span.end > start), key=lambda span: span.form):
            spans = list(group)
            begin, end = max(start, spans[0].start), spans[-1].end
            stored_page_bytes = spans[0].payload_bytes // ceil_div(spans[0].end - spans[0].start, STORED_PAGE_TOKENS)
            count = ceil_div(end - begin, STORED_PAGE_TOKENS)
            first = rows[-1].first + rows[-1].row_count if rows else 0
            rows.append(KvRows(begin, end, first, ceil_div(count * stored_page_bytes, page_bytes), form))
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class StagingBuffers:
    """Writable memory for one fetch. A thread writes it until the fetch's event is polled.

    ``kv``: the pages of [``start``, ``position``), ``start`` rounded down and ``position`` up to 16 tokens.
    ``state``: the state record. ``page_bytes``: where the form of the KV changes, the next span begins at a
    multiple of it (``StoredPrefix.rows_from``); 0 for prefixes in one form."""

    kv: memoryview
    state: memoryview
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PutOffer:
    """The KV that a put of a snapshot needs: positions [``start``, ``position``). The store has the rest.

    ``start`` is a multiple of 16. ``above``: the position of the deepest snapshot that the store has of these tokens, 0
    without one. No request can resume at KV without a state, so ``above`` may be far before ``start``. An offer is good
    until the next put."""

    start: int
    position: int
    above: int = 0


@dataclass(frozen=True, slots=True)
class KvPiece:
    """KV of tokens [``start``, ``end``), at most 256 of them: one record. ``start`` is a multiple of 16, and
    so is ``end``, except at the snapshot's position.

    ``form`` 0: pages as the engine computes with them. Another number names a compressed form of the engine;
    the store only keeps it."""

    start: int
    end: int
    payload: memoryview
    form: int = 0


def token_bytes(tokens: PrefixTokens) -> bytes:
    """Return tokens as bytes, little-endian uint32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


@dataclass(frozen=True, slots=True)
class NewSnapshot:
    """A snapshot to store: the state after ``tokens`` (``token_bytes``). ``kv`` covers [offer.start, ``position``)
    without gaps. Payloads are bytes. ``seconds``: seconds that a hit saves; eviction ranks by it. ``state_form``: as
    the form of a ``KvPiece``."""

    salt: str | None
    tokens: bytes = field(repr=False)
    kv: tuple[KvPiece, ...]
    state: memoryview
    exact: bool
    seconds: float = 0.0
    state_form: int = EXACT_FORM

    @staticmethod
    def of(
        salt: str | None,
        tokens: PrefixTokens,
        kv: Sequence[KvPiece],
        state: memoryview,
        *,
        exact: bool,
        seconds: float = 0.0,
        state_form: int = EXACT_FORM,
    ) -> NewSnapshot:
        """Return the snapshot after ``tokens``, of payloads in any dtype."""
        pieces = tuple(replace(piece, payload=piece.payload.cast("B")) for piece in kv)
        return NewSnapshot(salt, token_bytes(tokens), pieces, state.cast("B"), exact, seconds, state_form)

    @property
    def position(self) -> int:
        return len(self.tokens) // 4

    @property
    def start(self) -> int:
        """Position at which its KV begins."""
        return self.kv[0].start if self.kv else self.position

    @property
    def payloads(self) -> list[memoryview]:
        return [*(piece.payload for piece in self.kv), self.state]

    @property
    def nbytes(self) -> int:
        return sum(len(payload) for payload in self.payloads)


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """The end of a ticket. Its buffers belong to the engine again.

    ``fetched``: the staging buffers hold verified bytes. ``damaged``: a checksum or the tokens did not match,
    or the disk failed; the records are retired. ``missing``: a record was evicted or its object is gone.
    ``written``: the snapshot is durable and matches from now on. ``dropped``: it was not written."""

    ticket: Ticket
    kind: EventKind
    reason: str = ""
    nbytes: int = 0
    seconds: float = 0.0


class Store(Protocol):
    """One namespace of one directory or bucket."""

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        """Return the deepest stored snapshot of more than ``above`` tokens that ``tokens`` begins with."""

    @property
    def changes(self) -> int:
        """A number that grows whenever the answers of ``match`` may change."""

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        """Read the KV of [``start``, ``position``) and the state. ``start`` is a multiple of 16."""

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        """Return the KV that a put of this snapshot needs; None if it is stored or would be refused."""

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        """Store ``snapshot``. None: refused and counted."""

    def clear(self) -> None:
        """Forget every record of this namespace, those that are being written too. A store that cannot be
        written, and a bucket that others share, keep theirs."""

    def poll(self) -> list[StoreEvent]:
        """Return events since the last call."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """End the threads. Puts that are queued are written as far as a few seconds allow."""


class Orders(Protocol):
    """Prefixes that another engine waits for: they are put at once, whatever their worth here."""

    @property
    def open(self) -> bool:
        """Whether there is any order."""

    def wants(self, salt: str | None, tokens: PrefixTokens) -> bool:
        """Return whether the snapshot at the end of ``tokens`` is one of them, and was not put yet."""

    def prompt_of(self, request_id: str) -> tuple[str, npt.NDArray[np.int32]] | None:
        """Return salt and tokens of an order; None if it has ended."""

    def computed(self, request_id: str, position: int) -> None:
        """Note that its prompt is computed, and memory has ``position`` tokens of it."""


Uint8s = npt.NDArray[np.uint8]
Allocate = Callable[[int], Uint8s]
"""A function from a number of bytes to uint8 [bytes], with any contents."""

BUFFER_SHARE = 4
BUFFER_BYTES_MIN = 256 << 20
BUFFER_BYTES_MAX = 8 << 30


def buffer_limit(arena_bytes: int) -> int:
    """Return the most bytes of transfer buffers: a quarter of the arena's, within bounds."""
    return min(max(arena_bytes // BUFFER_SHARE, BUFFER_BYTES_MIN), BUFFER_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class TransferBuffer:
    """A transfer buffer; see the module."""

    pages_PB: Uint8s
    state_B: Uint8s

    @property
    def nbytes(self) -> int:
        return self.pages_PB.nbytes + self.state_B.nbytes


class BufferPlaces(Protocol):
    """A table by which a device finds the bytes of a buffer that a plan names."""

    def __getitem__(self, buffer: BufferId) -> TransferBuffer: ...


def _allocate(size_bytes: int) -> Uint8s:
    return np.empty(size_bytes, np.uint8)


class TransferBuffers:
    """The transfer buffers of an engine. ``page_bytes`` and ``slot_bytes`` are those of the arena's plan. ``allocate``:
    pinned memory on a GPU; ``release`` takes it back."""

    def __init__(
        self,
        page_bytes: int,
        slot_bytes: int,
        *,
        limit_bytes: int,
        allocate: Allocate = _allocate,
        release: Callable[[Uint8s], None] = lambda _: None,
    ) -> None:
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.next_id = BufferId(0)
        self._allocate, self._release = allocate, release
        self._flat: dict[BufferId, Uint8s] = {}
        self._buffers: dict[BufferId, TransferBuffer] = {}

    def __getitem__(self, buffer: BufferId) -> TransferBuffer:
        return self._buffers[buffer]

    def __contains__(self, buffer: BufferId) -> bool:
        return buffer in self._buffers

    def __len__(self) -> int:
        return len(self._buffers)

    def bytes_for(self, pages: int) -> int:
        return pages * self.page_bytes + self.slot_bytes

    def has_room(self, pages: int) -> bool:
        """Return whether a buffer of ``pages`` pages and a state fits in addition to the others."""
        return self.used_bytes + self.bytes_for(pages) <= self.limit_bytes

    def add(self, pages: int) -> BufferId:
        """Add a buffer, and return its id, which was ``next_id``. There must be room for it."""
        size_bytes = self.bytes_for(pages)
        assert self.has_room(pages), f"a transfer buffer of {size_bytes} bytes is over the limit"
        flat, kv_bytes = self._allocate(size_bytes), pages * self.page_bytes
        buffer = self.next_id
        self._flat[buffer] = flat
        self._buffers[buffer] = TransferBuffer(flat[:kv_bytes].reshape(pages, self.page_bytes), flat[kv_bytes:])
        self.next_id = BufferId(buffer + 1)
        self.used_bytes += size_bytes
        return buffer

    def free(self, buffer: BufferId) -> None:
        """Free ``buffer``, which no step and no thread uses any more."""
        self.used_bytes -= self._buffers.pop(buffer).nbytes
        self._release(self._flat.pop(buffer))
