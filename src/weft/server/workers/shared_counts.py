"""Counts that all HTTP processes share: connections, requests, bytes, quotas of keys. One mapped file.

    tallies   one cell for each process; a process writes its own cell, the sum is the count     no lock
    buckets   level and time of a rate, read and written by all                                  flock

A limit holds for the server, not for each process. If a process dies, the supervisor clears its cells.
Addresses of clients share ADDRESS_CELLS cells by their hash, which matters only near the limit of one
address.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import zlib
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

ADDRESS_CELLS = 8192
_DOUBLE_BYTES = 8
_BUCKETS_A_KEY = 2
_CELLS_A_BUCKET = 2
_CONNECTIONS, _BUFFERED, _REQUESTS, _DRAINS, _FIRST_FREE = 0, 1, 2, 3, 4


class Tally(Protocol):
    def add(self, amount: int) -> None: ...

    def total(self) -> int:
        """Of all processes."""
        ...


class LocalTally:
    """Of a server with one HTTP process."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, amount: int) -> None:
        self._count += amount

    def total(self) -> int:
        return self._count


class SharedTally:
    def __init__(self, cells: memoryview[float], process: int) -> None:
        self._cells = cells
        self._process = process

    def add(self, amount: int) -> None:
        self._cells[self._process] += float(amount)

    def total(self) -> int:
        return int(sum(self._cells))


@dataclass(slots=True)
class KeyCounts:
    """Of one API key. A bucket is its level, and the time of that level; ``since_s`` 0 is a full one."""

    bytes_in_flight: Tally = field(default_factory=LocalTally)
    requests: MutableSequence[float] | memoryview[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens: MutableSequence[float] | memoryview[float] = field(default_factory=lambda: [0.0, 0.0])
    lock: contextlib.AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)


class SharedCounts:
    """``process``: the number of this one, below ``processes``. ``keys``: client keys of the server."""

    def __init__(self, file: Path, *, process: int, processes: int, keys: int) -> None:
        self._process = process
        self._processes = processes
        self._keys = keys
        tallies = _FIRST_FREE + keys + ADDRESS_CELLS
        self._buckets_at = tallies * processes
        cells = self._buckets_at + keys * _BUCKETS_A_KEY * _CELLS_A_BUCKET
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, cells * _DOUBLE_BYTES)
        self._cells = memoryview(mmap.mmap(self._file, cells * _DOUBLE_BYTES)).cast("d")

    @property
    def connections(self) -> Tally:
        return self._tally(_CONNECTIONS)

    @property
    def buffered_bytes(self) -> Tally:
        return self._tally(_BUFFERED)

    @property
    def requests(self) -> Tally:
        """That are being answered."""
        return self._tally(_REQUESTS)

    @property
    def drains(self) -> Tally:
        """Above 0 once the server drains."""
        return self._tally(_DRAINS)

    def address(self, address: str) -> Tally:
        """Connections of clients of this address."""
        cell = zlib.crc32(address.encode()) % ADDRESS_CELLS
        return self._tally(_FIRST_FREE + self._keys + cell)

    def key(self, number: int) -> KeyCounts:
        at = self._buckets_at + number * _BUCKETS_A_KEY * _CELLS_A_BUCKET
        return KeyCounts(self._tally(_FIRST_FREE + number), self._cells[at:at + 2],
                         self._cells[at + 2:at + 4], _Locked(self._file))

    def clear(self, process: int) -> None:
        """It has died: what it counted is gone."""
        for at in range(process, self._buckets_at, self._processes):
            self._cells[at] = 0.0

    def _tally(self, number: int) -> Tally:
        at = number * self._processes
        return SharedTally(self._cells[at:at + self._processes], self._process)


class _Locked(contextlib.AbstractContextManager[None]):
    """``flock`` of the file, for all processes."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
