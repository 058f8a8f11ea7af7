"""The bucket's thread: uploads of durable checkpoints, and segments of other writers.

    written locally --> bounded queue --> objects that are missing --> rows --> a segment, put if absent
    every ``refresh_s``: list the ledger --> new segments --> local files --> a new index, swapped in by poll

A checkpoint is uploaded from the local volumes, after it is durable there, so no buffer of the engine waits
for the network. Each payload is verified again before it leaves. A segment is put after all objects that its
rows name, so a listed row names objects that exist.

While the bucket does not answer, jobs stay in the queue, and the oldest are lost and counted when it is
full. The local directory has them, and a later restore uploads them. A line in the log says so, and another
that the bucket answers again: each once in ``LOG_S`` at most.

Laws: L9 (an upload is best effort), L11 (the queue is bounded).

Rejected: uploads beside the local write (the slower of two would hold the engine's buffers).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.store.bucket import (
    Bucket,
    Unreachable,
    namespace_key,
    record_key,
    segment_key,
    segment_prefix,
)
from weft.store.extents import BLOCK_BYTES
from weft.store.identity import NamespaceIdentity
from weft.store.index import StoreIndex
from weft.store.ledger import LedgerFiles
from weft.store.rows import KV, REMOTE_VOLUME, ROW, payload_checksum, row_of
from weft.store.segments import SEGMENT_BYTES_MAX, RemoteLedger, segment_of
from weft.store.volumes import Volumes

QUEUE_MAX = 1024
SEGMENT_ROWS_MAX = 4096
LOG_S = 60.0
_log = logging.getLogger("weft.store")
_COPIED = [name for name in ROW.names or ()
           if name not in ("row_hash", "tokens_at", "volume", "offset", "uses", "reserved")]


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A durable checkpoint: (number, line) of its KV records from the root on, then its own."""

    ledger: LedgerFiles
    records: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RemoteIndex:
    """What the bucket holds now."""

    index: StoreIndex


