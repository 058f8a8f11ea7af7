"""The ledger: one file of rows that name every record, and one of the records' tokens; both are append-only.

    ledger-00000003.rows      header | row | row | row | ...          144 bytes each
    ledger-00000003.tokens    uint32 uint32 uint32 ...                the tokens of KV records

    row   | kind flags tokens form | number parent | position volume offset payload_bytes checksum |
          | tokens_at chain head | namespace salt | seconds written uses | row_hash |

* ``KV``: the KV record ``number`` holds ``tokens`` tokens from ``position`` on. ``parent`` is the record that
  ends there, 0 at the root.
* ``SNAPSHOT``: the state after ``position`` tokens; ``parent`` is the KV record that ends there.
* ``RETIRED``: record ``parent`` is gone, and its slot may be used again.
* ``USED``: snapshot ``parent`` was restored ``uses`` times more.

A snapshot is stored in this order, and each arrow is a sync of the disk:

    payloads into volumes  ->  tokens  ->  rows of KV records and of the snapshot

So a row that is on the disk names payloads that are on the disk. Rows have one length: a damaged row costs only itself,
and the next append overwrites a torn one. ``chain`` names a prefix by 64 bits: xxh3 of the parent's chain and the
tokens. ``head`` is the same over at most 16 tokens; with it a lookup finds a child without knowing the child's length.

The generation in the names grows with each compaction: both files are written from the live rows, synced, and the
rename of the rows file makes the new generation the valid one. docs/store.md has the table of bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from weft.memory.prefix_store import STORED_PAGE_TOKENS
from weft.store.disk import OsDisk
from weft.store.sealing import SEAL_BYTES

ROW = np.dtype([
    ("kind", "u1"), ("flags", "u1"), ("tokens", "<u2"), ("form", "<u4"), ("number", "<u8"),
    ("parent", "<u8"), ("position", "<u4"), ("volume", "<u4"), ("offset", "<u8"), ("payload_bytes", "<u8"),
    ("checksum", "V16"), ("tokens_at", "<u8"), ("chain", "<u8"), ("head", "<u8"), ("namespace", "V16"),
    ("salt", "V16"), ("seconds", "<f4"), ("written", "<u4"), ("uses", "<u4"), ("reserved", "<u4"),
    ("row_hash", "<u8"),
])  # fmt: skip
ROW_BYTES = 144
assert ROW.itemsize == ROW_BYTES

HEADER, KV, SNAPSHOT, RETIRED, USED = 0, 1, 2, 3, 4
INEXACT = 1
"""Bit of ``flags``: the bytes were rounded, or computed from rounded ones."""
SEALED = 2
"""Bit of ``flags``: payload, tokens, ``chain`` and ``head`` are encrypted (``sealing``)."""
REMOTE_VOLUME = 0xFFFF_FFFF
"""Value of ``volume`` for a record that is an object of a bucket."""
FORMAT_VERSION = 1
MAGIC = b"weft-store-rows\0"
NO_SALT = bytes(16)

LedgerRows = npt.NDArray[np.void]


def row_of(**fields: Any) -> bytes:
    """Return one row with its hash; fields that are not named are 0."""
    row = np.zeros(1, dtype=ROW)
    for name, value in fields.items():
        row[name] = np.void(value) if isinstance(value, bytes) else value
    body = row.tobytes()[:-8]
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def header_row(generation: int) -> bytes:
    """Return the first row of a rows file: magic, format version, generation."""
    body = (MAGIC + FORMAT_VERSION.to_bytes(4, "little") + bytes(4) + generation.to_bytes(8, "little")).ljust(
        ROW_BYTES - 8, b"\0"
    )
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def header_generation(row: bytes) -> int | None:
    """Return the generation in a header row; None if the row is not a header of this format version."""
    version = int.from_bytes(row[16:20], "little")
    if len(row) != ROW_BYTES or not row.startswith(MAGIC) or version != FORMAT_VERSION or not hash_matches(row):
        return None
    return int.from_bytes(row[24:32], "little")


def hash_matches(row: bytes | memoryview) -> bool:
    return xxh3_64_intdigest(row[:-8]) == int.from_bytes(row[-8:], "little")


def parse_rows(content: bytes | memoryview) -> tuple[LedgerRows, npt.NDArray[np.bool_]]:
    """Return (rows, which of them have the right hash); bytes past the last complete row are left out."""
    count = len(content) // ROW_BYTES
    view = memoryview(content)[: count * ROW_BYTES]
    rows = np.frombuffer(view, dtype=ROW)
    digest, body = xxh3_64_intdigest, ROW_BYTES - 8
    hashes = np.fromiter(
        (digest(view[begin : begin + body]) for begin in range(0, len(view), ROW_BYTES)), dtype=np.uint64, count=count
    )
    return rows, hashes == rows["row_hash"]


def with_hashes(rows: LedgerRows) -> bytes:
    """Return the bytes of ``rows``, each with its hash; the array is changed."""
    view, body = memoryview(rows.tobytes()), ROW_BYTES - 8
    rows["row_hash"] = np.fromiter(
        (xxh3_64_intdigest(view[begin : begin + body]) for begin in range(0, len(view), ROW_BYTES)),
        np.uint64,
        len(rows),
    )
    return rows.tobytes()


def root_chain(namespace: bytes, salt: bytes) -> int:
    return xxh3_64_intdigest(namespace + salt)


def chain_of(parent_chain: int, tokens: bytes | memoryview) -> int:
    """Return the name of the prefix that ``tokens`` extend."""
    return xxh3_64_intdigest(parent_chain.to_bytes(8, "little") + bytes(tokens))


def head_of(parent_chain: int, tokens: bytes | memoryview) -> int:
    """Return ``chain_of`` of at most the first 16 of ``tokens``."""
    return chain_of(parent_chain, memoryview(tokens)[: 4 * STORED_PAGE_TOKENS])


def token_sizes(rows: LedgerRows) -> npt.NDArray[np.uint64]:
    """Return the bytes of each record's tokens in the file of tokens; 0 for rows that are not KV records."""
    seals = np.where(rows["flags"] & SEALED != 0, np.uint64(SEAL_BYTES), np.uint64(0))
    return np.where(rows["kind"] == KV, rows["tokens"].astype(np.uint64) * np.uint64(4) + seals, np.uint64(0))


