"""Objects of clients in a SQLite file: responses and sessions in one file, files and batches in another.

    objects   seq, id, kind, owner, parent, root, size, created_s, runner, body
    kinds     count and bytes of each kind, kept by triggers

An object may continue a *parent*: a conversation is a tree with a *root*, and a turn is a path from it. Every query of
a client names the owner (law L10). Count, bytes and age of each kind are bounded (law L11): first the owner with most
objects or bytes loses the last object of the conversation that was continued the longest ago. An object that is not
finished names its *runner*, a file that the process locks as long as it lives. Only their owner can read the file and
its directory, and ``secure_delete`` overwrites deleted data.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.errors import ConfigError
from weft.host import state_directory

_APPLICATION_ID = 0x77656674
VERSION = 3
_BUSY_S = 5.0
_ROW_BYTES = 512
"""Bytes of an object in addition to its body."""
_AGE_EVERY_S = 1.0
"""Seconds between two searches for objects that are too old."""
_SCHEMA = """
CREATE TABLE objects (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
                      owner TEXT NOT NULL, parent TEXT, root TEXT NOT NULL, size INTEGER NOT NULL,
                      created_s REAL NOT NULL, runner TEXT, body BLOB NOT NULL);
CREATE INDEX objects_by_root ON objects (root, seq);
CREATE INDEX objects_by_owner ON objects (kind, owner, size);
CREATE TABLE kinds (kind TEXT PRIMARY KEY, count INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER object_added AFTER INSERT ON objects BEGIN
    UPDATE kinds SET count = count + 1, bytes = bytes + new.size WHERE kind = new.kind;
END;
CREATE TRIGGER object_changed AFTER UPDATE OF size ON objects BEGIN
    UPDATE kinds SET bytes = bytes + new.size - old.size WHERE kind = new.kind;
END;
CREATE TRIGGER object_removed AFTER DELETE ON objects BEGIN
    UPDATE kinds SET count = count - 1, bytes = bytes - old.size WHERE kind = old.kind;
END;
"""
_INSERT = (
    "INSERT INTO objects (id, kind, owner, parent, root, size, created_s, runner, body) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_RESTED = """
SELECT seq, id, created_s FROM objects AS one WHERE kind = :kind AND (:owner IS NULL OR owner = :owner) AND NOT EXISTS
    (SELECT 1 FROM objects WHERE root = one.root AND seq > one.seq) ORDER BY seq LIMIT 1
"""
_LARGEST_OWNER = """
SELECT owner FROM objects WHERE kind = :kind GROUP BY owner
    ORDER BY max(count(*) / :count, sum(size) / :bytes) DESC LIMIT 1
"""
_GET = """
SELECT body FROM objects AS one WHERE id = ? AND owner = ? AND kind = ? AND
    (SELECT created_s FROM objects WHERE root = one.root ORDER BY seq DESC LIMIT 1) >= ?
"""
_PATH = """
WITH RECURSIVE path(id, parent, size, step) AS (
    SELECT id, parent, size, 0 FROM objects WHERE id = :id AND owner = :owner
    UNION ALL
    SELECT objects.id, objects.parent, objects.size, step + 1 FROM path
    JOIN objects ON objects.id = path.parent AND objects.owner = :owner WHERE step < :most)
SELECT id, parent, size FROM path ORDER BY step DESC
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one kind."""

    count: float
    bytes: float
    age_s: float


class NewObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object to be stored. ``runner``: the file that the process locks while the object is not finished."""

    id: str
    owner: str
    body: bytes
    parent: str | None = None
    runner: str | None = None

    @property
    def size(self) -> int:
        return _ROW_BYTES + len(self.body)


def default_path() -> Path:
    """Return the path of the stored responses and sessions in the user's state directory."""
    return state_directory() / "responses.sqlite"


class ObjectDatabase:
    """The SQLite file. One thread at a time may use it. ``flag`` names the file in errors; ``migrate`` fills the tables
    from the tables of an older version. Raise ConfigError for a path that cannot be a store."""

    def __init__(
        self,
        path: Path,
        bounds: Mapping[str, Bounds],
        clock: Callable[[], float],
        *,
        flag: str,
        migrate: Callable[[ObjectDatabase, int], None] | None = None,
    ) -> None:
        self._bounds = dict(bounds)
        self._clock = clock
        self._looked_s = dict.fromkeys(bounds, float("-inf"))
        try:
            _create_private(path)
            self.db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._prepare(f"{flag} {path}", flag, migrate)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{flag} {path}: {error}", param=flag) from None

    def close(self) -> None:
        self.db.close()

    def put(self, kind: str, new: NewObject) -> bool:
        """Store one object, as ``put_all`` does."""
        [is_stored] = self.put_all(kind, [new])
        return is_stored

    def put_all(self, kind: str, entries: Sequence[NewObject]) -> list[bool]:
        """Store objects in one transaction. Return False for each object whose parent is gone or that the bounds leave
        no room for."""
        now_s = self._clock()
        with self.transaction():
            stored = [self.insert(kind, new, now_s) for new in entries]
            if self._evict(kind, now_s):
                stored = [was and self._has(new.id) for was, new in zip(stored, entries, strict=True)]
        return stored

    def insert(self, kind: str, new: NewObject, created_s: float, *, root: str | None = None) -> bool:
        """Insert an object inside a transaction. ``root``: the object's root, if known."""
        if root is None and new.parent is not None:
            row = self.db.execute(
                "SELECT root FROM objects WHERE id = ? AND owner = ?", (new.parent, new.owner)
            ).fetchone()
            if row is None:
                return False
            root = row[0]
        self.db.execute(
            _INSERT, (new.id, kind, new.owner, new.parent, root or new.id, new.size, created_s, new.runner, new.body)
        )
        return True

    def replace(self, kind: str, new: NewObject) -> None:
        """Replace the object with the owner and id of ``new``, if there is one."""
        with self.transaction():
            self.delete(new.id, new.owner)
            self.insert(kind, new, self._clock())

    def forget(self, object_id: str) -> None:
        """Delete an object of any owner."""
        self.db.execute("DELETE FROM objects WHERE id = ?", (object_id,))

    def owned(self, kind: str, owner: str, *, but: str) -> tuple[int, int]:
        """Return the count and the bytes of an owner's objects, except the one with the id ``but``."""
        count, size = self.db.execute(
            "SELECT count(*), coalesce(sum(size), 0) FROM objects WHERE kind = ? AND owner = ? AND id <> ?",
            (kind, owner, but),
        ).fetchone()
        return count, size

    def finish(self, kind: str, new: NewObject) -> bool:
        """Replace an unfinished object by its result. Return False if it was deleted."""
        now_s = self._clock()
        with self.transaction():
            changed = self.db.execute(
                "UPDATE objects SET body = ?, size = ?, created_s = ?, runner = NULL "
                "WHERE id = ? AND owner = ? AND runner IS NOT NULL",
                (new.body, new.size, now_s, new.id, new.owner),
            ).rowcount
            self._evict(kind, now_s)
        return bool(changed)

    def update(self, object_id: str, body: bytes) -> bool:
        """Replace the body of an object, and return whether it was there."""
        return bool(
            self.db.execute(
                "UPDATE objects SET body = ?, size = ? WHERE id = ?", (body, _ROW_BYTES + len(body), object_id)
            ).rowcount
        )

    def runner_of(self, object_id: str, owner: str) -> str | None:
        """Return the runner of an unfinished object; None for an object that is finished, or unknown."""
        row = self.db.execute("SELECT runner FROM objects WHERE id = ? AND owner = ?", (object_id, owner)).fetchone()
        return None if row is None else row[0]

    def get(self, kind: str, object_id: str, owner: str) -> bytes | None:
        """Return the body; None for an unknown object, and where the conversation is too old."""
        cutoff_s = self._clock() - self._bounds[kind].age_s
        row = self.db.execute(_GET, (object_id, owner, kind, cutoff_s)).fetchone()
        return None if row is None else row[0]

    def listed(self, kind: str, owner: str | None = None) -> list[bytes]:
        """Return the bodies of an owner's objects, or of all objects: the oldest first."""
        rows = self.db.execute(
            "SELECT body FROM objects WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY seq", (kind, owner, owner)
        )
        return [body for (body,) in rows]

    def delete(self, object_id: str, owner: str) -> bool:
        """Delete an object, and return whether it was there. Objects that continue it stay, but nothing can continue
        them any more."""
        return bool(self.db.execute("DELETE FROM objects WHERE id = ? AND owner = ?", (object_id, owner)).rowcount)

    def path(self, object_id: str, owner: str, most: int) -> list[tuple[str, str | None, int]]:
        """Return id, parent and size of the objects from the root to this one, at most ``most`` + 1 of them."""
        return self.db.execute(_PATH, {"id": object_id, "owner": owner, "most": most}).fetchall()

    def totals(self, kind: str) -> tuple[int, int]:
        """Return count and bytes of the stored objects."""
        count, size = self.db.execute("SELECT count, bytes FROM kinds WHERE kind = ?", (kind,)).fetchone()
        return count, size

    def drop_old(self, kind: str) -> list[str]:
        """Remove objects that are too old, and return their ids."""
        self._looked_s[kind] = float("-inf")
        with self.transaction():
            return self._evict(kind, self._clock())

    def transaction(self, *, reads_only: bool = False) -> _Transaction:
        return _Transaction(self.db, reads_only=reads_only)

    def _has(self, object_id: str) -> bool:
        return self.db.execute("SELECT 1 FROM objects WHERE id = ?", (object_id,)).fetchone() is not None

    def _evict(self, kind: str, now_s: float) -> list[str]:
        """Evict objects until the bounds hold."""
        bounds, gone = self._bounds[kind], list[str]()
        looks_at_age = now_s - self._looked_s[kind] >= _AGE_EVERY_S
        if looks_at_age:
            self._looked_s[kind] = now_s
        while True:
            count, size = self.totals(kind)
            is_over = count > bounds.count or size > bounds.bytes
            if not (is_over or looks_at_age):
                return gone
            owner = None
            if is_over:
                share = {"kind": kind, "count": float(bounds.count), "bytes": float(bounds.bytes)}
                [owner] = self.db.execute(_LARGEST_OWNER, share).fetchone() or [None]
            rested = self.db.execute(_RESTED, {"kind": kind, "owner": owner}).fetchone()
            if rested is None or not (is_over or rested[2] < now_s - bounds.age_s):
                return gone
            self.db.execute("DELETE FROM objects WHERE seq = ?", rested[:1])
            gone.append(rested[1])

    def _prepare(self, named: str, flag: str, migrate: Callable[[ObjectDatabase, int], None] | None) -> None:
        db = self.db
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA synchronous = NORMAL")
        with self.transaction(reads_only=True):  # one state: another process may write first
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
        if tables and application != _APPLICATION_ID:
            raise ConfigError(f"{named}: this is a database of another program", param=flag)
        if version > VERSION:
            raise ConfigError(
                f"{named}: this file has version {version}, of a newer weft; this weft reads version {VERSION}",
                param=flag,
            )
        db.execute("PRAGMA journal_mode = WAL")
        with self.transaction():
            version = db.execute("PRAGMA user_version").fetchone()[0]  # by now
            if version < VERSION:
                for statement in _statements(_SCHEMA):
                    db.execute(statement)
            db.executemany("INSERT OR IGNORE INTO kinds VALUES (?, 0, 0)", [(kind,) for kind in self._bounds])
            if 0 < version < VERSION and migrate is not None:
                migrate(self, version)
            if version < VERSION:
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            for kind in self._bounds:
                self._evict(kind, self._clock())


class _Transaction:
    """A transaction that commits at its end, or rolls back for an exception. A writer takes the lock at once: a
    transaction that begins to read and then writes fails where another process wrote in between."""

    def __init__(self, db: sqlite3.Connection, *, reads_only: bool) -> None:
        self._db = db
        self._begin = "BEGIN" if reads_only else "BEGIN IMMEDIATE"

    def __enter__(self) -> None:
        self._db.execute(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def _create_private(path: Path) -> None:
    """Create an empty file that only its owner can read, if there is none; SQLite gives its other files the same
    mode."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _statements(script: str) -> list[str]:
    """Split ``script`` into statements, as ``executescript`` would end the transaction."""
    statements, part = [], ""
    for line in script.strip().splitlines():
        part += line + "\n"
        if sqlite3.complete_statement(part):
            statements.append(part)
            part = ""
    return statements
