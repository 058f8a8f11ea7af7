"""Responses that clients have and the database does not yet: on disk, in files of the process that made them.

    append --frame--> r.sqlite.pending-5f..   one write of a few KB
                          |   every few milliseconds: one transaction for all of them (``store``)
                          '--> removed, once the database has them

A transaction of SQLite for each response would be the largest part of its cost. Here a response costs one
write, and a transaction is shared. The write reaches the system before the answer goes out, as a transaction
does with ``synchronous = NORMAL``. So a response survives the death of its process as before.

*Frames.* Length, CRC-32, owner and response. A process that dies while it writes leaves a torn frame at the
end, and reading stops there: that answer did not go out.

*Owners of files.* A process holds a lock on each of its files. A file without a lock is what a dead process
left. The next process that opens the database, or misses a response, enters it there. An entry that exists
stays, so entering a file twice changes nothing. A file whose name is gone is never read: its responses are in
the database, and some may have been deleted since.

Laws: L11 (``store`` bounds what is pending).

Rejected: answers before anything is on disk (a stored id that the next server does not know); a lock on one
file of all processes (each answer would wait for the others).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from weft.server.ids import random_id
from weft.server.responses.database import StoredResponse

PendingEntry = tuple[str, StoredResponse]
"""An owner and a response."""
_HEADER = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PendingEntry)


class PendingFile:
    """One file of this process, locked until it is removed. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._size = 0
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(path)  # another process may have taken an empty file without a lock for a left one
        except OSError:
            self.remove()
            raise

    def append(self, frame: bytes) -> None:
        written = os.write(self._descriptor, frame)
        if written != len(frame):
            os.ftruncate(self._descriptor, self._size)
            raise OSError("the disk took a part of a response only")
        self._size += written

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def is_locked(path: Path) -> bool:
    """Whether a live process holds this file. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class PendingLog:
    """The files of one process beside the database at ``path``. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prefix = f"{path.name}.pending-"
        self._files: list[PendingFile] = []
        self._current: PendingFile | None = None

    def append(self, owner: str, response: StoredResponse) -> None:
        if self._current is None:
            self._current = self._new_file()
            self._files.append(self._current)
        payload = _encoder.encode((owner, response))
        self._current.append(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)

    def rotate(self) -> list[PendingFile]:
        """All files so far; later responses go into another one."""
        self._current = None
        return list(self._files)

    def forget(self, files: Sequence[PendingFile]) -> None:
        """They have been removed."""
        self._files = [file for file in self._files if file not in files]

    def of_others(self) -> list[Path]:
        own = {file.path for file in self._files}
        with contextlib.suppress(OSError), os.scandir(self._path.parent) as entries:
            return [path for entry in entries if entry.name.startswith(self._prefix)
                    and (path := Path(entry.path)) not in own]
        return []

    def _new_file(self) -> PendingFile:
        path = self._path.with_name(self._prefix + random_id())
        try:
            return PendingFile(path)
        except (BlockingIOError, FileNotFoundError):
            return PendingFile(self._path.with_name(self._prefix + random_id()))


@contextlib.contextmanager
def left_behind(path: Path) -> Iterator[list[PendingEntry] | None]:
    """What a dead process left in ``path``, which is removed at the end. None where its process lives, or the
    file is gone. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(path)
        except (BlockingIOError, FileNotFoundError):
            yield None
            return
        with open(descriptor, "rb", closefd=False) as file:
            entries = list(_entries(file.read()))
        yield entries
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _entries(raw: bytes) -> Iterator[PendingEntry]:
    """Up to the first frame that is torn."""
    at = 0
    while at + _HEADER.size <= len(raw):
        length, checksum = _HEADER.unpack_from(raw, at)
        payload = raw[at + _HEADER.size:at + _HEADER.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        try:
            yield _decoder.decode(payload)
        except (msgspec.DecodeError, ValueError):
            return
        at += _HEADER.size + length
