"""Stored responses in one SQLite file, for one thread of one process; other processes may use the file too.

    conversations   root, used_s                                       one row for each tree of responses
    responses       id, owner, parent, root, depth, size, created_s,   what queries read
                    runner                                             of a response that is not finished
    contents        id, body, items, tokens, ...                       what they do not

A response continues its parent, so a conversation is a tree and a turn is the path from the root to it. The
path only grows at its end: a parent exists before its child, so no path has a circle. Reading a path is
bounded all the same, in rows and in bytes.

*Bounds.* Count, bytes and age. What goes first is the conversation that was continued the longest ago, and in
it the deepest response: a path never loses a response in the middle. ``totals`` is kept by triggers, in the
transaction that changes the rows, so several processes agree on it.

*Owners.* Every query names the owner. A response of another one does not exist.

*On disk.* WAL, so readers never wait for the writer; the file and its directory are for their owner only
(0600, 0700). ``secure_delete`` overwrites what is deleted.

Laws: L10 (owners), L11 (the error or the log names the flag).

Rejected: an ORM (three tables); one file for each response (a bound over 100,000 files needs an index);
the whole history in each response (a conversation of n turns costs n squared).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.errors import ConfigError, RequestError, UserError

_APPLICATION_ID = 0x77656674
_VERSION = 2
_BUSY_S = 5.0
_ROW_BYTES = 512
"""What a response costs besides its contents."""
_SCHEMA = """
CREATE TABLE conversations (root TEXT PRIMARY KEY, used_s REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX conversations_by_use ON conversations (used_s);
CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, parent TEXT, root TEXT NOT NULL,
                        depth INTEGER NOT NULL, size INTEGER NOT NULL, created_s REAL NOT NULL,
                        runner TEXT) WITHOUT ROWID;
CREATE INDEX responses_by_root ON responses (root, depth);
CREATE TABLE contents (id TEXT PRIMARY KEY, body BLOB NOT NULL, items BLOB NOT NULL, vocabulary BLOB NOT NULL,
                       shared INTEGER NOT NULL, tokens BLOB NOT NULL, chars INTEGER NOT NULL,
                       digest BLOB NOT NULL);
