"""Opening of a store's directory: required files, the writer's lock, the secret, and the ledger.

    DIR/store.json          {"format": 1}: this directory is a store
       /lock                locked by the one process that writes; its text names that process
       /secret              32 random bytes, mode 0600; see below
       /namespaces/H.json   the identity of a namespace; see ``identity``
       /ledger-N.rows .tokens
       /volumes/volume-N

    request's cache_salt --HMAC-SHA256, secret--> 16 bytes of a ledger row --> the root of its prefixes

The first process takes the lock and writes. A second one only reads, follows the ledger, and says so. The lock is the
operating system's (flock), so it ends with the process, even after kill -9. A directory without permission to write is
only read too.

Salts enter a store by HMAC, so neither the salt nor a hash that can be guessed is on the disk: without the secret, an
attacker that reads the ledger could try salts from a list. Servers that share a bucket and want to share salted
prefixes copy the file. Law L10: another salt, another root.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError
from weft.store.disk import OsDisk
from weft.store.identity import NAMESPACES_FOLDER, NamespaceIdentity
from weft.store.ledger import (
    FORMAT_VERSION,
    NO_SALT,
    LedgerFiles,
    create_ledger,
    generations,
    open_ledger,
    remove_other_generations,
    valid_rows,
)
from weft.store.recovery import LiveRows, live_rows
from weft.store.sealing import Sealer
from weft.store.space import VOLUMES_FOLDER, Volumes

STORE_FILE = "store.json"
LOCK_FILE = "lock"
PARAM = "--store"
SECRET_FILE = "secret"
SECRET_BYTES = 32
RESERVE_BYTES = 8 << 30
WRITE_BYTES_PER_SECOND = 200e6
QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store. Sizes are bytes.

    ``capacity_bytes``: most bytes of volumes; None is half of the disk's free space at the first start.
    ``queue_bytes``: payloads that wait to be written; more are refused. ``volume_bytes``: size of a new volume; None is
    a 64th of the capacity, at least 64 MiB. ``accept_inexact``: match rounded bytes too. ``forms``: of payloads that
    the engine knows (``values``); records in others do not match. None: all.

    ``cache_directory``: the directory in front of a bucket; None is one under ~/.cache/weft/store. ``refresh_s``:
    seconds between two searches for new segments of other writers. ``key_file``: of the signatures of a bucket
    (``signing``). ``required``: a bucket that does not answer at the start is an error. ``pinned``: (salt, token
    bytes) of prefixes whose records are not evicted, the most wanted first. ``sealer``: encrypts all records."""

    capacity_bytes: int | None = None
    write_bytes_per_second: float = WRITE_BYTES_PER_SECOND
    reserve_bytes: int = RESERVE_BYTES
    queue_bytes: int = QUEUE_BYTES
    volume_bytes: int | None = None
    read_threads: int = 4
    accept_inexact: bool = False
    forms: frozenset[int] | None = None
    cache_directory: str | None = None
    key_file: str | None = None
    refresh_s: float = 10.0
    required: bool = False
    pinned: Callable[[], Iterable[tuple[str, bytes]]] = tuple
    sealer: Sealer | None = None


@dataclass(slots=True)
class OpenDirectory:
    """An open directory. ``lock``: the handle that holds the lock, None for a reader. ``secret``: None if the directory
    of a reader has none. ``live``: the ledger's rows at the time of opening; ``volume_blocks``: usable volumes."""

    path: Path
    disk: OsDisk
    lock: int | None
    secret: bytes | None
    ledger: LedgerFiles | None
    live: LiveRows | None
    volumes: Volumes
    volume_blocks: dict[int, int]
    notes: list[str]

    @property
    def writable(self) -> bool:
        return self.lock is not None

    def close(self) -> None:
        """Give the lock back."""
        self.volumes.close()
        if self.lock is not None:
            self.disk.close(self.lock)
            self.lock = None


def open_directory(path: Path, disk: OsDisk, *, write: bool = True) -> OpenDirectory:
    """Open a store, or create one if ``write`` is true. Raise ConfigError that names the directory."""
    notes: list[str] = []
    try:
        if write:
            _prepare(path, disk)
        _check_format(path, disk)
    except OSError as error:
        if not (write and disk.exists(path / STORE_FILE)):
            raise ConfigError(f"--store {path}: {error.strerror or error}", param=PARAM) from None
        notes.append(f"{path} cannot be written ({error.strerror}); this process only reads it")
        write = False
    lock = _take_lock(path, disk, notes) if write else None
    secret = _secret(path, disk, notes, create=lock is not None)
    volumes = Volumes(disk, path / VOLUMES_FOLDER, lock is not None)
    try:
        blocks, broken = volumes.scan()
        notes += [
            f"{path / VOLUMES_FOLDER / name} is not a volume of this format; its records are lost" for name in broken
        ]
        ledger, live = read_ledger(path, disk, blocks, writable=lock is not None)
    except OSError as error:
        raise ConfigError(f"--store {path}: {error.strerror or error}", param=PARAM) from None
    if live is not None and live.dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(live.dropped.items()))
        notes.append(f"{path}: rows of the ledger were dropped: {counts}")
    return OpenDirectory(path, disk, lock, secret, ledger, live, volumes, blocks, notes)


