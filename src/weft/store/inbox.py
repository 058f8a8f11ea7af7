"""``Inbox``: prefixes that other engines sent, in the memory of this process until a request loads them.

    thread of the link      parcel 1: KV [0, 1024), state     verified --> arrival of handoff h, to 1024
                            parcel 2: KV [1024, 1500), state  verified --> the same one, to 1500
    engine thread           match --> StoredPrefix            fetch --> staging buffers --> the arrival goes

A parcel has the contents of a store's put: KV records from a page on, and the state after them. Parcels of one handoff
follow one another, and the last state replaces the one before. So a sender that dies in the middle leaves a shorter
prefix that can be used.

An arrival without room is refused as FULL, and its sender tries again: each kept arrival saves a prompt. Handoffs rank
by the time of their first parcel. A further parcel of a handoff pushes out handoffs that began later, so that the
oldest one always completes. Arrivals that have waited for STALE_S may be pushed out too: their client may have left.

Laws: L8 (an arrival matches only where memory has all KV before it), L10 (tokens and salt are compared),
L11 (``limit_bytes``). Checksums are compared before the sender learns that its bytes are here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.memory.prefix_store import (
    STORED_PAGE_TOKENS,
    PrefixTokens,
    StagingBuffers,
    StoredPrefix,
    StoredSpan,
    Uint8s,
    token_bytes,
)
from weft.store.index import places_of
from weft.store.ledger import payload_checksum

EXPIRES_S = 60.0
"""Seconds after which an arrival that no request has loaded is dropped."""
FULL = "its memory for records is full"
"""The only refusal after which the same parcel may be accepted later."""
STALE_S = 3.0
"""Seconds without progress after which an arrival may be dropped for a new one."""
ROOM_S = 5.0
"""Seconds for which senders repeat a parcel that was refused as FULL. An engine that stays full longer is
overloaded."""
_FIRST_NUMBER = 1 << 62
"""First number of an inbox's snapshots; those of a directory stay below."""


