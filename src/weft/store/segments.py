"""Segments: the ledger of a bucket, one immutable object for each batch of a writer.

    | magic 16 | format u32 | rows u32 | token bytes u64 | xxh3_64 of the rest u64 | rows | tokens |

A writer is one process with a random name. Its rows have its own numbers, and a parent is in the same segment
or in an earlier one of the same writer. So segments of several writers merge by listing: ``RemoteLedger``
gives every row a number of its own, and lookups see the trees of all writers beside each other.

Segments are kept as files under ``remote/`` of the local directory, so a restart reads only new ones.

A segment that the bucket has no more is dropped here too: its file goes, and its records are misses.

Laws: L10 (tokens are in the segments, and a fetch compares them), L11 (``SEGMENT_BYTES_MAX``; the caller
leaves out what would pass it).

Rejected: one shared ledger object (writers would overwrite each other, or need a lock in the bucket).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from weft.store.disk import OsDisk
from weft.store.ledger import LedgerError
from weft.store.recovery import LiveRows, live_rows
from weft.store.rows import (
    CHECKPOINT,
    FORMAT_VERSION,
    KV,
    REMOTE_VOLUME,
    ROW,
    ROW_BYTES,
    LedgerRows,
    parse_rows,
)

SEGMENT_MAGIC = b"weft-store-seg\0\0"
HEADER_BYTES = 40
_SEGMENT_SHIFT = 36
"""A place of tokens is the segment's number above this bit, and the byte in its tokens below."""
_NO_PARENT = 1 << 62
SEGMENT_BYTES_MAX = 1 << 30
"""Most bytes of segments on the local disk: 250,000 checkpoints of 512 tokens."""


def segment_of(rows: list[bytes], tokens: bytes) -> bytes:
    body = b"".join(rows) + tokens
    return (SEGMENT_MAGIC + FORMAT_VERSION.to_bytes(4, "little") + len(rows).to_bytes(4, "little")
            + len(tokens).to_bytes(8, "little") + xxh3_64_intdigest(body).to_bytes(8, "little") + body)


def rows_of_segment(content: bytes) -> LedgerRows | None:
    """The rows; None for bytes that are no segment, or whose tokens do not lie inside."""
    head, body = content[:HEADER_BYTES], content[HEADER_BYTES:]
    count, token_bytes = int.from_bytes(head[20:24], "little"), int.from_bytes(head[24:32], "little")
    if not head.startswith(SEGMENT_MAGIC + FORMAT_VERSION.to_bytes(4, "little")) \
            or len(body) != count * ROW_BYTES + token_bytes \
            or xxh3_64_intdigest(body) != int.from_bytes(head[32:40], "little"):
        return None
    rows, valid = parse_rows(body[:count * ROW_BYTES])
    ends = rows["tokens_at"].astype(np.float64) + 4.0 * rows["tokens"]
    return rows if valid.all() and (ends <= token_bytes).all() else None


class RemoteLedger:
    """Rows of all segments that were seen. A thread adds; fetch threads read."""

    def __init__(self, folder: Path, disk: OsDisk) -> None:
        self._folder, self._disk = folder, disk
        self.nbytes = 0
        """Of the segments that lie in the folder."""
        self.keys: set[str] = set()
        self._lost: set[int] = set()
        self._rows: list[LedgerRows] = []
        self._files: list[tuple[Path, int]] = []
        self._places: dict[str, int] = {}
        """Segment -> its place in ``_rows``, ``_starts`` and ``_files``."""
        self._numbers: dict[str, dict[int, int]] = {}
        self._starts: list[int] = []
        self._count = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Segments that an earlier process has left in the folder."""
        try:
            names = [name for name in self._disk.names(self._folder) if name.endswith(".seg")]
        except OSError:
            return
        for name in names:
            writer, _, number = name.removesuffix(".seg").rpartition("-")
            try:
                self._append(f"{writer}/{number}.seg", self._disk.read_file(self._folder / name),
                             self._folder / name)
            except OSError:
                continue

    def add(self, name: str, content: bytes) -> bool:
        """``name``: WRITER/NUMBER.seg. False if it is no segment; it is then never asked for again."""
        path = self._folder / name.replace("/", "-")
        self._disk.make_directory(self._folder)
        self._disk.write_file(path, content)
        return self._append(name, content, path)

    def drop_others(self, names: set[str]) -> bool:
        """Drops the segments that are not among ``names``. Whether there were any. Raises OSError."""
        gone = [name for name in self._places if name not in names]
        for name in gone:
            place = self._places.pop(name)
            path, tokens_at = self._files[place]
            rows = self._rows[place]
            self._disk.remove(path)
            self.nbytes -= tokens_at + 4 * int(rows["tokens"].sum())
            with self._lock:
                self._lost.update(rows["number"].tolist())
        return bool(gone)

    def lose(self, number: int) -> None:
        """The object of a record is gone or damaged: it is left out from now on."""
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

    def read_tokens(self, tokens_at: int, count: int) -> bytes:
        segment, at = tokens_at >> _SEGMENT_SHIFT, tokens_at & ((1 << _SEGMENT_SHIFT) - 1)
        path, begin = self._files[segment]
        content = bytearray(4 * count)
        with self._disk.reading(path) as handle:
            self._disk.read(handle, memoryview(content), begin + at)
        return bytes(content)

    def live(self) -> LiveRows:
        """The rows of all segments as one ledger; ``lines`` are indices for ``read_row``."""
        with self._lock:
            rows = np.concatenate(self._rows) if self._rows else np.zeros(0, dtype=ROW)
            valid = np.isin(rows["kind"], (KV, CHECKPOINT))
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
        rows["parent"] = [known.get(parent, _NO_PARENT) if parent else 0
                          for parent in rows["parent"].tolist()]
        rows["volume"] = REMOTE_VOLUME
        blocks = (rows["payload_bytes"] + np.uint64(4095)) // np.uint64(4096)
        rows["offset"] = (np.cumsum(blocks) - blocks + np.uint64(1)) * np.uint64(4096) + self._end_of_places()
        rows["tokens_at"] += np.uint64(len(self._files) << _SEGMENT_SHIFT)
        self.nbytes += HEADER_BYTES + len(rows) * ROW_BYTES + 4 * int(rows["tokens"].sum())
        self._places[name] = len(self._rows)
        with self._lock:
            self._rows.append(rows)
            self._starts.append(self._count)
            self._files.append((path, HEADER_BYTES + len(rows) * ROW_BYTES))
            self._count += len(rows)
        return True

    def _end_of_places(self) -> np.uint64:
        """Remote records lie nowhere; each gets blocks of its own, so that none seem to overlap."""
        if not self._rows or not len(self._rows[-1]):
            return np.uint64(0)
        last = self._rows[-1][-1]
        return np.uint64(int(last["offset"]) + -(-int(last["payload_bytes"]) // 4096) * 4096)