def token_size(row: np.void) -> int:
    return 4 * int(row["tokens"]) + (SEAL_BYTES if row["flags"] & SEALED else 0) if row["kind"] == KV else 0


def payload_checksum(payload: bytes | memoryview) -> bytes:
    """Return xxh3-128 of ``payload``, the canonical (big-endian) 16 bytes."""
    return xxh3_128_digest(payload)


_NAME = re.compile(r"ledger-(\d{8})\.(rows|tokens)")


class LedgerError(OSError):
    """Error of a row or tokens of the ledger that differ from the index."""


@dataclass(slots=True)
class LedgerFiles:
    """One generation, open. ``row_count`` and ``tokens_bytes`` are where the next append goes; the header is row 0. One
    thread appends; any thread reads earlier rows."""

    disk: OsDisk
    directory: Path
    generation: int
    rows_handle: int
    tokens_handle: int
    row_count: int
    tokens_bytes: int

    def append(self, rows: list[bytes], tokens: bytes) -> int:
        """Append durably: tokens first. Returns the number of the first row. Raises OSError; the written part of
        ``rows`` is then cut off, or overwritten by the next append."""
        if tokens:
            self.disk.write(self.tokens_handle, tokens, self.tokens_bytes)
            self.disk.sync(self.tokens_handle)
        first = self.row_count
        try:
            self.disk.write(self.rows_handle, b"".join(rows), first * ROW_BYTES)
            self.disk.sync(self.rows_handle)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.truncate(self.rows_handle, first * ROW_BYTES)
            raise
        self.tokens_bytes += len(tokens)
        self.row_count += len(rows)
        return first

    def read_row(self, index: int, number: int) -> np.void:
        """Return row ``index``. Raise LedgerError if it is not the row of record ``number``."""
        content = bytearray(ROW_BYTES)
        self.disk.read(self.rows_handle, memoryview(content), index * ROW_BYTES)
        row: np.void = np.frombuffer(content, dtype=ROW)[0]
        if not hash_matches(memoryview(content)) or row["number"] != number:
            raise LedgerError("row")
        return row

    def read_rows_from(self, first: int) -> bytes:
        """Return the rows from number ``first`` on, as they are on the disk now."""
        begin = first * ROW_BYTES
        content = bytearray(max(0, self.disk.size(self.rows_handle) - begin))
        self.disk.read(self.rows_handle, memoryview(content), begin)
        return bytes(content)

    def read_tokens(self, tokens_at: int, nbytes: int) -> bytes:
        content = bytearray(nbytes)
        self.disk.read(self.tokens_handle, memoryview(content), tokens_at)
        return bytes(content)

    def __del__(self) -> None:
        """Close the files when no fetch reads this generation any more."""
        for handle in (self.rows_handle, self.tokens_handle):
            with contextlib.suppress(OSError):
                self.disk.close(handle)


