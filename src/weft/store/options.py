"""``StoreOptions``: how much a store may hold, how fast it may write, and what it leaves free.

The flags of ``weft serve`` have the same names. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVE_BYTES = 8 << 30
WRITE_BYTES_PER_SECOND = 200e6
QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``capacity_bytes``: most bytes of volumes; None is half of what the disk has free at the first start.
    ``queue_bytes``: payloads that wait to be written; more are refused. ``volume_bytes``: size of a new
    volume; None is a 64th of the capacity, at least 64 MiB. ``accept_inexact``: match rounded bytes too.
    ``forms``: of payloads that the engine knows (``values``); records in others do not match. None: all.

    ``cache_directory``: the directory in front of a bucket; None is one under ~/.cache/weft/store.
    ``refresh_s``: how often new segments of other writers are looked for.
    ``required``: a bucket that does not answer at the start is an error."""

    capacity_bytes: int | None = None
    write_bytes_per_second: float = WRITE_BYTES_PER_SECOND
    reserve_bytes: int = RESERVE_BYTES
    queue_bytes: int = QUEUE_BYTES
    volume_bytes: int | None = None
    read_threads: int = 4
    accept_inexact: bool = False
    forms: frozenset[int] | None = None
    cache_directory: str | None = None
    refresh_s: float = 10.0
    required: bool = False
