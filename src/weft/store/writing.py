"""Writing of puts: payloads, then tokens, then rows, each durable before the next begins.

    put(tokens, kv, state) --> KV row, KV row, ..., SNAPSHOT row   each names the one before as its parent
        --> bounded queue --rate limit--> volumes --sync--> tokens --sync--> rows --sync--> outcome

Puts that wait together are written together: one sync of each file serves them all. A put that would wait for more than
the queue holds is refused by ``submit``, never delayed. A failed write costs that put and the puts that depend on it.

Payloads are written in pieces. Before each piece the thread lets reads go first, for at most READS_FIRST_S: a
request waits for a read, and none for a write. A retirement is durable before its blocks are given back, so
no record is overwritten while a row names it.

Laws: L8 (pieces without gaps), L9 (a put is best effort), L11 (the queue is bounded in bytes).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from weft.memory.prefix_store import RECORD_TOKENS_MAX, STORED_PAGE_TOKENS, DropReason, NewSnapshot, Ticket
from weft.store.index import NO_ENTRY, KvChain, StoreIndex
from weft.store.ledger import (
    INEXACT,
    KV,
    RETIRED,
    SEALED,
    SNAPSHOT,
    USED,
    LedgerFiles,
    chain_of,
    head_of,
    payload_checksum,
    row_of,
)
from weft.store.reading import reason_of
from weft.store.sealing import PAYLOAD, TOKENS, Sealer
from weft.store.space import BLOCK_BYTES, Volumes

BATCH_BYTES = 32 << 20
PIECE_BYTES = 8 << 20
READS_FIRST_S = 1.0
"""Most seconds that a piece waits for reads, so that a stalled read cannot stop writes for ever."""
FAILURES_MAX = 65_536
"""Most numbers of failed records that are remembered."""


@dataclass(frozen=True, slots=True)
class RecordWrite:
    """One record of a put. ``row``: the row without checksum and place of tokens. ``payload``, ``tokens``: as the
    engine has them. ``stored_bytes``: of the payload on the disk."""

    entry: int
    number: int
    volume: int
    block: int
    payload: memoryview
    tokens: bytes
    row: dict[str, Any]
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class PutJob:
    """A put to write. ``needs``: numbers of records of earlier puts that must have become durable."""

    ticket: Ticket
    records: tuple[RecordWrite, ...]
    needs: frozenset[int]
    new_volumes: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class MarkJob:
    """Rows without payload. ``retired``: (number, volume, first block, bytes). ``used``: (number, times)."""

    retired: tuple[tuple[int, int, int, int], ...] = ()
    used: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The outcome of a job. ``lines``: for each record its row in the ledger, empty if the put failed.
    ``failed_volumes``: volumes that could not be created, or were removed."""

    job: PutJob | MarkJob
    lines: tuple[int, ...] = ()
    reason: DropReason | None = None
    detail: str = ""
    failed_volumes: tuple[int, ...] = ()


@dataclass(slots=True)
class WriteRate:
    """A bucket of bytes: ``delay`` says how long a write must wait, and takes its bytes."""

    bytes_per_second: float
    clock: Callable[[], float]
    free_at: float = 0.0

    def delay(self, nbytes: int) -> float:
        now = self.clock()
        self.free_at = max(self.free_at, now - 1.0) + nbytes / self.bytes_per_second
        return max(0.0, self.free_at - nbytes / self.bytes_per_second - now)