def file_names(generation: int) -> tuple[str, str]:
    return f"ledger-{generation:08d}.rows", f"ledger-{generation:08d}.tokens"


def generations(directory: Path, disk: OsDisk) -> list[int]:
    """Return the generations that have a rows file, the newest first."""
    matches = [_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]) for match in matches if match and match[2] == "rows"), reverse=True)


def open_ledger(directory: Path, disk: OsDisk, *, writable: bool) -> tuple[LedgerFiles, bytes] | None:
    """Return the newest generation with a valid header or any valid row, and the rows without the header; None if there
    is none. A file gets its name once it is complete, so a crash never leaves a damaged header."""
    opened = disk.open_existing if writable else disk.open_read
    for generation in generations(directory, disk):
        rows_name, tokens_name = file_names(generation)
        rows_handle = opened(directory / rows_name)
        size = disk.size(rows_handle)
        content = bytearray(size)
        disk.read(rows_handle, memoryview(content), 0)
        if (
            header_generation(bytes(content[:ROW_BYTES])) != generation
            and not parse_rows(memoryview(content)[ROW_BYTES:])[1].any()
        ):
            disk.close(rows_handle)
            continue
        tokens_handle = opened(directory / tokens_name)
        count = size // ROW_BYTES
        return LedgerFiles(
            disk, directory, generation, rows_handle, tokens_handle, count, disk.size(tokens_handle)
        ), bytes(memoryview(content)[ROW_BYTES:])
    return None


def create_ledger(directory: Path, disk: OsDisk, generation: int, rows: bytes, tokens: Iterable[bytes]) -> LedgerFiles:
    """Write a generation and make it the newest. The rows file gets its name last."""
    rows_name, tokens_name = file_names(generation)
    tokens_bytes = disk.write_pieces(directory / tokens_name, tokens)
    disk.write_file(directory / rows_name, header_row(generation) + rows)
    return LedgerFiles(
        disk,
        directory,
        generation,
        disk.open_existing(directory / rows_name),
        disk.open_existing(directory / tokens_name),
        len(rows) // ROW_BYTES + 1,
        tokens_bytes,
    )


def remove_other_generations(directory: Path, disk: OsDisk, generation: int) -> None:
    """Remove the files of other generations, and those of a compaction that crashed."""
    for name in disk.names(directory):
        match = _NAME.match(name)
        if match and (int(match[1]) != generation or name.endswith(".tmp")):
            disk.remove(directory / name)


def valid_rows(content: bytes) -> tuple[LedgerRows, np.ndarray[tuple[int], np.dtype[np.bool_]], bool]:
    """Return (rows, which are valid, whether the last row is torn) of the bytes after the header."""
    rows, valid = parse_rows(content)
    return rows, valid, len(content) % ROW_BYTES != 0
