"""The ledger of a bucket: segments of all writers, and the thread that uploads and reads them.

    written locally --> bounded queue --> objects that are missing --> rows --> a segment, put if absent
    every ``refresh_s``: list the ledger --> new segments --> local files --> a new index, swapped in by poll

    segment   | magic 16 | format u32 | rows u32 | token bytes u64 | xxh3_64 of the rest u64 | rows | tokens |

A segment is one immutable object for each batch of a writer: one process with a random name. Its rows have its own
numbers, and a parent is in the same segment or an earlier one of the same writer. So segments merge by listing:
``RemoteLedger`` gives every row a number of its own, and lookups see the trees of all writers as siblings. Segments are
kept as files under ``remote/`` of the local directory, so a restart reads only new ones.

A snapshot is uploaded from the local volumes, after it is durable there, so no buffer of the engine waits
for the network. Each payload is verified again before it leaves. A segment is put after all objects that its
rows name, so a listed row names objects that exist. While the bucket does not answer, jobs stay in the queue,
and the oldest are lost and counted when it is full. A later restore uploads them.

Laws: L9 (an upload is best effort), L10 (tokens are in the segments, and a fetch compares them), L11 (the
queue and ``SEGMENT_BYTES_MAX``).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from weft.store.bucket import Bucket, Unreachable, namespace_key, record_key, segment_key, segment_prefix
from weft.store.disk import OsDisk
from weft.store.identity import NamespaceIdentity
from weft.store.index import StoreIndex
from weft.store.ledger import (
    FORMAT_VERSION,
    KV,
    REMOTE_VOLUME,
    ROW,
    ROW_BYTES,
    SNAPSHOT,
    LedgerError,
    LedgerFiles,
    LedgerRows,
    parse_rows,
    payload_checksum,
    row_of,
    token_size,
    token_sizes,
)
from weft.store.recovery import LiveRows, live_rows
from weft.store.sealing import Sealer
from weft.store.space import Volumes

SEGMENT_MAGIC = b"weft-store-seg\0\0"
HEADER_BYTES = 40
_SEGMENT_SHIFT = 36
"""Bits of a byte's offset in the tokens of a segment; the bits above have the segment's number."""
_NO_PARENT = 1 << 62
SEGMENT_BYTES_MAX = 1 << 30
"""Most bytes of segments on the local disk: 250,000 snapshots of 512 tokens."""


def segment_of(rows: list[bytes], tokens: bytes) -> bytes:
    body = b"".join(rows) + tokens
    return (
        SEGMENT_MAGIC
        + FORMAT_VERSION.to_bytes(4, "little")
        + len(rows).to_bytes(4, "little")
        + len(tokens).to_bytes(8, "little")
        + xxh3_64_intdigest(body).to_bytes(8, "little")
        + body
    )


def rows_of_segment(content: bytes) -> LedgerRows | None:
    """Return the rows; None for bytes that are not a segment, or rows with tokens outside of the segment."""
    head, body = content[:HEADER_BYTES], content[HEADER_BYTES:]
    count, token_bytes = int.from_bytes(head[20:24], "little"), int.from_bytes(head[24:32], "little")
    if (
        not head.startswith(SEGMENT_MAGIC + FORMAT_VERSION.to_bytes(4, "little"))
        or len(body) != count * ROW_BYTES + token_bytes
        or xxh3_64_intdigest(body) != int.from_bytes(head[32:40], "little")
    ):
        return None
    rows, valid = parse_rows(body[: count * ROW_BYTES])
    ends = rows["tokens_at"].astype(np.float64) + token_sizes(rows)
    return rows if valid.all() and (ends <= token_bytes).all() else None


class RemoteLedger:
    """Rows of all segments that were read. One thread adds segments; fetch threads read rows."""

    def __init__(self, folder: Path, disk: OsDisk) -> None:
        self._folder, self._disk = folder, disk
        self.nbytes = 0
        """Bytes of the segments in the folder."""
        self.keys: set[str] = set()
        self._lost: set[int] = set()
        self._rows: list[LedgerRows] = []
        self._files: list[tuple[Path, int]] = []
        self._places: dict[str, int] = {}
        """Index of each segment in ``_rows``, ``_starts`` and ``_files``."""
        self._numbers: dict[str, dict[int, int]] = {}
        self._starts: list[int] = []
        self._count = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load segments that an earlier process has left in the folder."""
        try:
            names = [name for name in self._disk.names(self._folder) if name.endswith(".seg")]
        except OSError:
            return
        for name in names:
            writer, _, number = name.removesuffix(".seg").rpartition("-")
            try:
                self._append(f"{writer}/{number}.seg", self._disk.read_file(self._folder / name), self._folder / name)
            except OSError:
                continue

    def add(self, name: str, content: bytes) -> bool:
        """Add a segment. ``name``: WRITER/NUMBER.seg. Return False if ``content`` is not a segment; the object is then
        never read again."""
        path = self._folder / name.replace("/", "-")
        self._disk.make_directory(self._folder)
        self._disk.write_file(path, content)
        return self._append(name, content, path)

    def drop_others(self, names: set[str]) -> bool:
        """Drop the segments that are not among ``names``, and return whether there were any. Raise OSError."""
        gone = [name for name in self._places if name not in names]
        for name in gone:
            place = self._places.pop(name)
            path, tokens_at = self._files[place]
            rows = self._rows[place]
            self._disk.remove(path)
            self.nbytes -= tokens_at + int(token_sizes(rows).sum())
            with self._lock:
                self._lost.update(rows["number"].tolist())
        return bool(gone)

    def lose(self, number: int) -> None:
        """Leave a record out from now on, because its object is missing or damaged."""
        with self._lock:
            self._lost.add(number)

    def read_row(self, index: int, number: int) -> np.void:
        with self._lock:
            if not 0 <= index < self._count:
                raise LedgerError("row")
            segment = bisect_right(self._starts, index) - 1
            row: np.void = self._rows[segment][index - self._starts[segment]]
        if row["number"] != number:
            raise LedgerError("row")
        return row

    def read_tokens(self, tokens_at: int, nbytes: int) -> bytes:
        segment, offset = tokens_at >> _SEGMENT_SHIFT, tokens_at & ((1 << _SEGMENT_SHIFT) - 1)
        path, begin = self._files[segment]
        content = bytearray(nbytes)
        with self._disk.reading(path) as handle:
            self._disk.read(handle, memoryview(content), begin + offset)
        return bytes(content)

    def live(self) -> LiveRows:
        """Return the rows of all segments as one ledger; ``lines`` are indices for ``read_row``."""
        with self._lock:
            rows = np.concatenate(self._rows) if self._rows else np.zeros(0, dtype=ROW)
            valid = np.isin(rows["kind"], (KV, SNAPSHOT))
            valid &= ~np.isin(rows["number"], list(self._lost))
        live = live_rows(rows, valid, volume_blocks={REMOTE_VOLUME: 1 << 50}, tokens_bytes=1 << 62)
        live.lines[:] -= 1
        return live

    def _append(self, name: str, content: bytes, path: Path) -> bool:
        self.keys.add(name)
        parsed = rows_of_segment(content)
        if parsed is None:
            return False
        rows = parsed.copy()
        known = self._numbers.setdefault(name.partition("/")[0], {})
        fresh = range(self._count + 1, self._count + 1 + len(rows))
        known.update(zip(parsed["number"].tolist(), fresh, strict=True))
        rows["number"] = np.asarray(fresh, dtype=np.uint64)
        rows["parent"] = [known.get(parent, _NO_PARENT) if parent else 0 for parent in rows["parent"].tolist()]
        rows["volume"] = REMOTE_VOLUME
        blocks = (rows["payload_bytes"] + np.uint64(4095)) // np.uint64(4096)
        rows["offset"] = (np.cumsum(blocks) - blocks + np.uint64(1)) * np.uint64(4096) + self._end_of_places()
        rows["tokens_at"] += np.uint64(len(self._files) << _SEGMENT_SHIFT)
        self.nbytes += HEADER_BYTES + len(rows) * ROW_BYTES + int(token_sizes(rows).sum())
        self._places[name] = len(self._rows)
        with self._lock:
            self._rows.append(rows)
            self._starts.append(self._count)
            self._files.append((path, HEADER_BYTES + len(rows) * ROW_BYTES))
            self._count += len(rows)
        return True

    def _end_of_places(self) -> np.uint64:
        """Return the end of the places used so far. Remote records are in no volume; each gets blocks of its own, so
        that records do not seem to overlap."""
        if not self._rows or not len(self._rows[-1]):
            return np.uint64(0)
        last = self._rows[-1][-1]
        return np.uint64(int(last["offset"]) + -(-int(last["payload_bytes"]) // 4096) * 4096)


QUEUE_MAX = 1024
SEGMENT_ROWS_MAX = 4096
LOG_S = 60.0
_log = logging.getLogger("weft.store")
_COPIED = [
    name for name in ROW.names or () if name not in ("row_hash", "tokens_at", "volume", "offset", "uses", "reserved")
]


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A durable snapshot to upload: (number, line) of its KV records from the root on, then its own."""

    ledger: LedgerFiles
    records: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RemoteIndex:
    """The index of the bucket's present segments."""

    index: StoreIndex


class BucketThread:
    """The thread that uploads and reads segments. ``counts`` are written by the thread and read by ``stats``."""

    def __init__(
        self,
        bucket: Bucket,
        identity: NamespaceIdentity,
        ledger: RemoteLedger,
        volumes: Volumes,
        report: Callable[[RemoteIndex], None],
        *,
        refresh_s: float,
        forms: frozenset[int] | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self._forms, self._sealer = forms, sealer
        self._bucket, self._identity, self._ledger = bucket, identity, ledger
        self._volumes, self._report, self._refresh_s = volumes, report, refresh_s
        self._namespace = identity.digest.hex()
        self.writer = secrets.token_hex(8)
        self.counts: Counter[str] = Counter()
        self.segment_bytes_max = SEGMENT_BYTES_MAX
        self._jobs: deque[UploadJob] = deque(maxlen=QUEUE_MAX)
        self.sent: set[int] = set()
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

    @property
    def lost(self) -> int:
        """Number of uploads that a full queue pushed out, or whose bytes were evicted before their turn."""
        return self.counts["dropped"] + self.counts["evicted_before_upload"]

    @property
    def waiting(self) -> int:
        """Number of snapshots that are not yet in the bucket."""
        return len(self._jobs) + bool(self._rows)

    def close(self, seconds: float) -> None:
        """Upload the jobs that wait, for at most ``seconds``."""
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
            _log.warning(
                "%s does not answer: %s; %d uploads wait, %d were lost",
                self._bucket.location,
                fault,
                self.waiting,
                self.lost,
            )
            self._log_due_s, self._is_logged_away = now_s + LOG_S, True
        elif not fault and self._is_logged_away:
            _log.warning(
                "%s answers again; it was unreachable for %.0f s in all",
                self._bucket.location,
                self._bucket.unreachable_s,
            )
            self._is_logged_away = False

    def _upload(self) -> None:
        """Upload every job, then one segment. Raise Unreachable; the job stays in the queue."""
        while self._jobs and len(self._rows) < SEGMENT_ROWS_MAX and not self._stop.is_set():
            job = self._jobs[0]
            self._send(job)
            if self._jobs[0] is job:  # otherwise ``submit`` has pushed the job out of the full queue
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
        """Put the payloads that the bucket lacks, and collect the rows."""
        staged: list[tuple[int, np.void, bytes]] = []
        for number, line in job.records:
            if number in self.sent:
                continue
            try:
                row = job.ledger.read_row(line, number)
                tokens = job.ledger.read_tokens(int(row["tokens_at"]), token_size(row))
                payload = memoryview(bytearray(int(row["payload_bytes"])))
                if len(payload):
                    self._volumes.read_payload(row, payload)
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
            self._rows.append(row_of(**fields, volume=REMOTE_VOLUME, tokens_at=len(self._tokens) if tokens else 0))
            self._tokens += tokens
            self.sent.add(number)
        self.counts["uploaded"] += 1

    def _put_payload(self, checksum: bytes, payload: memoryview) -> None:
        if not len(payload):
            return
        key = record_key(self._namespace, checksum, len(payload))
        if not self._bucket.exists(key) and self._bucket.put_new(key, payload):
            self.counts["uploaded_bytes"] += len(payload)

    def _refresh(self) -> None:
        prefix = segment_prefix(self._namespace)
        sizes = {stored.key.rpartition(f"{prefix}/")[2]: stored.nbytes for stored in self._bucket.objects(prefix)}
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
        index = StoreIndex(self._forms, self._sealer)
        index.load(self._ledger.live(), self._identity.digest)
        self._report(RemoteIndex(index))
