"""The store of responses as the event loop sees it.

    put --one write--> pending file, pending dict --LINGER_S, all together--> the thread --> ResponseDatabase
    get, delete, path_to ---------------------------------------------------> the thread

SQLite blocks, for milliseconds as a rule and for seconds when another process writes or a disk is slow. So
its calls run in one thread of their own, and the loop serves other clients. One thread is enough: SQLite has
one writer.

A response is on disk when ``put`` returns (``pending``), and every reader has it:

- this process reads it in its dict, or enters it into the database first;
- another process that misses a response enters what dead processes left. It waits until the pending files of
  the others are gone, and looks once more. Only a miss costs that.

A large response, and one that the database may refuse (no room, a file that fails), goes into the database
at once.

Without ``--response-store`` the file is in the user's state directory, and it is opened when the first
response is stored or asked for: a server without requests for responses writes no file.

Laws: L11 (PENDING_MAX, PENDING_BYTES_MAX; WAITING_MAX calls, whose error names the flag).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from weft.errors import ConfigError, QueueFullError
from weft.server.ids import random_id
from weft.server.responses.database import (
    ResponseDatabase,
    ResponseStoreError,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
)
from weft.server.responses.pending import PendingEntry, PendingFile, PendingLog, is_locked, left_behind

WAITING_MAX = 4096
LINGER_S = 0.02
"""A pending response waits so long for others before the database gets it."""
PENDING_MAX = 1024
PENDING_BYTES_MAX = 16 << 20
_RETRY_S = 1.0
_OTHERS_S = 5.0
"""As long as SQLite waits for another process."""
_LOOK_EVERY_S = 0.005
T = TypeVar("T")
_log = logging.getLogger("weft.server")


class ResponseStore:
    """Raises ResponseStoreError where the file fails, QueueFullError where too many calls wait."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.limits = limits
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-responses")
        self._database: ResponseDatabase | None = None
        self._waiting = 0
        self._files = PendingLog(path)
        self._pending: dict[str, PendingEntry] = {}
        self._pending_bytes = 0
        self._runner: PendingFile | None = None
        """Locked as long as this process may compute responses in the background."""
        self._flush_lock = asyncio.Lock()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._is_well = False
        """The database is open, and its last transaction succeeded."""

    def open_now(self) -> None:
        """Waits until the file is open. Raises ResponseStoreError."""
        self._thread.submit(self._work, lambda database: None).result()

    async def put(self, make: Callable[[], StoredResponse], owner: str, *, is_small: bool = False) -> bool:
        """False where the response has no place. ``make`` may hash megabytes and runs in the thread, unless
        ``is_small``."""
        if not is_small or not self._is_well or len(self._pending) >= PENDING_MAX or (
                self._pending_bytes > PENDING_BYTES_MAX):
            return await self._put_now(make, owner)
        response = make()
        try:
            if response.size > self.limits.bytes or not self.limits.count:
                return False
            self._files.append(owner, response)
        except OSError as error:
            raise _failure(error) from error
        self._pending[response.response_id] = owner, response
        self._pending_bytes += response.size
        self._flush_later(LINGER_S)
        return True

    async def begin(self, unfinished: StoredResponse, owner: str) -> bool:
        """Stores a response that this process computes in the background. False where it has no place."""
        await self._flush()

        def put(database: ResponseDatabase) -> bool:
            if self._runner is None:
                self._runner = PendingFile(self.path.with_name(f"{self.path.name}.runner-{random_id()}"))
            return database.put(unfinished, owner, self._runner.path.name)

        return await self._run(put)

    async def finish(self, make: Callable[[], StoredResponse], owner: str) -> bool:
        """What became of a response of ``begin``. False if it was deleted."""
        return await self._run(lambda database: database.finish(make(), owner))

    async def runner_is_gone(self, response_id: str, owner: str) -> bool:
        """Of an unfinished response: no process computes it."""
        def is_gone(database: ResponseDatabase) -> bool:
            runner = database.runner_of(response_id, owner)
            return runner is not None and not is_locked(self.path.with_name(runner))

        return await self._run(is_gone)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises UnknownResponseError."""
        entry = self._pending.get(response_id)
        if entry is not None and entry[0] == owner:
            return entry[1]
        stored = await self._looked(response_id, lambda database: database.get(response_id, owner))
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises UnknownResponseError."""
        if not await self._looked(response_id, lambda database: database.delete(response_id, owner)):
            raise _unknown(response_id)

    async def path_to(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The conversation up to this response. Raises UnknownResponseError, RequestError."""
        unknown: list[UnknownResponseError] = []

        def path(database: ResponseDatabase) -> list[StoredResponse] | None:
            try:
                return database.path(response_id, owner)
            except UnknownResponseError as error:
                unknown.append(error)
                return None

        conversation = await self._looked(response_id, path)
        if conversation is None:
            raise unknown[-1]
        return conversation

    async def close(self) -> None:
        """Waits for what was begun."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        with contextlib.suppress(ResponseStoreError):  # the next process enters what is left
            await self._flush()
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        def end() -> None:
            if self._runner is not None:
                self._runner.remove()
                self._runner = None
            if self._database is not None:
                self._database.close()

        self._thread.submit(end)
        self._thread.shutdown(wait=True)

    # ------------------------------------------------------------------ pending responses

    async def _put_now(self, make: Callable[[], StoredResponse], owner: str) -> bool:
        await self._flush()
        return await self._run(lambda database: database.put(make(), owner))

    def _flush_later(self, seconds: float) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(seconds, self._begin_flush)

    def _begin_flush(self) -> None:
        self._flush_timer = None
        task = asyncio.get_running_loop().create_task(self._flush_or_retry())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def _flush_or_retry(self) -> None:
        try:
            await self._flush()
        except (ResponseStoreError, QueueFullError) as error:
            _log.warning("%d responses wait for the store: %s", len(self._pending), error.message)
            self._flush_later(_RETRY_S)

    async def _flush(self) -> None:
        """What is pending now goes into the database, in one transaction."""
        async with self._flush_lock:
            if not self._pending:
                return
            entries, files = list(self._pending.values()), self._files.rotate()

            def enter(database: ResponseDatabase) -> None:
                database.put_all(entries)
                for file in files:
                    file.remove()

            await self._run(enter)
            self._files.forget(files)
            for _, response in entries:
                del self._pending[response.response_id]
                self._pending_bytes -= response.size

    async def _looked(self, response_id: str, look: Callable[[ResponseDatabase], T]) -> T:
        """``look`` at a database that has this response, if any process has. A miss is a false value."""
        if response_id in self._pending:
            await self._flush()
        result = await self._run(look)
        if not result:
            await self._wait_for_others()
            result = await self._run(look)
        return result

    async def _wait_for_others(self) -> None:
        """Until the database has what is now in pending files of other processes."""
        end_s = time.monotonic() + _OTHERS_S
        live = await self._run(lambda database: _enter_left_behind(database, self._files))
        while live and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            live = [path for path in live if path.exists()]

    # ------------------------------------------------------------------ the thread

    async def _run(self, work: Callable[[ResponseDatabase], T]) -> T:
        if self._waiting >= WAITING_MAX:
            raise QueueFullError(f"{self._waiting} requests wait for the store of responses; the limit is "
                                 f"{WAITING_MAX} (--response-store). Try again later", code="queue_full",
                                 param="--response-store")
        self._waiting += 1
        try:
            result = await asyncio.wrap_future(self._thread.submit(self._work, work))
            self._is_well = True
            return result
        except ResponseStoreError:
            self._is_well = False
            raise
        finally:
            self._waiting -= 1

    def _work(self, work: Callable[[ResponseDatabase], T]) -> T:
        try:
            if self._database is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._database = ResponseDatabase(self.path, self.limits, self._clock)
                _enter_left_behind(self._database, self._files)
            return work(self._database)
        except (ConfigError, OSError, sqlite3.Error) as error:
            raise _failure(error) from error


def _enter_left_behind(database: ResponseDatabase, files: PendingLog) -> list[Path]:
    """Enters what dead processes left. The files of those that live."""
    live = []
    for path in files.of_others():
        with left_behind(path) as entries:
            if entries is None:
                live.append(path)
            else:
                database.put_all(entries)
    return live


def default_path() -> Path:
    """In the user's state directory, as the XDG specification names it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "weft" / "responses.sqlite"


def _failure(error: Exception) -> ResponseStoreError:
    return ResponseStoreError(f"the store of responses failed: {error} (--response-store)",
                              param="--response-store")


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"there is no response {response_id!r}", param="response_id",
                                code="response_not_found")
