"""Threads of fetches, which read records, verify them, compare tokens, and fill staging buffers.

    fetch --> rows and tokens of the whole path --compare--> one read for each record --verify--> event
                 "tokens": another prompt                      "checksum": damaged bytes

One task compares the tokens of every KV record from the root on with those of the request (law L10). It then
queues a task for each payload, so that several threads read at once. The event follows the last task, and
says ``fetched`` only if every task succeeded. Bytes are verified in the staging buffer that they were read
into; the engine does not look at a buffer before its event.

A failure has a cause: ``damaged`` means that the record has to be retired (its bytes are wrong), ``missing`` that it
could not be read now. A disk that stalls delays only its own fetches.

Reads come before writes: the write thread asks ``wait_idle`` before each piece of a payload.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.memory.prefix_store import EventKind, Ticket
from weft.store.ledger import LedgerError, payload_checksum, token_size
from weft.store.sealing import PAYLOAD, TOKENS, Sealer

THREADS = 4
UNREACHABLE = "unreachable"
"""Reason of a failure of the network, which says nothing about the record."""
SEAL_BROKEN = "seal"
"""Reason for bytes that were not sealed with this key."""


class TokenSource(Protocol):
    """The source of rows and tokens: the ledger of a directory, or segments of a bucket."""

    def read_row(self, index: int, number: int) -> np.void:
        """Return row ``index``. Raise LedgerError where it is not that of record ``number``."""

    def read_tokens(self, tokens_at: int, nbytes: int) -> bytes: ...


class PayloadSource(Protocol):
    """The source of a record's bytes: a volume, or an object."""

    def read_payload(self, row: np.void, into: memoryview) -> None:
        """Fill ``into``. Raise OSError."""


@dataclass(frozen=True, slots=True)
class RecordRead:
    """One record of a fetch. ``begin``, ``count``: its tokens, none for a state. ``into``: buffer for the payload, None
    if only the tokens are read. ``skip_bytes``: bytes at the payload's start that are not read."""

    entry: int
    number: int
    line: int
    begin: int
    count: int
    payload_bytes: int
    into: memoryview | None
    skip_bytes: int = 0


@dataclass(slots=True)
class RecordFetch:
    """One ticket under way. ``failure``: (kind, reason, entry, number) of the first failure."""

    ticket: Ticket
    ledger: TokenSource
    records: tuple[RecordRead, ...]
    tokens: bytes
    started: float
    left: int = 0
    nbytes: int = 0
    failure: tuple[EventKind, str, int, int] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class FetchThreads:
    """The threads of fetches. ``finished`` is called once for each fetch, in a thread."""

    def __init__(
        self,
        source: PayloadSource,
        finished: Callable[[RecordFetch], None],
        *,
        threads: int = THREADS,
        sealer: Sealer | None = None,
    ) -> None:
        self._source, self._finished, self._sealer = source, finished, sealer
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        """Tasks that are queued or under way."""
        self._threads = [
            threading.Thread(target=self._work, name=f"store-read-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fetch: RecordFetch) -> None:
        self.run(lambda: self._compare(fetch))

    def run(self, task: Callable[[], None]) -> None:
        """Queue another short task for one of the threads."""
        with self._idle:
            self._unfinished += 1
        self._tasks.put(task)

    def wait_idle(self, seconds: float) -> None:
        """Return when no read is queued or under way, or after ``seconds``."""
        if self._unfinished:
            with self._idle:
                self._idle.wait_for(lambda: not self._unfinished, seconds)

    def close(self, seconds: float) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(seconds / len(self._threads))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(MemoryError):  # the fetch misses its deadline; this thread goes on
                task()
            with self._idle:
                self._unfinished -= 1
                if not self._unfinished:
                    self._idle.notify_all()

    def _compare(self, fetch: RecordFetch) -> None:
        rows: list[tuple[RecordRead, np.void]] = []
        for record in fetch.records:
            try:
                row = fetch.ledger.read_row(record.line, record.number)
                if int(row["payload_bytes"]) != record.payload_bytes or int(row["tokens"]) != record.count:
                    raise LedgerError("row")
                expected = fetch.tokens[4 * record.begin : 4 * (record.begin + record.count)]
                if record.count and self._tokens(fetch.ledger, row) != expected:
                    raise LedgerError("tokens")
            except LedgerError as error:
                fetch.failure = ("damaged", str(error), record.entry, record.number)
            except OSError as error:
                fetch.failure = ("missing", reason_of(error), record.entry, record.number)
            if fetch.failure is not None:
                self._finished(fetch)
                return
            if record.into is not None and record.payload_bytes:
                rows.append((record, row))
        fetch.left = len(rows)
        if not rows:
            self._finished(fetch)
        for record, row in rows:
            self.run(lambda record=record, row=row: self._read(fetch, record, row))  # type: ignore[misc]

    def _tokens(self, ledger: TokenSource, row: np.void) -> bytes:
        """Return the tokens of a record. Raise LedgerError if they cannot be decrypted."""
        stored = ledger.read_tokens(int(row["tokens_at"]), token_size(row))
        if self._sealer is None:
            return stored
        tokens = bytearray(4 * int(row["tokens"]))
        if not self._sealer.open(memoryview(stored), memoryview(tokens), row, TOKENS):
            raise LedgerError(SEAL_BROKEN)
        return bytes(tokens)

    def _fill(self, record: RecordRead, row: np.void) -> str:
        """Fill the target of ``record``; return why the bytes are damaged, "" if they are not. Raise OSError."""
        assert record.into is not None
        whole = self._sealer is None and not record.skip_bytes
        stored = record.into if whole else memoryview(bytearray(record.payload_bytes))
        self._source.read_payload(row, stored)
        if payload_checksum(stored) != row["checksum"].tobytes():
            return "checksum"
        if self._sealer is not None:
            plain = memoryview(bytearray(len(record.into) + record.skip_bytes)) if record.skip_bytes else record.into
            if not self._sealer.open(stored, plain, row, PAYLOAD):
                return SEAL_BROKEN
            stored = plain
        if record.skip_bytes:
            record.into[:] = stored[record.skip_bytes :]
        return ""

    def _read(self, fetch: RecordFetch, record: RecordRead, row: np.void) -> None:
        failure: tuple[EventKind, str, int, int] | None = None
        try:
            if fetch.failure is None and (reason := self._fill(record, row)):
                failure = ("damaged", reason, record.entry, record.number)
        except OSError as error:
            failure = ("missing", reason_of(error), record.entry, record.number)
        with fetch.lock:
            fetch.left -= 1
            fetch.nbytes += record.payload_bytes
            fetch.failure = fetch.failure or failure
            last = fetch.left == 0
        if last:
            self._finished(fetch)


def reason_of(error: OSError) -> str:
    """Return a short reason: the system's words, without the path."""
    return error.strerror or str(error) or type(error).__name__
