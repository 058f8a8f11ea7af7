"""Files of clients on disk: uploads, and the results of batches.

    DIRECTORY/                0700, locked by the server that uses it
        objects.sqlite        records: a file's owner, name, purpose, size, dates; a batch
        file-ID.data          the bytes of a file, 0600
        batch-ID.*.part       a batch's answers so far

Records belong to the API key that made them, named by a hash from which no key can be found. Number, bytes and age of
files are bounded (law L11); the results of a batch are always stored. A record is written after its bytes are complete;
bytes without a record are removed at the next start.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import threading
import time
import uuid
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.errors import ConfigError, NotFoundError, RequestError
from weft.objects.database import Bounds, NewObject, ObjectDatabase

_NAME_CHARS_MAX = 512
_log = logging.getLogger("weft.server")


class UnknownFileError(NotFoundError):
    """The API key has no file with that id."""


class FileStoreFullError(RequestError):
    """An upload does not fit."""

    status = 413


class FileObject(msgspec.Struct, kw_only=True):
    """A file as the API shows it. The stored record has no date of expiry."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int = 0
    filename: str
    purpose: str
    status: str = "processed"


_decode = msgspec.json.Decoder(FileObject).decode


def open_file_store(root: Path | None, limits: Bounds, *, is_default: bool) -> FileStore | None:
    """Return the store; None where it is off. Raise ConfigError where another server uses ``root``; for the default
    directory this is only logged."""
    try:
        return None if root is None else FileStore(root, limits)
    except ConfigError as error:
        if not is_default:
            raise
        _log.warning("%s; /v1/files and /v1/batches are off", error.message)
        return None


class FileStore:
    """A store of files. ``root`` is made at the first upload. Raises ConfigError if another server uses it."""

    def __init__(self, root: Path, limits: Bounds) -> None:
        self.root = root
        self._limits = limits
        self._lock: BinaryIO | None = None
        self._objects: ObjectDatabase | None = None
        self._one_thread = threading.RLock()
        """Lock of the store: uploads are stored in threads."""
        if root.is_dir():
            self._open()

    def add(self, owner: str, filename: str, purpose: str, source: BinaryIO, *, bounded: bool = True) -> FileObject:
        """Store a file. ``bounded``: whether the limits apply, as they do to uploads. Raise FileStoreFullError,
        ConfigError."""
        objects = self._open()
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if bounded:
            self._check_room(size, owner)
        record = FileObject(
            id=f"file-{uuid.uuid4().hex}",
            filename=filename[:_NAME_CHARS_MAX],
            purpose=purpose,
            bytes=size,
            created_at=int(time.time()),
        )
        path = self._data(record.id)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while part := source.read(1 << 20):
                file.write(part)
        with self._one_thread:
            objects.put("file", NewObject(id=record.id, owner=owner, body=msgspec.json.encode(record)))
        return self._shown(record)

    def get(self, file_id: str, owner: str) -> FileObject:
        """Return the record of a file. Raise UnknownFileError."""
        with self._one_thread:
            self._drop_old()
            body = None if self._objects is None else self._objects.get("file", file_id, owner)
        if body is None:
            raise UnknownFileError(f"there is no file {file_id[:100]!r}", param="file_id", code="file_not_found")
        return self._shown(_decode(body))

    def path(self, file_id: str, owner: str) -> Path:
        """Return the path of a file's bytes. Raise UnknownFileError."""
        return self._data(self.get(file_id, owner).id)

    def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. Raise UnknownFileError."""
        with self._one_thread:
            self.get(file_id, owner)
            self._open().delete(file_id, owner)
        self._data(file_id).unlink(missing_ok=True)

    def listed(self, owner: str) -> list[FileObject]:
        """Return the files of ``owner``, newest first."""
        return [self._shown(record) for record in reversed(self._records(owner))]

    def batches(self) -> list[bytes]:
        """Return the records of all batches, the oldest first."""
        return [] if self._objects is None else self._objects.listed("batch")

    def save_batch(self, batch_id: str, owner: str, record: bytes) -> None:
        with self._one_thread:
            objects = self._open()
            if not objects.update(batch_id, record):
                objects.put("batch", NewObject(id=batch_id, owner=owner, body=record))

    def drop_batch(self, batch_id: str, owner: str) -> None:
        with self._one_thread:
            self._open().delete(batch_id, owner)

    def close(self) -> None:
        if self._lock is not None and self._objects is not None:
            self._objects.close()
            self._lock.close()
            self._lock = self._objects = None

    def _open(self) -> ObjectDatabase:
        with self._one_thread:
            if self._objects is not None:
                return self._objects
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.fdopen(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise ConfigError(
                    f"another server uses the directory {self.root}; give this one its own with server.file_store",
                    param="server.file_store",
                ) from None
            bounds = {
                "file": Bounds(math.inf, math.inf, self._limits.age_s),
                "batch": Bounds(math.inf, math.inf, math.inf),
            }
            self._objects = ObjectDatabase(
                self.root / "objects.sqlite", bounds, lambda: time.time(), flag="server.file_store"
            )
            self._lock = lock
            self._enter_older_records(self._objects)
            known = {record.id for record in self._records()}
            for path in self.root.glob("file-*.data"):
                if path.stem not in known:
                    path.unlink()
            return self._objects

    def _enter_older_records(self, objects: ObjectDatabase) -> None:
        for kind in ("file", "batch"):
            dated: list[tuple[int, str, str, Path]] = []
            for path in self.root.glob(f"{kind}[-_]*.json"):
                record = msgspec.json.decode(path.read_bytes())
                fields = record if kind == "file" else record["batch"]
                dated.append((fields["created_at"], fields["id"], record["owner"], path))
            with objects.transaction():
                for created_s, object_id, owner, path in sorted(dated):
                    new = NewObject(id=object_id, owner=owner, body=path.read_bytes())
                    objects.insert(kind, new, created_s)
            for *_, path in dated:
                path.unlink()

    def _records(self, owner: str | None = None) -> list[FileObject]:
        """Return records of files, the oldest first."""
        with self._one_thread:
            self._drop_old()
            return [] if self._objects is None else [_decode(body) for body in self._objects.listed("file", owner)]

    def _drop_old(self) -> None:
        if self._objects is not None:
            for file_id in self._objects.drop_old("file"):
                self._data(file_id).unlink(missing_ok=True)

    def _check_room(self, size: int, owner: str) -> None:
        """Raise FileStoreFullError where there is no room in the store, or in the half that an API key may fill."""
        self._check_bounds(self._records(), size, 1, "the server keeps", "")
        if owner:
            self._check_bounds(self._records(owner), size, 2, "your API key has", ", half of")

    def _check_bounds(self, records: list[FileObject], size: int, parts: int, who: str, of: str) -> None:
        count, limit_bytes = self._limits.count // parts, self._limits.bytes // parts
        if len(records) >= count:
            raise FileStoreFullError(
                f"{who} {len(records)} files; the limit is {count}{of} (limits.max_stored_files). Delete some",
                param="limits.max_stored_files",
                code="file_store_full",
            )
        used = sum(record.bytes for record in records)
        if used + size > limit_bytes:
            raise FileStoreFullError(
                f"{who} {used} bytes of files and this one has {size}; the limit is {limit_bytes}{of} "
                "(limits.file_store_size). Delete some",
                param="limits.file_store_size",
                code="file_store_full",
            )

    def _data(self, file_id: str) -> Path:
        return self.root / f"{file_id}.data"

    def _shown(self, record: FileObject) -> FileObject:
        return msgspec.structs.replace(record, expires_at=record.created_at + int(self._limits.age_s))
