"""Responses with ``background: true``: computed while no client waits.

    POST --accepted by an engine--> stored as queued --> ResponseRun: a task that reads the answer
                                                          |--> events, for clients that follow
    GET, cancel, DELETE ----------------------------------|--> the store: completed, incomplete, failed,
                                                                          cancelled

A run lives in the process that started it (with ``--http-workers``, the one that owns the engines). The store names its
runner, a file that the process locks. If the runner is gone, the response has failed, and the next reader stores the
failure. Events of a run that was created with ``stream: true`` stay in memory for a while after its end. Runs and
events are bounded (law L11).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from weft.errors import QueueFullError, RequestError, WeftError
from weft.server.responses.store import ResponseStore, StoredResponse
from weft.tasks import end_tasks

RUNS_MAX = 1024
ENDED_MAX, ENDED_BYTES_MAX = 64, 64 << 20
"""Most runs that have ended, and bytes of their events, that can still be followed."""
UNFINISHED = ("queued", "in_progress")
_log = logging.getLogger("weft.server")


class _Status(msgspec.Struct):
    status: str


def status_of(stored: StoredResponse) -> str:
    return msgspec.json.decode(stored.body, type=_Status).status


class BackgroundAnswer(Protocol):
    """The part of a ``ResponsesJob`` that a run uses."""

    @property
    def response_id(self) -> str: ...

    @property
    def status(self) -> str: ...

    def body_so_far(self) -> bytes: ...

    def cancelled(self) -> None: ...


class ResponseRun:
    """A response that is computed in the background. ``lines`` yields its events; ``unfinished``: the stored record."""

    def __init__(
        self,
        answer: BackgroundAnswer,
        lines: AsyncGenerator[bytes, None],
        owner: str,
        unfinished: StoredResponse,
        *,
        has_events: bool,
    ) -> None:
        self.owner = owner
        self.has_events = has_events
        self.unfinished = unfinished
        self.task: asyncio.Task[None] | None = None
        self.has_ended = False
        self.event_bytes = 0
        self.answer = answer
        self._lines = lines
        self._events: list[bytes] = []
        """Events; the event with sequence number n is entry n."""
        self._news = asyncio.Event()

    async def read(self) -> None:
        """Read the answer to its end, or to its cancellation."""
        try:
            async for chunk in self._lines:
                if self.has_events:
                    self._events += [event + b"\n\n" for event in chunk.split(b"\n\n") if event]
                    self.event_bytes += len(chunk)
                    self._wake()
        except asyncio.CancelledError:
            self.answer.cancelled()
        finally:
            await self._lines.aclose()

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    async def follow(self, starting_after: int) -> AsyncGenerator[bytes, None]:
        """Yield events with larger sequence numbers, up to the end."""
        position = starting_after + 1
        while True:
            news = self._news
            if position < len(self._events):
                chunk, position = b"".join(self._events[position:]), len(self._events)
                yield chunk
            elif self.has_ended:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class ResponseRuns:
    """The runs of one process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._runs: dict[str, ResponseRun] = {}
        self._ended: dict[str, ResponseRun] = {}

    def check_room(self) -> None:
        """Raise QueueFullError if no further run may begin."""
        if len(self._runs) >= RUNS_MAX:
            raise QueueFullError(
                f"{len(self._runs)} responses are computed in the background, which is the limit. Try again later",
                code="queue_full",
                param="background",
            )

    async def begin(
        self,
        answer: BackgroundAnswer,
        lines: AsyncGenerator[bytes, None],
        owner: str,
        parent: str | None,
        items: bytes,
        *,
        has_events: bool,
        on_end: Callable[[], None],
    ) -> ResponseRun:
        """Begin a run: ``answer`` was accepted by an engine. Raise ResponseStoreError, and RequestError if the store is
        full."""
        unfinished = StoredResponse(
            response_id=answer.response_id, parent=parent, body=answer.body_so_far(), items=items
        )
        if not await self._store.begin(unfinished, owner):
            raise RequestError(
                "background needs room in the store of responses, which has none "
                "(limits.response_store_size, limits.max_stored_responses)",
                param="background",
            )
        run = self._runs[answer.response_id] = ResponseRun(answer, lines, owner, unfinished, has_events=has_events)
        run.task = asyncio.create_task(self._run(run, on_end))
        return run

    def get(self, response_id: str, owner: str) -> ResponseRun | None:
        run = self._runs.get(response_id) or self._ended.get(response_id)
        return run if run is not None and run.owner == owner else None

    async def cancel(self, run: ResponseRun) -> None:
        """Cancel a run, and return once the store has the end. A run that has ended is left as it is."""
        if run.task is not None and not run.has_ended:
            run.task.cancel()
            await asyncio.wait((run.task,))

    def forget(self, response_id: str) -> None:
        """Forget the events of a run that has ended."""
        self._ended.pop(response_id, None)

    async def checked(self, stored: StoredResponse, owner: str) -> StoredResponse:
        """Return ``stored``, marked as failed if it is unfinished and the process that computed it is gone."""
        if status_of(stored) not in UNFINISHED or not await self._store.runner_is_gone(stored.response_id, owner):
            return stored
        body = msgspec.json.decode(stored.body)
        body |= {
            "status": "failed",
            "error": {"code": "server_error", "message": "the server that computed this response has ended"},
        }
        failed = _with_body(stored, msgspec.json.encode(body))
        await self._store.finish(lambda: failed, owner)
        return await self._store.get(stored.response_id, owner)

    async def close(self) -> None:
        """End the runs, and store their ends."""
        await end_tasks(*(run.task for run in self._runs.values() if run.task is not None))

    async def _run(self, run: ResponseRun, on_end: Callable[[], None]) -> None:
        response_id = run.unfinished.response_id
        try:
            await run.read()
        except Exception:
            _log.exception("a response in the background failed")
        try:
            if run.answer.status in ("failed", "cancelled"):
                await self._store.finish(lambda: _with_body(run.unfinished, run.answer.body_so_far()), run.owner)
        except WeftError as error:
            _log.warning("a response was not stored: %s", error.message)
        finally:
            on_end()
            run.end()
            del self._runs[response_id]
            self._ended[response_id] = run
            while len(self._ended) > ENDED_MAX or (
                sum(ended.event_bytes for ended in self._ended.values()) > ENDED_BYTES_MAX
            ):
                del self._ended[next(iter(self._ended))]


def _with_body(stored: StoredResponse, body: bytes) -> StoredResponse:
    return StoredResponse(response_id=stored.response_id, parent=stored.parent, body=body, items=stored.items)