class WriteThread:
    """The thread of writes. ``finished`` is called in the thread, once for each job, in order."""

    def __init__(
        self,
        ledger: LedgerFiles,
        volumes: Volumes,
        finished: Callable[[WriteOutcome], None],
        *,
        bytes_per_second: float,
        queue_bytes_max: int,
        idle: Callable[[LedgerFiles], LedgerFiles],
        reads_first: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self._checksums: dict[int, bytes] = {}
        """Checksum by number of record, of records that were written and have no row yet."""
        self.ledger, self._volumes, self._finished, self._idle = ledger, volumes, finished, idle
        self._reads_first = reads_first
        self._rate = WriteRate(bytes_per_second, clock)
        self._queue_bytes_max = queue_bytes_max
        self._jobs: deque[PutJob | MarkJob] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failed: dict[int, None] = {}
        self._clock, self._call_began_s = clock, inf
        self.queued_bytes = 0
        self._thread = threading.Thread(target=self._work, name="store-write", daemon=True)
        self._thread.start()

    @property
    def room_bytes(self) -> int:
        """Bytes of puts that would still be accepted."""
        return self._queue_bytes_max - self.queued_bytes

    @property
    def stalled_s(self) -> float:
        """Seconds that the disk has not returned from a call."""
        return max(0.0, self._clock() - self._call_began_s)

    def submit(self, job: PutJob | MarkJob) -> None:
        with self._wake:
            self._jobs.append(job)
            if isinstance(job, PutJob):
                self.queued_bytes += job.nbytes
            self._wake.notify()

    def close(self, seconds: float) -> None:
        """Write the queued jobs without a rate limit, for at most ``seconds``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    if not self._wake.wait(1.0):
                        break
                batch = self._next_batch()
                if not batch and self._closing:
                    return
            self.ledger = self._idle(self.ledger)
            if batch:
                self._write(batch)
                del batch  # the payloads: their buffers belong to the engine again

    def _next_batch(self) -> list[PutJob | MarkJob]:
        """Return jobs of one kind, up to ``BATCH_BYTES``."""
        batch: list[PutJob | MarkJob] = []
        size = 0
        while self._jobs and size < BATCH_BYTES and (not batch or type(self._jobs[0]) is type(batch[0])):
            job = self._jobs.popleft()
            size += job.nbytes if isinstance(job, PutJob) else 0
            batch.append(job)
        return batch

    def _write(self, batch: Sequence[PutJob | MarkJob]) -> None:
        if isinstance(batch[0], MarkJob):
            self._write_marks([job for job in batch if isinstance(job, MarkJob)])
        else:
            self._write_puts([job for job in batch if isinstance(job, PutJob)])

    def _write_marks(self, jobs: list[MarkJob]) -> None:
        rows = [row_of(kind=RETIRED, parent=number) for job in jobs for number, _, _, _ in job.retired]
        rows += [row_of(kind=USED, parent=number, uses=times) for job in jobs for number, times in job.used]
        reason, detail = self._append(rows, b"")[1:]
        for job in jobs:
            self._finished(WriteOutcome(job, reason=reason, detail=detail))

    def _write_puts(self, jobs: list[PutJob]) -> None:
        written: list[PutJob] = []
        touched: dict[int, list[PutJob]] = {}
        failures: dict[Ticket, WriteOutcome] = {}
        for job in jobs:
            failure = self._write_payloads(job)
            if failure is None:
                written.append(job)
                for record in job.records:
                    touched.setdefault(record.volume, []).append(job)
            else:
                failures[job.ticket] = failure
                self._remember_failure(job)
        for volume, users in touched.items():
            try:
                with self._disk_call():
                    self._volumes.sync(volume)
            except OSError as error:
                gone = (volume,) if error.errno == errno.ENOENT else ()
                reason = _full_or_broken(error)
                failures |= {job.ticket: WriteOutcome(job, (), reason, reason_of(error), gone) for job in users}
        self._commit([job for job in written if job.ticket not in failures], failures)
        for job in jobs:
            with self._wake:
                self.queued_bytes -= job.nbytes
            if job.ticket in failures:
                self._remember_failure(job)
            self._finished(failures.get(job.ticket) or WriteOutcome(job, self._lines.pop(job.ticket)))

    def _write_payloads(self, job: PutJob) -> WriteOutcome | None:
        for created, (volume, blocks) in enumerate(job.new_volumes):
            try:
                self._volumes.create(volume, blocks)
            except OSError as error:
                return WriteOutcome(
                    job,
                    (),
                    _full_or_broken(error),
                    reason_of(error),
                    tuple(failed for failed, _ in job.new_volumes[created:]),
                )
        if not job.needs.isdisjoint(self._failed):
            return WriteOutcome(job, reason="parent")
        for record in job.records:
            try:
                self._write_record(record)
            except OSError as error:
                gone = (record.volume,) if error.errno == errno.ENOENT else ()
                return WriteOutcome(job, (), _full_or_broken(error), reason_of(error), gone)
        return None

    def _write_record(self, record: RecordWrite) -> None:
        stored = record.payload
        if self._sealer is not None:
            stored = self._sealer.seal(record.payload, record.row, PAYLOAD)
        self._checksums[record.number] = payload_checksum(stored)
        for begin in range(0, len(stored), PIECE_BYTES):
            piece = stored[begin : begin + PIECE_BYTES]
            self._wait_for_rate(len(piece))
            if not self._closing:
                self._reads_first(READS_FIRST_S)
            with self._disk_call():
                self._volumes.write(record.volume, record.block + begin // BLOCK_BYTES, piece)

    @contextlib.contextmanager
    def _disk_call(self) -> Iterator[None]:
        self._call_began_s = self._clock()
        try:
            yield
        finally:
            self._call_began_s = inf

    def _wait_for_rate(self, nbytes: int) -> None:
        until = self._rate.delay(nbytes)
        with self._wake:
            if until > 0:
                self._wake.wait_for(lambda: self._closing, until)

    def _remember_failure(self, job: PutJob) -> None:
        """Remember the records of a failed put, because puts that depend on it may be queued already."""
        self._failed.update((record.number, None) for record in job.records)
        while len(self._failed) > FAILURES_MAX:
            del self._failed[next(iter(self._failed))]

    def _commit(self, jobs: list[PutJob], failures: dict[Ticket, WriteOutcome]) -> None:
        """Append the rows of ``jobs``; a job that depends on a failed one fails too."""
        self._lines: dict[Ticket, tuple[int, ...]] = {}
        rows: list[bytes] = []
        tokens = bytearray()
        good: list[tuple[PutJob, int]] = []
        for job in jobs:
            if job.needs & {
                r.number
                for outcome in failures.values()
                if isinstance(outcome.job, PutJob)
                for r in outcome.job.records
            }:
                failures[job.ticket] = WriteOutcome(job, reason="parent")
                continue
            good.append((job, len(rows)))
            for record in job.records:
                rows.append(
                    row_of(
                        **record.row,
                        number=record.number,
                        checksum=self._checksums[record.number],
                        tokens_at=self.ledger.tokens_bytes + len(tokens),
                    )
                )
                content = record.tokens
                tokens += content if self._sealer is None else self._sealer.seal(content, record.row, TOKENS)
        self._checksums.clear()
        first, reason, detail = self._append(rows, bytes(tokens))
        for job, first_row in good:
            if reason is None:
                self._lines[job.ticket] = tuple(range(first + first_row, first + first_row + len(job.records)))
            else:
                failures[job.ticket] = WriteOutcome(job, (), reason, detail)

    def _append(self, rows: list[bytes], tokens: bytes) -> tuple[int, DropReason | None, str]:
        try:
            with self._disk_call():
                return (self.ledger.append(rows, tokens) if rows else 0), None, ""
        except OSError as error:
            return 0, _full_or_broken(error), reason_of(error)


def _full_or_broken(error: OSError) -> DropReason:
    return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk_error"


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A put, checked. ``base``: the stored KV that ``snapshot`` continues. ``salt``: the key of its salt."""

    base: KvChain
    snapshot: NewSnapshot
    namespace: bytes
    salt: bytes


def put_request(base: KvChain, snapshot: NewSnapshot, *, namespace: bytes, salt: bytes) -> PutRequest:
    """Return a put. The pieces must go from the end of ``base`` to the last token without gaps, which is asserted."""
    position = base.end
    for piece in snapshot.kv:
        assert piece.start == position, "KV pieces leave a gap"
        assert piece.start % STORED_PAGE_TOKENS == 0, "a KV piece begins at a multiple of 16"
        assert 0 < piece.end - piece.start <= RECORD_TOKENS_MAX, "a KV piece has 1 to 256 tokens"
        position = piece.end
    assert position == snapshot.position, "KV pieces end at the snapshot's position"
    return PutRequest(base, snapshot, namespace, salt)


def records_of(
    request: PutRequest, index: StoreIndex, places: Sequence[tuple[int, int]], first_number: int
) -> tuple[RecordWrite, ...]:
    """Return the records with their rows; each gets an entry that is not durable yet."""
    sealer, snapshot = index.sealer, request.snapshot
    flags = (0 if snapshot.exact else INEXACT) | (0 if sealer is None else SEALED)
    written = int(time.time()) & 0xFFFF_FFFF
    space = index.spaces.setdefault((request.namespace, request.salt), len(index.spaces))
    base = request.base
    parent_entry = base.entries[-1] if base.entries else NO_ENTRY
    parent_number = index.c["number"].item(parent_entry) if base.entries else 0
    chain, number = base.chain, first_number
    records: list[RecordWrite] = []
    owned = {
        "flags": flags,
        "namespace": request.namespace,
        "salt": request.salt,
        "written": written,
        "seconds": snapshot.seconds,
    }

    def add(kind: int, place: tuple[int, int], payload: memoryview, content: bytes, **own: Any) -> int:
        entry = index.add(
            parent=parent_entry,
            space=space,
            kind=kind,
            number=number,
            flags=flags,
            volume=place[0],
            block=place[1],
            payload=index.stored_size(len(payload)),
            seconds=snapshot.seconds,
            **own,
        )
        row = {
            **owned,
            **own,
            "kind": kind,
            "parent": parent_number,
            "volume": place[0],
            "offset": place[1] * BLOCK_BYTES,
            "payload_bytes": index.stored_size(len(payload)),
        }
        if sealer is not None:
            row |= _veiled(sealer, row)
        records.append(
            RecordWrite(entry, number, place[0], place[1], payload, content, row, index.stored_size(len(payload)))
        )
        return entry

    for piece, place in zip(snapshot.kv, places, strict=False):
        tokens = snapshot.tokens[4 * piece.start : 4 * piece.end]
        head, chain = head_of(chain, tokens), chain_of(chain, tokens)
        parent_entry = add(
            KV,
            place,
            piece.payload,
            tokens,
            head=head,
            chain=chain,
            position=piece.start,
            tokens=piece.end - piece.start,
            form=piece.form,
        )
        parent_number, number = number, number + 1
    add(SNAPSHOT, places[-1], snapshot.state, b"", chain=chain, position=snapshot.position, form=snapshot.state_form)
    return tuple(records)


def _veiled(sealer: Sealer, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a sealed record's row that differ from those of a plain one. The seal covers the fields of
    ``_MEANING``, so all of them must have values."""
    digests = row["chain"].to_bytes(8, "little") + row.get("head", 0).to_bytes(8, "little")
    veiled = sealer.veiled(digests)
    return {
        "chain": int.from_bytes(veiled[:8], "little"),
        "head": int.from_bytes(veiled[8:], "little"),
        "tokens": row.get("tokens", 0),
    }