class BucketThread:
    """``counts`` are written by the thread and read by ``stats``."""

    def __init__(self, bucket: Bucket, identity: NamespaceIdentity, ledger: RemoteLedger, volumes: Volumes,
                 report: Callable[[RemoteIndex], None], *, refresh_s: float,
                 forms: frozenset[int] | None = None) -> None:
        self._forms = forms
        self._bucket, self._identity, self._ledger = bucket, identity, ledger
        self._volumes, self._report, self._refresh_s = volumes, report, refresh_s
        self._namespace = identity.digest.hex()
        self.writer = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self.segment_bytes_max = SEGMENT_BYTES_MAX
        self._jobs: deque[UploadJob] = deque(maxlen=QUEUE_MAX)
        self._sent: set[int] = set()
        self._rows: list[bytes] = []
        self._tokens = bytearray()
        self._segments = 0
        self._named = False
        self._log_due_s, self._is_logged_away = 0.0, False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="store-bucket", daemon=True)
        self._thread.start()

    def submit(self, job: UploadJob) -> None:
        if len(self._jobs) == QUEUE_MAX:
            self.counts["dropped"] += 1
        self._jobs.append(job)
        self._wake.set()

    def has_sent(self, number: int) -> bool:
        return number in self._sent

    @property
    def lost(self) -> int:
        """Uploads that a full queue pushed out, or whose bytes were evicted before their turn."""
        return self.counts["dropped"] + self.counts["evicted_before_upload"]

    @property
    def waiting(self) -> int:
        """Checkpoints that are not yet in the bucket."""
        return len(self._jobs) + bool(self._rows)

    def close(self, seconds: float) -> None:
        """Uploads what waits, for at most ``seconds``."""
        end = time.monotonic() + seconds
        while self.waiting and self._bucket.available and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.01)
        self._stop.set()
        self._wake.set()
        self._thread.join(max(0.1, end - time.monotonic()))
        if self.waiting:
            _log.warning("%s: %d uploads were not made before the end", self._bucket.location, self.waiting)

    def _work(self) -> None:
        self._ledger.load()
        next_refresh = 0.0
        self._rebuild()
        while not self._stop.is_set():
            if self._bucket.available:
                try:
                    self._upload()
                    if time.monotonic() >= next_refresh:
                        self._refresh()
                        next_refresh = time.monotonic() + self._refresh_s
                except Unreachable:
                    self.counts["unreachable"] += 1
                except OSError:
                    self.counts["disk_error"] += 1
            self._log_reachability()
            self._wake.wait(min(self._refresh_s, 1.0))
            self._wake.clear()

    def _log_reachability(self) -> None:
        fault, now_s = self._bucket.fault, time.monotonic()
        if fault and now_s >= self._log_due_s:
            _log.warning("%s does not answer: %s; %d uploads wait, %d were lost",
                         self._bucket.location, fault, self.waiting, self.lost)
            self._log_due_s, self._is_logged_away = now_s + LOG_S, True
        elif not fault and self._is_logged_away:
            _log.warning("%s answers again; it was unreachable for %.0f s in all", self._bucket.location,
                         self._bucket.unreachable_s)
            self._is_logged_away = False

    def _upload(self) -> None:
        """Every job, then one segment. Raises Unreachable; the job stays in the queue."""
        while self._jobs and len(self._rows) < SEGMENT_ROWS_MAX and not self._stop.is_set():
            job = self._jobs[0]
            self._send(job)
            if self._jobs[0] is job:  # else ``submit`` has pushed it out of the full queue
                self._jobs.popleft()
        if not self._rows:
            return
        if not self._named:
            self._bucket.put_new(namespace_key(self._namespace), self._identity.as_json())
            self._named = True
        name = segment_key(self._namespace, self.writer, self._segments + 1)
        self._bucket.put_new(name, segment_of(self._rows, bytes(self._tokens)))
        self._segments += 1
        self._rows, self._tokens = [], bytearray()
        self.counts["segments"] += 1

    def _send(self, job: UploadJob) -> None:
        """Puts the payloads that the bucket lacks, and collects the rows."""
        staged: list[tuple[int, np.void, bytes]] = []
        for number, line in job.records:
            if number in self._sent:
                continue
            try:
                row = job.ledger.read_row(line, number)
                tokens = job.ledger.read_tokens(int(row["tokens_at"]), int(row["tokens"])) \
                    if row["kind"] == KV else b""
                payload = memoryview(bytearray(int(row["payload_bytes"])))
                if len(payload):
                    self._volumes.read(int(row["volume"]), int(row["offset"]) // BLOCK_BYTES, payload)
            except OSError:
                self.counts["evicted_before_upload"] += 1
                return
            checksum = row["checksum"].tobytes()
            if payload_checksum(payload) != checksum:
                self.counts["evicted_before_upload"] += 1
                return
            self._put_payload(checksum, payload)
            staged.append((number, row, tokens))
        for number, row, tokens in staged:
            fields = {name: row[name] for name in _COPIED}
            self._rows.append(row_of(**fields, volume=REMOTE_VOLUME,
                                     tokens_at=len(self._tokens) if tokens else 0))
            self._tokens += tokens
            self._sent.add(number)
        self.counts["uploaded"] += 1

    def _put_payload(self, checksum: bytes, payload: memoryview) -> None:
        if not len(payload):
            return
        key = record_key(self._namespace, checksum, len(payload))
        if not self._bucket.exists(key) and self._bucket.put_new(key, payload):
            self.counts["uploaded_bytes"] += len(payload)

    def _refresh(self) -> None:
        prefix = segment_prefix(self._namespace)
        sizes = {one.key.rpartition(f"{prefix}/")[2]: one.nbytes for one in self._bucket.objects(prefix)}
        changed = self._ledger.drop_others(set(sizes))
        skipped: set[str] = set()
        for name in sorted(sizes):
            writer = name.partition("/")[0]
            if name in self._ledger.keys or writer == self.writer or writer in skipped:
                continue
            if self._ledger.nbytes + sizes[name] > self.segment_bytes_max:
                self._ledger.keys.add(name)
                self.counts["segments_left_out"] += 1
                continue
            try:
                content = self._bucket.read_all(f"{prefix}/{name}")
            except FileNotFoundError:
                skipped.add(writer)  # its later segments may name rows of this one
                continue
            if self._ledger.add(name, content):
                changed = True
            else:
                self.counts["damaged_segments"] += 1
        if changed:
            self._rebuild()

    def _rebuild(self) -> None:
        index = StoreIndex(self._forms)
        index.load(self._ledger.live(), self._identity.digest)
        self._report(RemoteIndex(index))
