"""``OsDisk``: all calls by which a store reads and changes files. Tests inject faults here.

    ledger, volumes, lock, secret  -->  OsDisk  -->  the operating system
                                          ^
                                     FaultyDisk of the tests: fails, stalls, kills, replays

The store never opens a file another way, so a test that counts or breaks these calls sees every write. A write is
complete or raises: short writes are continued here, and a short read is an OSError with ``EIO``.

Durability has three calls: ``sync`` (contents of a file), ``sync_directory`` (names in it) and ``rename``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.files import sync

GATHERED_BYTES = 1 << 20


class OsDisk:  # one method for each call of the operating system
    """The operating system's files. A handle is a file descriptor."""

    def make_directory(self, path: Path) -> None:
        """Make a directory for its owner only: the files below it have tokens of prompts."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def mode(self, path: Path) -> int:
        """Return the permission bits."""
        return stat.S_IMODE(path.stat().st_mode)

    def open_read(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_write(self, path: Path, *, mode: int = 0o600) -> int:
        """Open for reading and writing; the file is created if it is missing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)

    def open_existing(self, path: Path) -> int:
        """Open for reading and writing. Raise OSError (ENOENT) if the file is missing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def links(self, handle: int) -> int:
        """Return the number of hard links of the file; 0 once it was removed."""
        return os.fstat(handle).st_nlink

    def read(self, handle: int, into: memoryview, offset: int) -> None:
        """Fill ``into``. Raise OSError (EIO) where the file ends before that."""
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than its ledger says")
            done += count

    def write(self, handle: int, payload: bytes | memoryview, offset: int) -> None:
        view = memoryview(payload).cast("B")
        while view:
            count = os.pwrite(handle, view, offset)
            view, offset = view[count:], offset + count

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def sync_directory(self, path: Path) -> None:
        sync(path)

    def preallocate(self, handle: int, size: int) -> None:
        """Give the file ``size`` bytes on the disk. A file system without preallocation gets a sparse file."""
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(handle, size)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, handle: int) -> bool:
        """Take the file's lock without waiting; return False if another process has it."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def read_file(self, path: Path) -> bytes:
        with self.reading(path) as handle:
            content = bytearray(self.size(handle))
            self.read(handle, memoryview(content), 0)
        return bytes(content)

    def write_file(self, path: Path, payload: bytes, *, mode: int = 0o600) -> None:
        """Replace the file ``path`` durably: a reader sees the old file or the new one."""
        self.write_pieces(path, (payload,), mode=mode)

    def write_pieces(self, path: Path, pieces: Iterable[bytes], *, mode: int = 0o600) -> int:
        """Write as ``write_file`` does; return the number of bytes. Pieces are gathered into writes of a megabyte."""
        temporary = path.with_name(path.name + ".tmp")
        self.remove(temporary)
        handle = self.open_write(temporary, mode=mode)
        offset, gathered = 0, bytearray()
        try:
            for piece in pieces:
                gathered += piece
                if len(gathered) >= GATHERED_BYTES:
                    self.write(handle, bytes(gathered), offset)
                    offset, gathered = offset + len(gathered), bytearray()
            self.write(handle, bytes(gathered), offset)
            self.sync(handle)
        finally:
            self.close(handle)
        self.rename(temporary, path)
        self.sync_directory(path.parent)
        return offset + len(gathered)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[int]:
        handle = self.open_read(path)
        try:
            yield handle
        finally:
            self.close(handle)
