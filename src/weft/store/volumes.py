"""Volumes: preallocated files that hold payloads, each at a multiple of 4 KiB.

    volumes/volume-00000   | header, 4 KiB | payload ... | payload | free | ...        blocks x 4 KiB

The header names the format, the volume's number and its blocks. A file that is missing, shorter than its
header says, or without a valid header is no volume: rows that lie in it are dropped when the ledger is read.

A volume that is removed while it is open stays readable, but what is written to it would be lost. So a write
checks that the file still has a name.

Rejected: one file for each record (a million files; deletes and listings then cost more than reads).
"""

from __future__ import annotations

import errno
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from weft.store.disk import OsDisk
from weft.store.ledger import FORMAT_VERSION
from weft.store.space import BLOCK_BYTES

VOLUMES_FOLDER = "volumes"
VOLUME_MAGIC = b"weft-store-vol\0\0"
_NAME = re.compile(r"volume-(\d{5})")


def volume_name(volume: int) -> str:
    return f"volume-{volume:05d}"


def volume_header(volume: int, blocks: int) -> bytes:
    body = (VOLUME_MAGIC + FORMAT_VERSION.to_bytes(4, "little") + volume.to_bytes(4, "little")
            + blocks.to_bytes(8, "little")).ljust(BLOCK_BYTES - 8, b"\0")
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
        """(blocks of each usable volume, names of files that are no volume)."""
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
        """Raises OSError; the file is then removed again."""
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

    def write(self, volume: int, block: int, payload: memoryview) -> None:
        self.disk.write(self.handle(volume), payload, block * BLOCK_BYTES)

    def sync(self, volume: int) -> None:
        """Raises OSError (ENOENT) for a volume that was removed."""
        handle = self.handle(volume)
        if self.disk.links(handle) == 0:
            raise OSError(errno.ENOENT, f"{volume_name(volume)} was removed")
        self.disk.sync(handle)

    def handle(self, volume: int) -> int:
        with self._opening:
            if volume not in self._handles:
                path = self.directory / volume_name(volume)
                self._handles[volume] = \
                    self.disk.open_existing(path) if self.writable else self.disk.open_read(path)
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
        """Blocks of a volume as its header says; None where it is no volume."""
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
