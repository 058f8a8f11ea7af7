"""Requests and questions that wait for an adapter, beside the steps that go on meanwhile.

    Submit with an adapter      in memory        -> the engine has it at once
                                not in memory    -> waits here; a thread reads the files
                                read, no room    -> waits on, until a running adapter ends
    LoadAdapter                 the same, and its reply says whether the files can be served

One thread reads, so a burst of new adapters takes one core at most. A request waits before it is accepted: a
bad adapter is an error of that request and never a sequence that fails. ``ready`` hands out a request only
when its adapter is in memory, and the engine accepts it before anything can evict it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from weft.adapters import Adapter
from weft.engine.adapters import AdapterPool, ReadAdapter
from weft.errors import QueueFullError, WeftError
from weft.request import Request


@dataclass(slots=True)
class _Reading:
    adapter: Adapter
    read: Future[ReadAdapter]
    requests: list[Request] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of the questions that wait for it."""


class AdapterQueue:
    """``limit``: most requests that may wait here."""

    def __init__(self, pool: AdapterPool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._readings: dict[str, _Reading] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return bool(self._readings)

    def take(self, request: Request) -> bool:
        """Whether ``request`` has to wait here; if not, the engine can have it. Raises QueueFullError."""
        if request.adapter is None or self._pool.find(request.adapter):
            return False
        waiting = sum(len(reading.requests) for reading in self._readings.values())
        if waiting >= self._limit:
            raise QueueFullError(f"{waiting} requests wait for their adapters to be loaded; the limit is "
                                 f"{self._limit} (limits.max_queued_requests). Try again later",
                                 param="limits.max_queued_requests", code="queue_full")
        self._begun(request.adapter).requests.append(request)
        return True

    def ask(self, number: int, adapter: Adapter) -> None:
        """The question ``number``: can it be served?"""
        self._begun(adapter).numbers.append(number)

    def answers(self) -> Iterator[tuple[list[int], list[Request], WeftError | None]]:
        """Questions and requests whose adapter is in memory now, or cannot be, with what was wrong. Submit
        the requests before the next is asked for: their adapter may be evicted after that."""
        for digest, reading in list(self._readings.items()):
            if not reading.read.done():
                continue
            try:
                if not self._pool.keep(reading.read.result()):
                    continue   # running adapters leave no room yet
            except WeftError as error:
                del self._readings[digest]
                yield reading.numbers, reading.requests, error
            else:
                del self._readings[digest]
                yield reading.numbers, reading.requests, None

    def cancel(self, request_id: str) -> None:
        """The request is gone. Unknown ids are ignored."""
        for digest, reading in list(self._readings.items()):
            reading.requests = [one for one in reading.requests if one.request_id != request_id]
            if not reading.requests and not reading.numbers:
                reading.read.cancel()
                del self._readings[digest]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begun(self, adapter: Adapter) -> _Reading:
        reading = self._readings.get(adapter.digest)
        if reading is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
            reading = self._readings[adapter.digest] = _Reading(
                adapter, self._thread.submit(self._pool.read, adapter))
        return reading
