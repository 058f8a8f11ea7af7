"""Digests of complete files, computed once for a file that does not change.

    path --stat--> device, inode, size, mtime, ctime --in the cache?--> digest
                                       | no
                                       '--> BLAKE3 over all bytes, out of a memory map, on several threads

    ~/.cache/weft/digests/KEY     one small JSON file for each path, locked (flock) while its digest is computed:
                                  of several starts at the same time, one reads the file and the others wait

A file that was written within the last two seconds is not cached: clocks of file systems are coarse, and a second
write could leave all times of the file unchanged. A cache that cannot be written only costs time.

Rejected: the name of a blob in the hub's cache, which is the sha256 of the file that was downloaded. Nothing verifies
it later, a program that writes through the link changes the bytes under the old name, and a copy of the file elsewhere
would have another identity. Samples of the file: a tune may change a matrix between them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError

blake3: Any = None
with suppress(ImportError):  # no wheel for this platform, and no compiler for its source
    import blake3 as _package

    blake3 = _package.blake3

ALGORITHM = "blake2b" if blake3 is None else "blake3"
"""Name of the function: digests of two functions never match."""
SETTLED_NS = 2_000_000_000
"""Least age of a file, in nanoseconds, at which a further write is sure to change its times."""
ENTRIES_MAX = 2048
_ENTRY_BYTES_MAX = 16 << 10
_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts that tell, without reading the file, that it is unchanged. ``path`` has no links."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path) -> FileFacts:
        """Return the facts of ``file``. Raise OSError."""
        real = file.resolve(strict=True)
        stat = real.stat()
        return cls(str(real), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "digests"


def file_digest(file: Path) -> str:
    """Return the digest of the bytes of ``file``, in hex. Raise OSError, and CheckpointError for a file that changes
    while it is read."""
    before = FileFacts.of(file)
    if not before.is_settled:
        return _computed(file, before)
    known = _cached(before)
    if known is not None:
        return known
    with _locked(before) as entry:
        known = _read_entry(entry, before)
        if known is not None:
            return known
        digest = _computed(file, before)
        if entry is not None:
            _write_entry(entry, before, digest)
    return digest


def _computed(file: Path, before: FileFacts) -> str:
    digest = content_digest(Path(before.path))
    check_unchanged(file, before)
    return digest


def content_digest(file: Path) -> str:
    """Return the digest of all bytes of ``file``, which are read now. Raise OSError."""
    if blake3 is None:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "blake2b").hexdigest()
    threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
    digest: str = blake3(max_threads=threads).update_mmap(file).hexdigest()
    return digest


def check_unchanged(file: Path, before: FileFacts) -> None:
    """Raise CheckpointError if ``file`` has changed, OSError where it is gone."""
    if FileFacts.of(file) != before:
        raise CheckpointError(
            f"{file}: the file was written while it was read; try again once it is complete", param="model"
        )


def _entry_path(of: FileFacts) -> Path:
    return cache_folder() / hashlib.sha256(os.fsencode(of.path)).hexdigest()[:32]


def _cached(of: FileFacts) -> str | None:
    try:
        descriptor = os.open(_entry_path(of), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_entry(descriptor, of)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(of: FileFacts) -> Iterator[int | None]:
    """Yield a descriptor of the locked entry; None if the cache cannot be written."""
    path, descriptor = _entry_path(of), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)  # and the lock with it


def _read_entry(entry: int | None, of: FileFacts) -> str | None:
    """Return the digest in ``entry`` if the entry is complete and of the file with these facts."""
    if entry is None:
        return None
    try:
        facts = json.loads(os.pread(entry, _ENTRY_BYTES_MAX, 0))
        return str(facts["digest"]) if facts == _facts(of, facts["digest"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_entry(entry: int, of: FileFacts, digest: str) -> None:
    with suppress(OSError):
        os.ftruncate(entry, 0)
        os.pwrite(entry, json.dumps(_facts(of, digest)).encode(), 0)
        _drop_old(cache_folder())


def _facts(of: FileFacts, digest: object) -> dict[str, object]:
    return {
        "path": of.path,
        "device": of.device,
        "inode": of.inode,
        "size": of.size,
        "mtime_ns": of.mtime_ns,
        "ctime_ns": of.ctime_ns,
        "algorithm": ALGORITHM,
        "digest": digest,
    }


def _drop_old(folder: Path) -> None:
    """Keep the newest ENTRIES_MAX entries."""
    entries = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    for entry in entries[:-ENTRIES_MAX]:
        entry.unlink(missing_ok=True)