def read_ledger(
    path: Path, disk: OsDisk, volume_blocks: dict[int, int], *, writable: bool
) -> tuple[LedgerFiles | None, LiveRows | None]:
    """Return the newest generation and its live rows. A writer creates the first one. Raise OSError."""
    try:
        opened = open_ledger(path, disk, writable=writable)
    except FileNotFoundError:  # a compaction of the writer has just removed it
        opened = open_ledger(path, disk, writable=writable)
    if opened is None:
        if not writable:
            return None, None
        opened = create_ledger(path, disk, max(generations(path, disk), default=0) + 1, b"", ()), b""
    ledger, content = opened
    if writable:
        remove_other_generations(path, disk, ledger.generation)
    rows, valid, torn = valid_rows(content)
    live = live_rows(rows, valid, volume_blocks=volume_blocks, tokens_bytes=ledger.tokens_bytes)
    if torn:
        live.dropped["torn"] = 1
    ledger.tokens_bytes -= ledger.tokens_bytes % 4
    return ledger, live


def write_namespace(path: Path, disk: OsDisk, identity: NamespaceIdentity) -> None:
    """Write the file with the identity of the namespace, for ``weft store info``. Raise OSError."""
    file = path / NAMESPACES_FOLDER / f"{identity.digest.hex()}.json"
    if not disk.exists(file):
        disk.write_file(file, identity.as_json())


def _prepare(path: Path, disk: OsDisk) -> None:
    disk.make_directory(path)
    if not disk.exists(path / STORE_FILE):
        own = (LOCK_FILE, SECRET_FILE, VOLUMES_FOLDER, NAMESPACES_FOLDER)
        strangers = [name for name in disk.names(path) if name not in own and not name.endswith(".tmp")]
        if strangers:
            raise ConfigError(
                f"--store {path}: the directory has other files ({strangers[0]}) and is not a store; name "
                "an empty or a new directory",
                param=PARAM,
            )
    disk.make_directory(path / VOLUMES_FOLDER)
    disk.make_directory(path / NAMESPACES_FOLDER)
    if not disk.exists(path / STORE_FILE):
        disk.write_file(path / STORE_FILE, json.dumps({"format": FORMAT_VERSION}).encode() + b"\n")


def _check_format(path: Path, disk: OsDisk) -> None:
    content = disk.read_file(path / STORE_FILE)
    try:
        version = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f'--store {path}: {STORE_FILE} is damaged; it must say {{"format": {FORMAT_VERSION}}}', param=PARAM
        ) from None
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"--store {path}: has format {version}, and this weft reads format "
            f"{FORMAT_VERSION}; name another directory",
            param=PARAM,
        )


def _take_lock(path: Path, disk: OsDisk, notes: list[str]) -> int | None:
    try:
        handle = disk.open_write(path / LOCK_FILE)
        locked = disk.lock(handle)
    except OSError as error:
        notes.append(f"{path / LOCK_FILE}: {error.strerror}; this process only reads the store")
        return None
    if not locked:
        holder = disk.read_file(path / LOCK_FILE).decode("utf-8", "replace").strip() or "another process"
        notes.append(f"{holder} writes to {path}; this process only reads it")
        disk.close(handle)
        return None
    try:
        disk.truncate(handle, 0)
        disk.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ConfigError(f"--store {path}: {error.strerror}", param=PARAM) from None
    return handle


def _secret(path: Path, disk: OsDisk, notes: list[str], *, create: bool) -> bytes | None:
    secret = read_secret(path, disk)
    file = path / SECRET_FILE
    if secret is None and create:
        try:
            secret = secrets.token_bytes(SECRET_BYTES)
            disk.write_file(file, secret, mode=0o600)
        except OSError as error:
            notes.append(f"{file}: {error.strerror}; requests with a cache_salt are not stored")
            return None
    elif secret is None:
        notes.append(f"{file} cannot be read; requests with a cache_salt find nothing in this store")
    elif disk.mode(file) & 0o077:
        notes.append(f"{file} can be read by other users; chmod 600 it")
    return secret


def read_secret(directory: Path, disk: OsDisk) -> bytes | None:
    """Return the directory's secret; None if the file is missing or has another length."""
    try:
        secret = disk.read_file(directory / SECRET_FILE)
    except OSError:
        return None
    return secret if len(secret) == SECRET_BYTES else None


def salt_key(secret: bytes, salt: str | None) -> bytes:
    """Return 16 bytes for a salt; zeros for none."""
    if not salt:
        return NO_SALT
    return hmac.new(secret, salt.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()[:16]
