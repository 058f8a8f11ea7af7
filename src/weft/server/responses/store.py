"""Stored responses: objects of the kind ``response``, as the event loop sees them.

    put --queue--> the thread: all that wait, one transaction --> ObjectDatabase
    get, delete, path_to --------> the thread

SQLite blocks, for milliseconds as a rule and for seconds when another process writes or a disk is slow. So its calls
run in one thread of their own. An executor with futures would make a short call 50 % slower. A response is on disk when
``put`` returns. Without ``server.response_store`` the file is opened when the first response is stored or asked for. At
most WAITING_MAX calls wait (law L11).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from typing import TypeVar

import msgspec

from weft.errors import ConfigError, NotFoundError, QueueFullError, RequestError, UserError
from weft.objects.database import Bounds, NewObject, ObjectDatabase
from weft.objects.sessions import KIND as SESSION_KIND
from weft.server.running import LockFile, is_locked

WAITING_MAX = 4096
KIND = "response"
T = TypeVar("T")


class ResponseStoreError(UserError):
    """The file cannot be read or written now."""

    status = 503
    kind = "service_unavailable"


class UnknownResponseError(NotFoundError):
    """No response of this owner has this id."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of conversations. ``turns``: responses that a conversation may have; ``turn_bytes``: bytes that all of
    them may have. ``session_age_s``: seconds that sessions are kept at most."""

    count: int
    bytes: int
    age_s: float
    turns: int
    turn_bytes: int
    session_age_s: float = 30 * 86_400.0


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. ``body``: the response as JSON; ``items``: only the input items of its request, as JSON.

    ``tokens``: int32 bytes of the tokens that the model read and wrote up to the end of the answer, without the first
    ``shared`` tokens, which are the parent's. Their text has ``chars`` characters and the SHA-256 ``digest``;
    ``vocabulary`` identifies the tokenizer."""

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
        return len(self.body) + len(self.items) + len(self.tokens)

    def as_object(self, owner: str, runner: str | None = None) -> NewObject:
        return NewObject(
            id=self.response_id, owner=owner, body=_encoder.encode(self), parent=self.parent, runner=runner
        )


_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(StoredResponse).decode