CREATE TABLE totals (count INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    UPDATE totals SET count = count + 1, bytes = bytes + new.size;
END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET count = count - 1, bytes = bytes - old.size;
    DELETE FROM contents WHERE id = old.id;
END;
"""
_PATH = """
WITH RECURSIVE path(id, parent, size, step) AS (
    SELECT id, parent, size, 0 FROM responses WHERE id = :id AND owner = :owner
    UNION ALL
    SELECT responses.id, responses.parent, responses.size, step + 1 FROM path
    JOIN responses ON responses.id = path.parent AND responses.owner = :owner WHERE step < :turns_max)
SELECT id, parent, size FROM path ORDER BY step DESC
"""
_CONTENT = "SELECT body, items, vocabulary, shared, tokens, chars, digest FROM contents WHERE id = ?"


class ResponseStoreError(UserError):
    """The file cannot be read or written now."""

    status = 503
    kind = "service_unavailable"


class UnknownResponseError(UserError):
    """No response of this owner has this id."""

    status = 404
    kind = "not_found_error"


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """``turns``: responses that a conversation may have; ``turn_bytes``: bytes that all of them may have."""

    count: int
    bytes: int
    age_s: float
    turns: int
    turn_bytes: int


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """``body``: the response as JSON; ``items``: the input items of its request alone, as JSON.

    ``tokens`` are int32, behind the first ``shared`` tokens of the parent: what the model read and wrote up
    to the end of the answer. Their text has ``chars`` characters and the SHA-256 ``digest``; ``vocabulary``
    identifies the tokenizer."""

    response_id: str
    parent: str | None
    body: bytes
    items: bytes
    vocabulary: bytes = b""
    shared: int = 0
    tokens: bytes = b""
    chars: int = 0
    digest: bytes = b""

    @property
    def size(self) -> int:
        return _ROW_BYTES + len(self.body) + len(self.items) + len(self.tokens)


class ResponseDatabase:
    """Use it from the thread that opened it. Raises ConfigError for a path that cannot be a store."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        try:
            _create_private(path)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._prepare(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--response-store {path}: {error}", param="--response-store") from None

    def close(self) -> None:
        self._db.close()

    def put(self, stored: StoredResponse, owner: str, runner: str | None = None) -> bool:
        """False where it has no place: the parent is gone, or the bounds leave no room. ``runner``: of a
        response that is not finished."""
        now_s = self._clock()
        with _Transaction(self._db):
            if not self._insert(stored, owner, now_s, runner):
                return False
            self._evict(now_s)
            own_id = (stored.response_id,)
            return self._db.execute("SELECT 1 FROM responses WHERE id = ?", own_id).fetchone() is not None

    def put_all(self, entries: Iterable[tuple[str, StoredResponse]]) -> None:
        """Owners and responses, in one transaction. Those that have no place are dropped, and those that are
        there stay as they are."""
        now_s = self._clock()
        with _Transaction(self._db):
            for owner, stored in entries:
                self._insert(stored, owner, now_s)
            self._evict(now_s)

    def finish(self, stored: StoredResponse, owner: str) -> bool:
        """Replaces an unfinished response by what became of it. False if there is none, as it was deleted."""
        now_s = self._clock()
        with _Transaction(self._db):
            row = self._db.execute("SELECT root, depth FROM responses WHERE id = ? AND owner = ? AND runner "
                                   "IS NOT NULL", (stored.response_id, owner)).fetchone()
            if row is None:
                return False
            self._db.execute("DELETE FROM responses WHERE id = ?", (stored.response_id,))
            root, depth = row
            self._insert_row(stored, owner, root, depth, now_s, None)
            self._evict(now_s)
            return True

    def runner_of(self, response_id: str, owner: str) -> str | None:
        """None for a response that is finished, or unknown."""
        row = self._db.execute("SELECT runner FROM responses WHERE id = ? AND owner = ?",
                               (response_id, owner)).fetchone()
        return None if row is None else row[0]

    def _insert(self, stored: StoredResponse, owner: str, now_s: float, runner: str | None = None) -> bool:
        root, depth = stored.response_id, 0
        if stored.parent is not None:
            row = self._db.execute("SELECT root, depth FROM responses WHERE id = ? AND owner = ?",
                                   (stored.parent, owner)).fetchone()
            if row is None:
                return False
            root, depth = row[0], row[1] + 1
        self._insert_row(stored, owner, root, depth, now_s, runner)
        return True

    def _insert_row(self, stored: StoredResponse, owner: str, root: str, depth: int, now_s: float,
                    runner: str | None) -> None:
        self._db.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?)", (root, now_s))
        added = self._db.execute("INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (
            stored.response_id, owner, stored.parent, root, depth, stored.size, now_s, runner))
        if added.rowcount:
            self._db.execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (
                stored.response_id, stored.body, stored.items, stored.vocabulary, stored.shared,
                stored.tokens, stored.chars, stored.digest))

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        row = self._db.execute(
            "SELECT parent FROM responses JOIN conversations USING (root) "
            "WHERE id = ? AND owner = ? AND used_s >= ?",
            (response_id, owner, self._clock() - self._limits.age_s)).fetchone()
        return None if row is None else self._content(response_id, row[0])

    def delete(self, response_id: str, owner: str) -> bool:
        """Whether it was there. Responses that continue it stay, and cannot be continued any more."""
        with _Transaction(self._db):
            row = self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ? RETURNING root",
                                   (response_id, owner)).fetchall()
            if row:
                self._db.execute(
                    "DELETE FROM conversations WHERE root = ? AND NOT EXISTS "
                    "(SELECT 1 FROM responses WHERE responses.root = conversations.root)", row[0])
            return bool(row)

    def path(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The responses from the root to this one. Raises UnknownResponseError, RequestError."""
        limits = self._limits
        with _Transaction(self._db, reads_only=True):  # one state of the file for all queries
            if self.get(response_id, owner) is None:
                raise UnknownResponseError(f"there is no response {response_id!r}",
                                           param="previous_response_id", code="previous_response_not_found")
            rows = self._db.execute(_PATH, {"id": response_id, "owner": owner,
                                            "turns_max": limits.turns}).fetchall()
            if len(rows) > limits.turns:
                raise RequestError(f"the conversation of {response_id!r} has more than {limits.turns} "
                                   "responses (limits.max_response_turns)", param="previous_response_id")
            if rows[0][1] is not None:
                raise UnknownResponseError(
                    f"{response_id!r} continues {rows[0][1]!r}, which was deleted",
                    param="previous_response_id", code="previous_response_not_found")
            count = sum(size for _, _, size in rows)
            if count > limits.turn_bytes:
                raise RequestError(f"the conversation of {response_id!r} has {count} bytes; the limit is "
                                   f"{limits.turn_bytes} (limits.max_body_mb)", param="previous_response_id")
            return [content for one, parent, _ in rows
                    if (content := self._content(one, parent)) is not None]

    def totals(self) -> tuple[int, int]:
        """Count and bytes of what is stored."""
        count, size = self._db.execute("SELECT count, bytes FROM totals").fetchone()
        return count, size

    def _content(self, response_id: str, parent: str | None) -> StoredResponse | None:
        row = self._db.execute(_CONTENT, (response_id,)).fetchone()
        if row is None:
            return None
        body, items, vocabulary, shared, tokens, chars, digest = row
        return StoredResponse(response_id=response_id, parent=parent, body=body, items=items,
                              vocabulary=vocabulary, shared=shared, tokens=tokens, chars=chars, digest=digest)

    def _evict(self, now_s: float) -> None:
        """Until the bounds hold: what is too old, then what was continued the longest ago."""
        cutoff_s = now_s - self._limits.age_s
        old = "(SELECT root FROM conversations WHERE used_s < ?)"
        self._db.execute(f"DELETE FROM responses WHERE root IN {old}", (cutoff_s,))
        self._db.execute("DELETE FROM conversations WHERE used_s < ?", (cutoff_s,))
        while self._is_over():
            root = self._db.execute("SELECT root FROM conversations ORDER BY used_s LIMIT 1").fetchone()
            deepest = self._db.execute("SELECT id FROM responses WHERE root = ? ORDER BY depth DESC LIMIT 1",
                                       root).fetchone()
            if deepest is None:
                self._db.execute("DELETE FROM conversations WHERE root = ?", root)
            else:
                self._db.execute("DELETE FROM responses WHERE id = ?", deepest)

    def _is_over(self) -> bool:
        count, size = self.totals()
        return count > self._limits.count or size > self._limits.bytes

    def _prepare(self, path: Path) -> None:
        db = self._db
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA synchronous = NORMAL")
        with _Transaction(db, reads_only=True):  # one state: another process may write first
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
        if tables and application != _APPLICATION_ID:
            raise ConfigError(f"--response-store {path}: it is a database of another program",
                              param="--response-store")
        if version > _VERSION:
            raise ConfigError(f"--response-store {path}: it has version {version}, of a newer weft; this one "
                              f"reads version {_VERSION}", param="--response-store")
        db.execute("PRAGMA journal_mode = WAL")
        with _Transaction(db):
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _statements(_SCHEMA):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            elif db.execute("PRAGMA user_version").fetchone()[0] < _VERSION:  # by now
                db.execute("ALTER TABLE responses ADD COLUMN runner TEXT")
            db.execute(f"PRAGMA user_version = {_VERSION}")
            self._evict(self._clock())


class _Transaction:
    """Commits at its end, or rolls back for an exception. A writer takes the lock at once: a transaction that
    begins to read and then writes fails where another process wrote in between."""

    def __init__(self, db: sqlite3.Connection, *, reads_only: bool = False) -> None:
        self._db = db
        self._begin = "BEGIN" if reads_only else "BEGIN IMMEDIATE"

    def __enter__(self) -> None:
        self._db.execute(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def _create_private(path: Path) -> None:
    """An empty file for its owner only, if there is none; SQLite gives its other files the same mode."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _statements(script: str) -> list[str]:
    """``executescript`` would end the transaction."""
    statements, part = [], ""
    for line in script.strip().splitlines():
        part += line + "\n"
        if sqlite3.complete_statement(part):
            statements.append(part)
            part = ""
    return statements