class SentRecord(msgspec.Struct, frozen=True, array_like=True):
    """KV of tokens [``start``, ``end``), or a state (``start`` == ``end``), in a form of ``memory.prefix_store``.
    ``checksum``: xxh3-128 of its bytes."""

    start: int
    end: int
    form: int
    nbytes: int
    checksum: bytes


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Records that one engine sends to another. ``namespace``: of the bytes (``store.identity``). ``handoff``: the
    request they are for. ``tokens``: all up to ``position``, little-endian uint32. ``records``: KV in order from
    ``start`` on, then the state; their bytes follow in this order."""

    namespace: bytes
    handoff: str
    salt: str
    tokens: bytes
    start: int
    position: int
    exact: bool
    records: list[SentRecord]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)


@dataclass(slots=True)
class _Arrival:
    """The records of one handoff so far. ``number``: of the snapshot at ``position``."""

    number: int
    salt: str
    tokens: bytes
    start: int
    position: int
    exact: bool
    kv: list[tuple[SentRecord, Uint8s]]
    state: tuple[SentRecord, Uint8s]
    arrived_s: float

    @property
    def nbytes(self) -> int:
        return sum(len(payload) for _, payload in self.kv) + len(self.state[1])


class Inbox:
    """Arrivals until requests load them. ``namespace``: of this engine. ``limit_bytes``: of all arrivals. ``clock``
    gives seconds."""

    def __init__(self, namespace: bytes, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.changes = 0
        self.received_bytes = 0
        self.refused = 0
        self._namespace = namespace
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._arrivals: dict[str, _Arrival] = {}
        self._next = _FIRST_NUMBER

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(arrival.nbytes for arrival in self._arrivals.values())

    def renew(self, namespace: bytes) -> None:
        """Take records of ``namespace`` from now on, and drop records of other namespaces."""
        with self._lock:
            self._namespace = namespace
            self._arrivals.clear()
            self.changes += 1

    # ------------------------------------------------------------------ thread of the link

    def accept(self, parcel: Parcel, payload: memoryview) -> str:
        """Take a copy of ``payload``. Return the reason of a refusal, "" if it is accepted."""
        refusal = self._accept(parcel, payload)
        self.refused += bool(refusal) and refusal != FULL
        return refusal

    def _accept(self, parcel: Parcel, payload: memoryview) -> str:
        if parcel.namespace != self._namespace:
            return "records of another model, configuration or arithmetic"
        if not _is_sound(parcel, payload):
            return "records that do not fit together"
        if parcel.nbytes > self.limit_bytes:
            return self._no_room(parcel.nbytes)
        with self._lock:
            if self._pushed_out(parcel) is None:  # checked before the bytes, since the parcel will come again
                return FULL
        content, offset = np.frombuffer(bytes(payload), np.uint8), 0
        records: list[tuple[SentRecord, Uint8s]] = []
        for record in parcel.records:
            part = content[offset : offset + record.nbytes]
            if payload_checksum(part.data) != record.checksum:
                return "damaged bytes"
            records.append((record, part))
            offset += record.nbytes
        with self._lock:
            if parcel.namespace != self._namespace:  # the weights were replaced meanwhile
                return "records of another model, configuration or arithmetic"
            return self.add(parcel, records)

    def add(self, parcel: Parcel, records: list[tuple[SentRecord, Uint8s]]) -> str:
        before = self._before(parcel)
        kv, start = records[:-1], parcel.start
        if before is not None:
            kv, start = [*before.kv, *kv], before.start
        nbytes = sum(len(payload) for _, payload in (*kv, records[-1]))
        if nbytes > self.limit_bytes:  # no transfer buffer could hold the arrival either
            self._arrivals.pop(parcel.handoff, None)
            return self._no_room(nbytes)
        pushed_out = self._pushed_out(parcel)
        if pushed_out is None:
            return FULL
        for name in pushed_out:
            del self._arrivals[name]
        self._next += 1
        self.changes += 1
        self.received_bytes += parcel.nbytes
        self._arrivals[parcel.handoff] = _Arrival(
            self._next, parcel.salt, parcel.tokens, start, parcel.position, parcel.exact, kv, records[-1], self._clock()
        )
        return ""

    def _before(self, parcel: Parcel) -> _Arrival | None:
        """Return the arrival that the parcel goes on from."""
        before = self._arrivals.get(parcel.handoff)
        if before is None or not (
            before.position == parcel.start and before.salt == parcel.salt and parcel.tokens.startswith(before.tokens)
        ):
            return None
        return before

    def _pushed_out(self, parcel: Parcel) -> list[str] | None:
        """Return arrivals to drop so that the parcel has room; None if dropping all that may go is not enough. The
        caller refuses a parcel that is too large for an empty inbox."""
        before = self._before(parcel)
        nbytes = parcel.nbytes + (0 if before is None else before.nbytes - len(before.state[1]))
        others = [name for name in self._arrivals if name != parcel.handoff]
        over = sum(self._arrivals[name].nbytes for name in others) + nbytes - self.limit_bytes
        names, stale_s = list(self._arrivals), self._clock() - STALE_S
        behind = names[names.index(parcel.handoff) + 1 :] if parcel.handoff in self._arrivals else []
        stale = [name for name in others if name not in behind and self._arrivals[name].arrived_s < stale_s]
        pushed_out = []
        for name in (*stale, *reversed(behind)):
            if over <= 0:
                break
            pushed_out.append(name)
            over -= self._arrivals[name].nbytes
        return None if over > 0 and nbytes <= self.limit_bytes else pushed_out

    def _no_room(self, nbytes: int) -> str:
        return f"{nbytes} bytes, and there is room for {self.limit_bytes}"

    # ------------------------------------------------------------------ engine thread

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        """Return a match as ``Store.match`` does, if memory has the KV before the arrival: ``above`` tokens."""
        if not self._arrivals:
            return None
        content = token_bytes(tokens)
        with self._lock:
            fitting = [
                arrival
                for arrival in self._arrivals.values()
                if arrival.position > above
                and arrival.start <= above
                and arrival.salt == (salt or "")
                and content.startswith(arrival.tokens)
            ]
            if not fitting:
                return None
            return _prefix_of(max(fitting, key=lambda arrival: arrival.position), salt)

    def copy(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> int:
        """Fill ``into`` with the KV of [``start``, position) and the state. Return the bytes copied; 0 if the arrival
        is gone."""
        with self._lock:
            arrival = next((known for known in self._arrivals.values() if known.number == prefix.snapshot), None)
        if arrival is None:
            return 0
        kv, copied = into.kv.cast("B"), 0
        for span, offset, length in places_of(prefix, start, into.page_bytes):
            kv[offset : offset + length] = arrival.kv[span.record][1][span.payload_bytes - length :].data
            copied += length
        state = arrival.state[1]
        into.state.cast("B")[: len(state)] = state.data
        return copied + len(state)

    def expire(self) -> None:
        """Drop arrivals that no request took."""
        before_s = self._clock() - EXPIRES_S
        if any(arrival.arrived_s < before_s for arrival in tuple(self._arrivals.values())):
            with self._lock:
                for name, arrival in list(self._arrivals.items()):
                    if arrival.arrived_s < before_s:
                        del self._arrivals[name]
                        self.changes += 1

    def drop(self, prefix: StoredPrefix) -> None:
        """Drop an arrival whose bytes a request has."""
        with self._lock:
            for name, arrival in list(self._arrivals.items()):
                if arrival.number == prefix.snapshot:
                    del self._arrivals[name]
                    self.changes += 1


def _is_sound(parcel: Parcel, payload: memoryview) -> bool:
    """Return whether the records cover [``start``, ``position``) without gaps, end in a state, and have all their
    bytes."""
    if (
        not parcel.records
        or parcel.nbytes != payload.nbytes
        or parcel.start % STORED_PAGE_TOKENS
        or len(parcel.tokens) != 4 * parcel.position
    ):
        return False
    position = parcel.start
    for record in parcel.records[:-1]:
        if record.start != position or record.end <= position or (position % STORED_PAGE_TOKENS):
            return False
        position = record.end
    return position == parcel.position and parcel.records[-1].start == parcel.records[-1].end == position


def _prefix_of(arrival: _Arrival, salt: str | None) -> StoredPrefix:
    spans = tuple(
        StoredSpan(number, -1, record.start, record.end, record.nbytes, record.form)
        for number, (record, _) in enumerate(arrival.kv)
    )
    state, payload = arrival.state
    return StoredPrefix(
        arrival.number,
        -1,
        arrival.position,
        spans,
        len(payload),
        state.form,
        arrival.exact,
        arrival.tokens,
        salt=salt,
        near=True,
    )


def parcel_of(
    namespace: bytes,
    handoff: str,
    salt: str | None,
    tokens: bytes,
    start: int,
    pieces: Sequence[tuple[int, int, int, memoryview]],
    *,
    exact: bool,
) -> Parcel:
    """Return a parcel. ``pieces``: (start, end, form, bytes) of the KV records, then of the state."""
    records = [
        SentRecord(first, end, form, payload.nbytes, payload_checksum(payload)) for first, end, form, payload in pieces
    ]
    return Parcel(
        namespace=namespace,
        handoff=handoff,
        salt=salt or "",
        tokens=tokens,
        start=start,
        position=len(tokens) // 4,
        exact=exact,
        records=records,
    )
