"""``MemoryDisk``: files in memory, with a log of every change, faults on request, and replays of any prefix.

    operations --log--> [create, write, sync, rename, ...] --cut at k, drop what was not synced--> a disk

A kill keeps every operation before it. A loss of power may also lose operations that no sync has secured: the
writes of a file since its last sync, and names of a directory since its last sync.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.store.disk import OsDisk

Operation = tuple[Any, ...]
CHANGES = ("create", "write", "truncate", "rename", "remove")
"""Operations that a kill may come after."""


@dataclass
class File:
    inode: int
    content: bytearray = field(default_factory=bytearray)
    mode: int = 0o644
    names: int = 1


class MemoryDisk(OsDisk):
    """``fault``: called with (operation, path) before each; it may raise OSError or wait."""

    def __init__(self) -> None:
        self.files: dict[Path, File] = {}
        self.folders: set[Path] = set()
        self.log: list[Operation] = []
        self.fault: Callable[[str, Path], None] = lambda operation, path: None
        self.free = 1 << 40
        self.locked: set[Path] = set()
        self._handles: dict[int, tuple[Path, File]] = {}
        self._next = 1
        self._mutex = threading.RLock()

    def make_directory(self, path: Path) -> None:
        self.fault("make_directory", path)
        self.folders.update([path, *path.parents])

    def exists(self, path: Path) -> bool:
        return path in self.files or path in self.folders

    def mode(self, path: Path) -> int:
        return self.files[path].mode

    def names(self, path: Path) -> list[str]:
        self.fault("names", path)
        if path not in self.folders:
            raise _error(errno.ENOENT, path)
        with self._mutex:
            return sorted(one.name for one in {*self.files, *self.folders} if one.parent == path)

    def open_read(self, path: Path) -> int:
        self.fault("open", path)
        with self._mutex:
            if path not in self.files:
                raise _error(errno.ENOENT, path)
            self._next += 1
            self._handles[self._next] = (path, self.files[path])
            return self._next

    open_existing = open_read

    def open_write(self, path: Path, *, mode: int = 0o644) -> int:
        with self._mutex:
            if path not in self.files:
                self.fault("create", path)
                self._next += 1
                self.files[path] = File(self._next, mode=mode)
                self.log.append(("create", self._next, path, mode))
        return self.open_read(path)

    def close(self, handle: int) -> None:
        with self._mutex:
            if self._handles.pop(handle)[0] in self.locked:
                self.locked.clear()

    def size(self, handle: int) -> int:
        return len(self._handles[handle][1].content)

    def links(self, handle: int) -> int:
        return self._handles[handle][1].names

    def read(self, handle: int, into: memoryview, offset: int) -> None:
        path, file = self._handles[handle]
        self.fault("read", path)
        with self._mutex:
            piece = file.content[offset : offset + len(into)]
        if len(piece) < len(into):
            raise _error(errno.EIO, path)
        into[:] = piece

    def write(self, handle: int, payload: bytes | memoryview, offset: int) -> None:
        path, file = self._handles[handle]
        self.fault("write", path)
        with self._mutex:
            _write(file, bytes(payload), offset)
            self.log.append(("write", file.inode, offset, bytes(payload)))

    def sync(self, handle: int) -> None:
        path, file = self._handles[handle]
        self.fault("sync", path)
        with self._mutex:
            self.log.append(("sync", file.inode))

    def sync_directory(self, path: Path) -> None:
        self.fault("sync_directory", path)
        with self._mutex:
            self.log.append(("sync_directory", path))

    def preallocate(self, handle: int, size: int) -> None:
        self.fault("preallocate", self._handles[handle][0])
        self.truncate(handle, size)

    def truncate(self, handle: int, size: int) -> None:
        path, file = self._handles[handle]
        self.fault("truncate", path)
        with self._mutex:
            _truncate(file, size)
            self.log.append(("truncate", file.inode, size))

    def rename(self, old: Path, new: Path) -> None:
        self.fault("rename", new)
        with self._mutex:
            if new in self.files:
                self.files[new].names -= 1
            self.files[new] = self.files.pop(old)
            self.log.append(("rename", old, new))

    def remove(self, path: Path) -> None:
        self.fault("remove", path)
        with self._mutex:
            if path in self.files:
                self.files.pop(path).names -= 1
                self.log.append(("remove", path))

    def free_bytes(self, path: Path) -> int:
        self.fault("free_bytes", path)
        with self._mutex:
            return self.free - sum(len(file.content) for file in self.files.values())

    def lock(self, handle: int) -> bool:
        path, _ = self._handles[handle]
        if path in self.locked:
            return False
        self.locked.add(path)
        return True

    def replayed(self, operations: Iterable[Operation]) -> MemoryDisk:
        """A disk after ``operations``, as another process sees it after a crash of this one."""
        disk = MemoryDisk()
        disk.folders = set(self.folders)
        by_inode: dict[int, File] = {}
        for operation in operations:
            match operation:
                case ("create", inode, path, mode):
                    disk.files[path] = by_inode[inode] = File(inode, mode=mode)
                case ("write", inode, offset, payload) if inode in by_inode:
                    _write(by_inode[inode], payload, offset)
                case ("truncate", inode, size) if inode in by_inode:
                    _truncate(by_inode[inode], size)
                case ("rename", old, new) if old in disk.files:
                    disk.files[new] = disk.files.pop(old)
                case ("remove", path):
                    disk.files.pop(path, None)
        disk._next = 1 + max(by_inode, default=0)
        return disk

    def after_kill(self, count: int) -> MemoryDisk:
        return self.replayed(self.log[:count])

    def after_torn_write(self, count: int) -> MemoryDisk:
        """As ``after_kill``, and half of a last write that follows is on the disk as well."""
        operations = self.log[:count]
        if count < len(self.log) and self.log[count][0] == "write":
            _, inode, offset, payload = self.log[count]
            operations = [*operations, ("write", inode, offset, payload[: len(payload) // 2])]
        return self.replayed(operations)

    def after_power_loss(self, count: int, seed: int) -> MemoryDisk:
        """As ``after_kill``, and each operation that no sync has secured is lost with probability 1/2."""
        operations, rng = self.log[:count], random.Random(seed)
        secured: set[Any] = set()
        kept = []
        for operation in reversed(operations):
            match operation:
                case ("sync", inode):
                    secured.add(inode)
                case ("sync_directory", path):
                    secured.add(path)
                case ("write" | "truncate", inode, *_) if inode not in secured and rng.random() < 0.5:
                    continue
                case ("create", _, path, _) | ("rename", _, path) | ("remove", path) if (
                    path.parent not in secured and rng.random() < 0.5
                ):
                    continue
            kept.append(operation)
        return self.replayed(reversed(kept))


def _write(file: File, payload: bytes, offset: int) -> None:
    if len(file.content) < offset:
        file.content.extend(bytes(offset - len(file.content)))
    file.content[offset : offset + len(payload)] = payload


def _truncate(file: File, size: int) -> None:
    del file.content[size:]
    file.content.extend(bytes(size - len(file.content)))


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
