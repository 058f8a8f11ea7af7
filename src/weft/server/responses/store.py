"""The store of responses as the event loop sees it: every call runs in one thread of its own.

    await store.put(...)  --queue--> the thread --> ResponseDatabase --> one file

SQLite blocks, for milliseconds as a rule and for seconds when another process writes or a disk is slow. The
loop waits in a coroutine meanwhile and serves other clients. One thread is enough: SQLite has one writer.

Without ``--response-store`` the file is in the user's state directory, and it is opened when the first
response is stored or asked for: a server without requests for responses writes no file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from weft.errors import ConfigError, QueueFullError
from weft.server.responses.database import (
    ResponseDatabase,
    ResponseStoreError,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
)

WAITING_MAX = 4096
T = TypeVar("T")


class ResponseStore:
    """Raises ResponseStoreError where the file fails, QueueFullError where too many calls wait."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._limits = limits
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-responses")
        self._database: ResponseDatabase | None = None
        self._waiting = 0

    def open_now(self) -> None:
        """Waits until the file is open. Raises ResponseStoreError."""
        self._thread.submit(self._work, lambda database: None).result()

    async def put(self, make: Callable[[], StoredResponse], owner: str) -> bool:
        """``make`` runs in the thread too: it may hash megabytes. False where the response has no place."""
        return await self._run(lambda database: database.put(make(), owner))

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises UnknownResponseError."""
        stored = await self._run(lambda database: database.get(response_id, owner))
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def delete(self, response_id: str, owner: str) -> None:
        """Raises UnknownResponseError."""
        if not await self._run(lambda database: database.delete(response_id, owner)):
            raise _unknown(response_id)

    async def path_to(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The conversation up to this response. Raises UnknownResponseError, RequestError."""
        return await self._run(lambda database: database.path(response_id, owner))

    async def close(self) -> None:
        """Waits for what was begun."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        def end() -> None:
            if self._database is not None:
                self._database.close()

        self._thread.submit(end)
        self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[ResponseDatabase], T]) -> T:
        if self._waiting >= WAITING_MAX:
            raise QueueFullError(f"{self._waiting} requests wait for the store of responses; the limit is "
                                 f"{WAITING_MAX} (--response-store). Try again later", code="queue_full",
                                 param="--response-store")
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(self._work, work))
        finally:
            self._waiting -= 1

    def _work(self, work: Callable[[ResponseDatabase], T]) -> T:
        try:
            if self._database is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._database = ResponseDatabase(self.path, self._limits, self._clock)
            return work(self._database)
        except (ConfigError, OSError, sqlite3.Error) as error:
            raise ResponseStoreError(f"the store of responses failed: {error} (--response-store)",
                                     param="--response-store") from error


def default_path() -> Path:
    """In the user's state directory, as the XDG specification names it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "weft" / "responses.sqlite"


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"there is no response {response_id!r}", param="response_id",
                                code="response_not_found")
