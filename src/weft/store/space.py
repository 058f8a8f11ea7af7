"""``Space`` and ``Volumes``: places of records, the files that hold them, and blocks that become free again.

    put --place--> free blocks? --------------------> (volume, block) of each record
                   no, but the store may grow ------> a new volume, created by the write thread
                   no ------------------------------> None: refused; the least valuable records are evicted
    evicted --retired row durable--> blocks are free again

    volumes/volume-00000   | header | record | record |  free   | record |    free    |     4 KiB blocks

A record takes consecutive blocks of one volume: the smallest free run that fits. Adjacent free runs are joined when a
record goes. The store grows by volumes up to ``capacity_bytes``, as long as the disk keeps ``reserve_bytes`` free.
``Space`` is only memory, of the engine's thread.

A volume is a preallocated file. Its header names the format, the volume's number and its blocks. A file that is
missing, shorter than its header says, or without a valid header is not a volume: rows that name it are dropped when the
ledger is read. A volume that is removed while it is open stays readable, but bytes written to it would be lost. So a
write checks that the file still has a name.

Laws: L1 (a block is free or has one record), L3 (no room is a value).
"""

from __future__ import annotations

import errno
import re
import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from weft.store.disk import OsDisk
from weft.store.ledger import FORMAT_VERSION

BLOCK_BYTES = 4096