class ResponseStore:
    """The store of responses, on the event loop. Raises ResponseStoreError if the file fails, QueueFullError if too
    many calls wait."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.limits = limits
        self._clock = clock
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._database: ObjectDatabase | None = None
        self._waiting = 0
        self._puts: list[tuple[Callable[[], StoredResponse], str, asyncio.Future[bool]]] = []
        self._is_writing = False
        self._runner: LockFile | None = None
        """File that is locked as long as this process may compute responses in the background."""

    def open_now(self) -> None:
        """Open the file, before anything else. Raise ResponseStoreError."""
        self._work(lambda database: None)

    async def put(self, make: Callable[[], StoredResponse], owner: str) -> bool:
        """Store a response. Return False if there is no room. ``make`` may hash megabytes and runs in the thread."""
        self._check_room(len(self._puts))
        is_stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._puts.append((make, owner, is_stored))
        if not self._is_writing:
            self._write()
        return await is_stored

    async def begin(self, unfinished: StoredResponse, owner: str) -> bool:
        """Store a response that this process computes in the background. Return False if there is no room."""

        def put(database: ObjectDatabase) -> bool:
            if self._runner is None:
                self._runner = LockFile(self.path.with_name(f"{self.path.name}.runner-{token_hex(16)}"))
            return database.put(KIND, unfinished.as_object(owner, self._runner.path.name))

        return await self.run(put)

    async def finish(self, make: Callable[[], StoredResponse], owner: str) -> bool:
        """Store the end of a response that ``begin`` stored. Return False if it was deleted."""
        return await self.run(lambda database: database.finish(KIND, make().as_object(owner)))

    async def runner_is_gone(self, response_id: str, owner: str) -> bool:
        """Return whether no process computes an unfinished response any more."""

        def is_gone(database: ObjectDatabase) -> bool:
            runner = database.runner_of(response_id, owner)
            return runner is not None and not is_locked(self.path.with_name(runner))

        return await self.run(is_gone)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response. Raise UnknownResponseError."""
        body = await self.run(lambda database: database.get(KIND, response_id, owner))
        if body is None:
            raise _unknown(response_id)
        return _decode(body)

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response. Raise UnknownResponseError."""
        if not await self.run(lambda database: database.delete(response_id, owner)):
            raise _unknown(response_id)

    async def path_to(self, response_id: str, owner: str) -> list[StoredResponse]:
        """Return the conversation up to this response. Raise UnknownResponseError, RequestError."""
        return await self.run(lambda database: read_path(database, response_id, owner, self.limits))

    async def close(self) -> None:
        """Wait for the calls that have begun, and close."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._runner is not None:
            self._runner.remove()
            self._runner = None
        if self._database is not None:
            self._database.close()

    # ------------------------------------------------------------------ the thread

    def _write(self) -> None:
        """Write all responses that wait, in one transaction."""
        self._is_writing = True
        batch, self._puts = self._puts, []

        def put_all(database: ObjectDatabase) -> list[bool]:
            return database.put_all(KIND, [make().as_object(owner) for make, owner, _ in batch])

        def end(written: list[bool] | Exception) -> None:
            for index, (_, _, is_stored) in enumerate(batch):
                _settle(is_stored, written if isinstance(written, Exception) else written[index])
            self._is_writing = False
            if self._puts:
                self._write()

        self._begin(put_all, end)

    async def run(self, work: Callable[[ObjectDatabase], T]) -> T:
        """Call ``work`` with the database, in the thread, and return the result. Raise ResponseStoreError, and errors
        of ``work``."""
        self._check_room(self._waiting)
        self._waiting += 1
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            self._begin(work, functools.partial(_settle, result))
            return await result
        finally:
            self._waiting -= 1

    def _begin(self, work: Callable[[ObjectDatabase], T], end: Callable[[T | Exception], None]) -> None:
        """Call ``work`` in the thread, then ``end`` on the event loop with its result, or its exception."""
        loop = asyncio.get_running_loop()

        def job() -> None:
            result: T | Exception
            try:
                result = self._work(work)
            except Exception as error:
                result = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits for it
                loop.call_soon_threadsafe(end, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="weft-responses", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _check_room(self, waiting: int) -> None:
        if waiting >= WAITING_MAX:
            raise QueueFullError(
                f"{waiting} requests wait for the store of responses; the limit is "
                f"{WAITING_MAX} (server.response_store). Try again later",
                code="queue_full",
                param="server.response_store",
            )

    def _work(self, work: Callable[[ObjectDatabase], T]) -> T:
        try:
            if self._database is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._database = open_database(self.path, self.limits, self._clock)
            return work(self._database)
        except (ConfigError, OSError, sqlite3.Error) as error:
            raise ResponseStoreError(
                f"the store of responses failed: {error} (server.response_store)", param="server.response_store"
            ) from error


def _settle(waiting: asyncio.Future[T], result: T | Exception) -> None:
    if waiting.done():  # the client has left
        return
    if isinstance(result, Exception):
        waiting.set_exception(result)
    else:
        waiting.set_result(result)


def open_database(path: Path, limits: StoreLimits, clock: Callable[[], float]) -> ObjectDatabase:
    """Open the file. Raise ConfigError."""
    bounds = {
        KIND: Bounds(limits.count, limits.bytes, limits.age_s),
        SESSION_KIND: Bounds(float("inf"), float("inf"), limits.session_age_s),
    }
    return ObjectDatabase(path, bounds, clock, flag="server.response_store", migrate=_migrate)


def read_path(database: ObjectDatabase, response_id: str, owner: str, limits: StoreLimits) -> list[StoredResponse]:
    """Return the responses from the root to this one. Raise UnknownResponseError, RequestError."""
    with database.transaction(reads_only=True):  # one state of the file for all queries
        if database.get(KIND, response_id, owner) is None:
            raise UnknownResponseError(
                f"there is no response {response_id!r}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        path = database.path(response_id, owner, limits.turns)
        if len(path) > limits.turns:
            raise RequestError(
                f"the conversation of {response_id!r} has more than {limits.turns} responses "
                "(limits.max_response_turns)",
                param="previous_response_id",
            )
        if path[0][1] is not None:
            raise UnknownResponseError(
                f"{response_id!r} continues {path[0][1]!r}, which was deleted",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        count = sum(size for _, _, size in path)
        if count > limits.turn_bytes:
            raise RequestError(
                f"the conversation of {response_id!r} has {count} bytes; the limit is "
                f"{limits.turn_bytes} (limits.max_body_mb)",
                param="previous_response_id",
            )
        bodies = [database.get(KIND, stored_id, owner) for stored_id, _, _ in path]
        return [_decode(body) for body in bodies if body is not None]


def _migrate(database: ObjectDatabase, version: int) -> None:
    """Fill the tables from the tables of versions 1 and 2."""
    runner = "runner" if version == 2 else "NULL"
    rows = database.db.execute(
        f"SELECT id, owner, parent, root, created_s, {runner}, body, items, vocabulary, shared, tokens, "
        "chars, digest FROM responses JOIN contents USING (id) ORDER BY created_s, depth"
    )
    for response_id, owner, parent, root, created_s, runner, *content in rows:
        fields = dict(zip(StoredResponse.__struct_fields__[2:], content, strict=True))
        stored = StoredResponse(response_id=response_id, parent=parent, **fields)
        database.insert(KIND, stored.as_object(owner, runner), created_s, root=root)
    for name in ("responses", "contents", "conversations"):
        database.db.execute(f"DROP TABLE {name}")


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"there is no response {response_id!r}", param="response_id", code="response_not_found")
