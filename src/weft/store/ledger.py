"""The ledger of a directory: an append-only file of rows beside an append-only file of tokens.

    ledger-00000003.rows      header | row | row | row | ...          144 bytes each
    ledger-00000003.tokens    uint32 uint32 uint32 ...                the tokens of KV records

A checkpoint is stored in this order, and each arrow is a sync of the disk:

    payloads into volumes  ->  tokens  ->  rows of KV records and of the checkpoint

So a row that is on the disk names payloads that are on the disk. After a crash the rows file may end in a
torn row, which the next append overwrites; tokens that no row names are overwritten as well.

The generation in the names grows with each compaction: both files are written anew from the live rows,
synced, and the rename of the rows file makes the new generation the valid one.

Rejected: SQLite (its writes are many, and a replay of every prefix of them proves its code, not the format);
one file for rows and tokens (reading 100,000 rows would then read 400 MB of tokens).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.store.disk import OsDisk
from weft.store.rows import (
    ROW,
    ROW_BYTES,
    LedgerRows,
    hash_matches,
    header_generation,
    header_row,
    parse_rows,
)

_NAME = re.compile(r"ledger-(\d{8})\.(rows|tokens)")


class LedgerError(OSError):
    """A row or tokens of the ledger are not what the index says."""


@dataclass(slots=True)
class LedgerFiles:
    """One generation, open. ``row_count`` and ``tokens_bytes`` are where the next append goes; the header is
    row 0. One thread appends; any thread reads what was appended before."""

    disk: OsDisk
    directory: Path
    generation: int
    rows_handle: int
    tokens_handle: int
    row_count: int
    tokens_bytes: int

    def append(self, rows: list[bytes], tokens: bytes) -> int:
        """Appends durably: tokens first. Returns the number of the first row. Raises OSError; what was
        written of ``rows`` is then cut off, or overwritten by the next append."""
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
        """Row ``index``. Raises LedgerError where it is not that of record ``number``."""
        content = bytearray(ROW_BYTES)
        self.disk.read(self.rows_handle, memoryview(content), index * ROW_BYTES)
        row: np.void = np.frombuffer(content, dtype=ROW)[0]
        if not hash_matches(memoryview(content)) or row["number"] != number:
            raise LedgerError("row")
        return row

    def read_rows_from(self, first: int) -> bytes:
        """The rows from number ``first`` on, as they are on the disk now."""
        begin = first * ROW_BYTES
        content = bytearray(max(0, self.disk.size(self.rows_handle) - begin))
        self.disk.read(self.rows_handle, memoryview(content), begin)
        return bytes(content)

    def read_tokens(self, tokens_at: int, count: int) -> bytes:
        content = bytearray(4 * count)
        self.disk.read(self.tokens_handle, memoryview(content), tokens_at)
        return bytes(content)

    def __del__(self) -> None:
        """Files stay open for the fetches that still read this generation."""
        for handle in (self.rows_handle, self.tokens_handle):
            with contextlib.suppress(OSError):
                self.disk.close(handle)


def file_names(generation: int) -> tuple[str, str]:
    return f"ledger-{generation:08d}.rows", f"ledger-{generation:08d}.tokens"


def generations(directory: Path, disk: OsDisk) -> list[int]:
    """Generations that have a rows file, the newest first."""
    matches = [_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]) for match in matches if match and match[2] == "rows"), reverse=True)


def open_ledger(directory: Path, disk: OsDisk, *, writable: bool) -> tuple[LedgerFiles, bytes] | None:
    """The newest generation with a valid header or any valid row, and its rows without the header. None if
    there is none. A file gets its name when it is whole, so a damaged header is no trace of a crash."""
    opened = disk.open_existing if writable else disk.open_read
    for generation in generations(directory, disk):
        rows_name, tokens_name = file_names(generation)
        rows_handle = opened(directory / rows_name)
        size = disk.size(rows_handle)
        content = bytearray(size)
        disk.read(rows_handle, memoryview(content), 0)
        if header_generation(bytes(content[:ROW_BYTES])) != generation \
                and not parse_rows(memoryview(content)[ROW_BYTES:])[1].any():
            disk.close(rows_handle)
            continue
        tokens_handle = opened(directory / tokens_name)
        count = size // ROW_BYTES
        return LedgerFiles(disk, directory, generation, rows_handle, tokens_handle, count,
                           disk.size(tokens_handle)), bytes(memoryview(content)[ROW_BYTES:])
    return None


def create_ledger(directory: Path, disk: OsDisk, generation: int, rows: bytes,
                  tokens: Iterable[bytes]) -> LedgerFiles:
    """Writes a generation whole and makes it the newest. The rows file gets its name last."""
    rows_name, tokens_name = file_names(generation)
    tokens_bytes = disk.write_pieces(directory / tokens_name, tokens)
    disk.write_file(directory / rows_name, header_row(generation) + rows)
    return LedgerFiles(disk, directory, generation, disk.open_existing(directory / rows_name),
                       disk.open_existing(directory / tokens_name), len(rows) // ROW_BYTES + 1, tokens_bytes)


def remove_other_generations(directory: Path, disk: OsDisk, generation: int) -> None:
    """Also what a crash left of a compaction."""
    for name in disk.names(directory):
        match = _NAME.match(name)
        if match and (int(match[1]) != generation or name.endswith(".tmp")):
            disk.remove(directory / name)


def valid_rows(content: bytes) -> tuple[LedgerRows, np.ndarray[tuple[int], np.dtype[np.bool_]], bool]:
    """(rows, which are valid, whether the last row is torn) of what follows the header."""
    rows, valid = parse_rows(content)
    return rows, valid, len(content) % ROW_BYTES != 0
