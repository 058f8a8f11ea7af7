"""Work of idle threads: compaction of the ledger, and reading the ledger that another process writes.

    write thread, idle:   rows > 2 x live rows  --> live rows and their tokens --> next generation
    fetch thread, reader: the ledger has grown  --> rows read again --> a new index, swapped in by ``poll``

A compaction writes ``ledger-N+1`` next to ``ledger-N`` and renames it into place; a crash at any point leaves one valid
generation. Fetches under way keep the old files open. The free space of the disk is read here as well, since statvfs
may wait for a busy disk.

Law: L11 (the ledger is bounded by its live rows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.store.disk import OsDisk
from weft.store.index import StoreIndex
from weft.store.ledger import (
    KV,
    ROW,
    LedgerFiles,
    create_ledger,
    generations,
    remove_other_generations,
    token_size,
    token_sizes,
    valid_rows,
    with_hashes,
)
from weft.store.opening import OpenDirectory, read_ledger
from weft.store.recovery import LiveRows, live_rows
from weft.store.sealing import Sealer

COMPACT_ROWS_LEAST = 65_536
COMPACT_ROWS_FEW = 1024
"""Rows of the smallest ledger that is compacted, 147 kB."""
COMPACT_RETRY_S = 60.0
FREE_SPACE_S = 5.0
FOLLOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Compacted:
    """A new generation. ``lines[i]``: the row of record ``numbers[i]``, sorted by number."""

    ledger: LedgerFiles
    numbers: np.ndarray[Any, np.dtype[np.uint64]]
    lines: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The ledger as a reader sees it now."""

    ledger: LedgerFiles
    index: StoreIndex
    last_number: int


@dataclass(slots=True)
class Upkeep:
    """Work of idle threads. ``live_count`` and ``volume_blocks`` are written by the engine's thread, ``free_bytes``
    here."""

    opened: OpenDirectory
    namespace: bytes
    report: Callable[[Compacted | Refreshed], None]
    free_bytes: int
    forms: frozenset[int] | None = None
    """Forms of records that the engine reads; None for all."""
    sealer: Sealer | None = None
    live_count: int = 0
    measurements: int = 0
    """Number of measurements of ``free_bytes``."""
    compact_rows_least: int = COMPACT_ROWS_LEAST
    clock: Callable[[], float] = time.monotonic
    next_compaction: float = 0.0
    next_free_space: float = 0.0
    next_follow: float = 0.0

    def idle(self, ledger: LedgerFiles, volume_blocks: dict[int, int]) -> LedgerFiles:
        """Compact the ledger if it has enough dead rows, between two batches of the write thread. Return the ledger to
        append to."""
        now = self.clock()
        if now >= self.next_free_space or self.next_free_space > now + FREE_SPACE_S:
            self.next_free_space = now + FREE_SPACE_S
            try:
                self.free_bytes = self.opened.disk.free_bytes(self.opened.path)
            except OSError:
                self.free_bytes = 0
            self.measurements += 1
        if ledger.row_count < max(self.compact_rows_least, 2 * self.live_count) or now < self.next_compaction:
            return ledger
        self.next_compaction = now + COMPACT_RETRY_S
        try:
            compacted = compact(ledger, volume_blocks)
        except OSError:
            return ledger
        self.report(compacted)
        return compacted.ledger

    def follow(self, ledger: LedgerFiles | None) -> None:
        """Read the ledger of another process, if it has changed. Runs in a fetch thread."""
        began = self.clock()
        disk, path = self.opened.disk, self.opened.path
        try:
            newest = max(generations(path, disk), default=0)
            known = (ledger.generation, ledger.row_count) if ledger is not None else (0, 0)
            blocks, _ = self.opened.volumes.scan()
            fresh, live = (
                read_ledger(path, disk, blocks, writable=False)
                if newest != known[0] or _grown(ledger, disk)
                else (None, None)
            )
        except OSError:
            return
        finally:
            self.next_follow = self.clock() + max(FOLLOW_S, 50 * (self.clock() - began))
        if fresh is not None and live is not None:
            index = StoreIndex(self.forms, self.sealer)
            index.load(live, self.namespace)
            self.report(Refreshed(fresh, index, live.last_number))


def _grown(ledger: LedgerFiles | None, disk: OsDisk) -> bool:
    return ledger is None or disk.size(ledger.rows_handle) // ROW.itemsize != ledger.row_count


def compact(ledger: LedgerFiles, volume_blocks: dict[int, int]) -> Compacted:
    """Return the next generation: the live rows and their tokens. Raises OSError; ``ledger`` is then still valid."""
    rows, valid, _ = valid_rows(ledger.read_rows_from(1))
    live = live_rows(rows, valid, volume_blocks=volume_blocks, tokens_bytes=ledger.tokens_bytes)
    generation = ledger.generation + 1
    fresh = create_ledger(ledger.directory, ledger.disk, generation, compacted_rows(live), tokens_of_rows(ledger, live))
    remove_other_generations(ledger.directory, ledger.disk, generation)
    return Compacted(fresh, live.rows["number"].copy(), np.arange(1, len(live.rows) + 1, dtype=np.int64))


def tokens_of_rows(ledger: LedgerFiles, live: LiveRows) -> Iterator[bytes]:
    """Yield the tokens of each KV record, as they are in the file. Raises OSError."""
    return (ledger.read_tokens(int(row["tokens_at"]), token_size(row)) for row in live.rows if row["kind"] == KV)


def compacted_rows(live: LiveRows) -> bytes:
    """Return the live rows with their uses, new places of tokens, and new hashes."""
    rows = np.array(live.rows)
    sizes = token_sizes(rows)
    rows["uses"] = live.uses
    rows["tokens_at"] = np.where(rows["kind"] == KV, np.cumsum(sizes) - sizes, np.uint64(0))
    return with_hashes(rows)
