"""Files of clients on disk: uploads, and the results of batches.

    DIRECTORY/                0700, locked by the server that uses it
        file-ID.json          what is known of it: owner, name, purpose, size, dates
        file-ID.data          its bytes, 0600
        batch-ID.json         a batch (``jobs``), and its answers so far in batch-ID.*.part

A file belongs to the API key that made it, by a hash that leads to no key. For any other key it is unknown.
The number of files, their bytes and their age are bounded (law L11). Files that are too old go when the store
is next used. A full store refuses an upload and names the flag; the results of a batch are always stored.

A record is written beside its place and renamed, after its bytes are complete. Bytes that a crash leaves
without a record are removed at the next start.

Rejected: SQLite as for responses (a file may have 64 MB, and a download is sent from the disk).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.errors import ConfigError, RequestError, UserError

_NAME_CHARS_MAX = 512
_log = logging.getLogger("weft.server")


class UnknownFileError(UserError):
    """No file of this key has that id."""

    status = 404
    kind = "not_found_error"


class FileStoreFullError(RequestError):
    """An upload does not fit."""

    status = 413


@dataclass(frozen=True, slots=True)
class FileLimits:
    count: int
    bytes: int
    age_s: float


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int


class FileObject(msgspec.Struct, kw_only=True):
    """A file as the API shows it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and for this user alone."""
    beside = path.with_name(path.name + ".new")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    beside.replace(path)


def open_file_store(root: Path | None, limits: FileLimits, *, is_default: bool) -> FileStore | None:
    """None for no store. Raises ConfigError where another server uses ``root``; that of the default place is
    only logged."""
    try:
        return None if root is None else FileStore(root, limits)
    except ConfigError as error:
        if not is_default:
            raise
        _log.warning("%s; /v1/files and /v1/batches are off", error.message)
        return None


class FileStore:
    """``root`` is made at the first upload. Raises ConfigError where another server uses it."""

    def __init__(self, root: Path, limits: FileLimits) -> None:
        self.root = root
        self._limits = limits
        self._files: dict[str, StoredFile] = {}
        self._lock: BinaryIO | None = None
        if root.is_dir():
            self._open()

    def add(self, owner: str, filename: str, purpose: str, source: BinaryIO, *,
            bounded: bool = True) -> FileObject:
        """Raises FileStoreFullError, ConfigError. ``bounded``: it is an upload."""
        self._open()
        self._drop_old()
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if bounded:
            self._check_room(size)
        record = StoredFile(id=f"file-{uuid.uuid4().hex}", owner=owner, filename=filename[:_NAME_CHARS_MAX],
                            purpose=purpose, bytes=size, created_at=int(time.time()))
        path = self._data(record.id)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while part := source.read(1 << 20):
                file.write(part)
        write_private(self.root / f"{record.id}.json", msgspec.json.encode(record))
        self._files[record.id] = record
        return self._shown(record)

    def get(self, file_id: str, owner: str) -> FileObject:
        """Raises UnknownFileError."""
        self._drop_old()
        record = self._files.get(file_id)
        if record is None or record.owner != owner:
            raise UnknownFileError(f"there is no file {file_id[:100]!r}", param="file_id",
                                   code="file_not_found")
        return self._shown(record)

    def path(self, file_id: str, owner: str) -> Path:
        """Of the bytes. Raises UnknownFileError."""
        return self._data(self.get(file_id, owner).id)

    def delete(self, file_id: str, owner: str) -> None:
        """Raises UnknownFileError."""
        self._remove(self.get(file_id, owner).id)

    def listed(self, owner: str) -> list[FileObject]:
        """The newest first."""
        self._drop_old()
        return [self._shown(record) for record in reversed(self._files.values()) if record.owner == owner]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self) -> None:
        if self._lock is not None:
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.fdopen(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(f"another server uses the directory {self.root}; give this one its own with "
                              "--file-store", param="--file-store") from None
        self._lock = lock
        records = [msgspec.json.decode(path.read_bytes(), type=StoredFile)
                   for path in self.root.glob("file-*.json")]
        self._files = {record.id: record for record in sorted(records, key=lambda one: one.created_at)}
        for path in self.root.glob("file-*.data"):
            if path.stem not in self._files:
                path.unlink()

    def _check_room(self, size: int) -> None:
        limits = self._limits
        if len(self._files) >= limits.count:
            raise FileStoreFullError(f"the server keeps {len(self._files)} files; the limit is "
                                     f"{limits.count} (limits.max_stored_files). Delete some",
                                     param="limits.max_stored_files", code="file_store_full")
        held = sum(record.bytes for record in self._files.values())
        if held + size > limits.bytes:
            raise FileStoreFullError(f"the server keeps {held} bytes of files and this one has {size}; the "
                                     f"limit is {limits.bytes} (limits.file_store_size). Delete some",
                                     param="limits.file_store_size", code="file_store_full")

    def _drop_old(self) -> None:
        now_s = time.time()
        for record in list(self._files.values()):
            if record.created_at + self._limits.age_s <= now_s:
                self._remove(record.id)

    def _remove(self, file_id: str) -> None:
        del self._files[file_id]
        (self.root / f"{file_id}.json").unlink(missing_ok=True)
        self._data(file_id).unlink(missing_ok=True)

    def _data(self, file_id: str) -> Path:
        return self.root / f"{file_id}.data"

    def _shown(self, record: StoredFile) -> FileObject:
        return FileObject(id=record.id, bytes=record.bytes, created_at=record.created_at,
                          expires_at=record.created_at + int(self._limits.age_s), filename=record.filename,
                          purpose=record.purpose)