def blocks_for(payload_bytes: int) -> int:
    return -(-payload_bytes // BLOCK_BYTES)


@dataclass(slots=True)
class Extents:
    """Free runs of blocks, by volume and by length. Block 0 of a volume is its header."""

    free_blocks: int = 0
    total_blocks: int = 0
    _by_length: list[tuple[int, int, int]] = field(default_factory=list)
    """(length, volume, first block), sorted."""
    _by_start: dict[tuple[int, int], int] = field(default_factory=dict)
    _by_end: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_volume(self, volume: int, blocks: int) -> None:
        self.total_blocks += blocks - 1
        self._insert(volume, 1, blocks - 1)

    def take(self, blocks: int) -> tuple[int, int] | None:
        """Return (volume, first block) of ``blocks`` free blocks, or None."""
        index = bisect_left(self._by_length, (blocks, -1, -1))
        if index == len(self._by_length):
            return None
        length, volume, first = self._by_length[index]
        self._remove(volume, first, length)
        if length > blocks:
            self._insert(volume, first + blocks, length - blocks)
        return volume, first

    def give(self, volume: int, first: int, blocks: int) -> None:
        before = self._by_end.get((volume, first))
        if before is not None:
            length = first - before
            self._remove(volume, before, length)
            first, blocks = before, blocks + length
        after = self._by_start.get((volume, first + blocks))
        if after is not None:
            self._remove(volume, first + blocks, after)
            blocks += after
        self._insert(volume, first, blocks)

    def take_known(self, volume: int, used: list[tuple[int, int]]) -> None:
        """Take the (first, blocks) runs ``used`` of a volume that is completely free. ``used`` must be sorted and have
        no overlaps."""
        length = self._by_start[volume, 1]
        self._remove(volume, 1, length)
        free_from, end = 1, 1 + length
        for first, blocks in [*used, (end, 0)]:
            assert first >= free_from, "records overlap"
            if first > free_from:
                self._insert(volume, free_from, first - free_from)
            free_from = first + blocks

    def drop_volume(self, volume: int, blocks: int) -> None:
        """Forget the volume's free runs: nothing is placed there any more."""
        for length, _, first in [run for run in self._by_length if run[1] == volume]:
            self._remove(volume, first, length)
        self.total_blocks -= blocks - 1

    def _insert(self, volume: int, first: int, length: int) -> None:
        if length <= 0:
            return
        insort(self._by_length, (length, volume, first))
        self._by_start[volume, first] = length
        self._by_end[volume, first + length] = first
        self.free_blocks += length

    def _remove(self, volume: int, first: int, length: int) -> None:
        del self._by_length[bisect_left(self._by_length, (length, volume, first))]
        del self._by_start[volume, first]
        del self._by_end[volume, first + length]
        self.free_blocks -= length


VOLUME_BYTES_LEAST = 64 << 20
VOLUMES_WANTED = 64
"""Approximate number of volumes of a full store."""


@dataclass(slots=True)
class Space:
    """Places of records. ``volumes``: blocks of each volume. ``disk_free_bytes`` is written by the write thread."""

    capacity_bytes: int
    reserve_bytes: int
    volume_bytes: int
    disk_free_bytes: int
    volumes: dict[int, int] = field(default_factory=dict)
    extents: Extents = field(default_factory=Extents)
    next_volume: int = 0
    pending_blocks: int = 0
    """Blocks of volumes that the write thread still has to create."""
    retiring_blocks: int = 0
    """Blocks that come back once their retirement is durable."""

    @classmethod
    def of(
        cls,
        capacity_bytes: int,
        reserve_bytes: int,
        disk_free_bytes: int,
        volume_bytes: int | None,
        volumes: dict[int, int],
        next_volume: int,
        places: npt.NDArray[np.int64],
    ) -> Space:
        """Return the space of a store. ``places``: [records, 3], volume, first block and payload bytes of every live
        record. ``next_volume``: number of the next new volume. Numbers are never used again, because rows may still
        name a lost volume."""
        size = volume_bytes or max(VOLUME_BYTES_LEAST, capacity_bytes // VOLUMES_WANTED)
        space = cls(
            capacity_bytes,
            reserve_bytes,
            size // BLOCK_BYTES * BLOCK_BYTES,
            disk_free_bytes,
            next_volume=max([next_volume, *(volume + 1 for volume in volumes)]),
        )
        for volume, blocks in sorted(volumes.items()):
            space.volumes[volume] = blocks
            space.extents.add_volume(volume, blocks)
            space.extents.take_known(volume, _runs(places[places[:, 0] == volume]))
        return space

    @property
    def allocated_bytes(self) -> int:
        return sum(self.volumes.values()) * BLOCK_BYTES

    @property
    def used_bytes(self) -> int:
        return (self.extents.total_blocks - self.extents.free_blocks) * BLOCK_BYTES

    def place(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]] | None:
        """Return (places of payloads of ``sizes`` bytes, volumes to create as (number, blocks)); None, and place
        nothing, if there is no room."""
        places: list[tuple[int, int]] = []
        created: list[tuple[int, int]] = []
        for size in sizes:
            if size == 0:
                places.append((0, 0))
                continue
            place = self.extents.take(blocks_for(size))
            if place is None and self._grow(blocks_for(size), created):
                place = self.extents.take(blocks_for(size))
            if place is None:
                self._undo(sizes, places, created)
                return None
            places.append(place)
        return places, created

    def give(self, volume: int, first: int, payload_bytes: int) -> None:
        if payload_bytes and volume in self.volumes:
            self.extents.give(volume, first, blocks_for(payload_bytes))

    def created(self, volumes: Sequence[tuple[int, int]]) -> None:
        """Note that the write thread is done with ``volumes``; the free space may have been measured before."""
        for _, blocks in volumes:
            self.pending_blocks -= blocks
            self.disk_free_bytes -= blocks * BLOCK_BYTES

    def lose_volume(self, volume: int) -> None:
        """Forget a volume that could not be created, or was removed."""
        if volume in self.volumes:
            self.extents.drop_volume(volume, self.volumes.pop(volume))

    def shortage(self, blocks: int) -> int:
        """Return the blocks to evict so that four puts of ``blocks``, or 2 % of the store, are free; 0 while the store
        may grow. The margin lets puts go on while retirements become durable."""
        if self._growth_blocks() > blocks:
            return 0
        margin = max(4 * blocks, self.extents.total_blocks // 50)
        return max(0, margin - self.extents.free_blocks - self.retiring_blocks)

    def fits_ever(self, payload_bytes: int) -> bool:
        largest = max([self.volume_bytes // BLOCK_BYTES, *self.volumes.values()])
        return blocks_for(payload_bytes) < largest

    def _growth_blocks(self) -> int:
        """Return the blocks of the next volume; 0 if no volume may be added."""
        size = min(self.volume_bytes, self.capacity_bytes - self.allocated_bytes)
        if self.disk_free_bytes - self.pending_blocks * BLOCK_BYTES - size < self.reserve_bytes:
            return 0
        return max(0, size // BLOCK_BYTES)

    def _grow(self, blocks: int, created: list[tuple[int, int]]) -> bool:
        count = self._growth_blocks()
        if count <= blocks:
            return False
        volume = self.next_volume
        self.next_volume += 1
        self.volumes[volume] = count
        self.extents.add_volume(volume, count)
        self.pending_blocks += count
        created.append((volume, count))
        return True

    def _undo(self, sizes: Sequence[int], places: list[tuple[int, int]], created: list[tuple[int, int]]) -> None:
        for (volume, first), size in zip(places, sizes, strict=False):
            if size:
                self.extents.give(volume, first, blocks_for(size))
        for volume, count in created:
            self.lose_volume(volume)
            self.pending_blocks -= count


def _runs(places: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return (first block, blocks) of each run of used blocks of one volume; records that touch are one run."""
    stored = places[places[:, 2] > 0]
    stored = stored[np.argsort(stored[:, 1])]
    first = stored[:, 1]
    end = first - -stored[:, 2] // BLOCK_BYTES
    if not len(first):
        return []
    breaks = np.flatnonzero(first[1:] != end[:-1])
    starts, ends = first[np.r_[0, breaks + 1]], end[np.r_[breaks, len(end) - 1]]
    return list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))


VOLUMES_FOLDER = "volumes"
VOLUME_MAGIC = b"weft-store-vol\0\0"
_NAME = re.compile(r"volume-(\d{5})")


def volume_name(volume: int) -> str:
    return f"volume-{volume:05d}"


def volume_header(volume: int, blocks: int) -> bytes:
    body = (
        VOLUME_MAGIC
        + FORMAT_VERSION.to_bytes(4, "little")
        + volume.to_bytes(4, "little")
        + blocks.to_bytes(8, "little")
    ).ljust(BLOCK_BYTES - 8, b"\0")
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


@dataclass(slots=True)
class Volumes:
    """The volume files of one directory. Any thread reads; one thread creates and writes."""

    disk: OsDisk
    directory: Path
    writable: bool
    _handles: dict[int, int] = field(default_factory=dict)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def scan(self) -> tuple[dict[int, int], list[str]]:
        """Return (blocks of each usable volume, names of files that are not volumes)."""
        blocks, broken = {}, []
        for name in self.disk.names(self.directory):
            match = _NAME.fullmatch(name)
            if not match:
                continue
            count = self._blocks(int(match[1]))
            if count is None:
                broken.append(name)
            else:
                blocks[int(match[1])] = count
        return blocks, broken

    def create(self, volume: int, blocks: int) -> None:
        """Create a volume. Raise OSError; the file is then removed again."""
        path = self.directory / volume_name(volume)
        try:
            handle = self.disk.open_write(path)
            try:
                self.disk.preallocate(handle, blocks * BLOCK_BYTES)
                self.disk.write(handle, volume_header(volume, blocks), 0)
                self.disk.sync(handle)
            except OSError:
                self.disk.close(handle)
                raise
            self.disk.sync_directory(self.directory)
        except OSError:
            self.disk.remove(path)
            raise
        with self._opening:
            self._handles[volume] = handle

    def read(self, volume: int, block: int, into: memoryview) -> None:
        self.disk.read(self.handle(volume), into, block * BLOCK_BYTES)

    def read_payload(self, row: np.void, into: memoryview) -> None:
        """Read the payload of a ledger's ``row``."""
        self.read(int(row["volume"]), int(row["offset"]) // BLOCK_BYTES, into)

    def write(self, volume: int, block: int, payload: memoryview) -> None:
        self.disk.write(self.handle(volume), payload, block * BLOCK_BYTES)

    def sync(self, volume: int) -> None:
        """Sync a volume. Raise OSError (ENOENT) for a volume that was removed."""
        handle = self.handle(volume)
        if self.disk.links(handle) == 0:
            raise OSError(errno.ENOENT, f"{volume_name(volume)} was removed")
        self.disk.sync(handle)

    def handle(self, volume: int) -> int:
        with self._opening:
            if volume not in self._handles:
                path = self.directory / volume_name(volume)
                self._handles[volume] = self.disk.open_existing(path) if self.writable else self.disk.open_read(path)
            return self._handles[volume]

    def remove(self, volume: int) -> None:
        with self._opening:
            handle = self._handles.pop(volume, None)
        if handle is not None:
            self.disk.close(handle)
        self.disk.remove(self.directory / volume_name(volume))

    def close(self) -> None:
        with self._opening:
            for handle in self._handles.values():
                self.disk.close(handle)
            self._handles.clear()

    def _blocks(self, volume: int) -> int | None:
        """Return the blocks of a volume by its header; None if the file is not a volume."""
        try:
            with self.disk.reading(self.directory / volume_name(volume)) as handle:
                header = bytearray(BLOCK_BYTES)
                self.disk.read(handle, memoryview(header), 0)
                size = self.disk.size(handle)
        except OSError:
            return None
        blocks = int.from_bytes(header[24:32], "little")
        if bytes(header) != volume_header(volume, blocks) or size < blocks * BLOCK_BYTES:
            return None
        return blocks
