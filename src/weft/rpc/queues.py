"""Queues of requests that wait for an adapter or a grammar, checked between two steps of the engine.

    AdapterQueue    a request whose adapter a thread reads
    GrammarQueue    a request whose grammar threads compile

Steps go on meanwhile. A request waits before it is accepted, so a bad adapter or grammar is an error of the request,
never a failed sequence. A queue hands out a request only when the adapter or grammar is ready, and the engine accepts
it before anything can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from weft.adapters import Adapter
from weft.engine.adapters import AdapterPool, ReadAdapter
from weft.engine.grammars import GrammarCompiler, TokenGrammar
from weft.errors import QueueFullError, WeftError
from weft.request import Grammar, Request
from weft.text.grammar_worker import JOBS_MAX


@dataclass(slots=True)
class _AdapterRead:
    adapter: Adapter
    read: Future[ReadAdapter]
    requests: list[Request] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Numbers of questions that wait for this adapter."""


class AdapterQueue:
    """Requests and questions that wait for an adapter. ``limit``: most requests that may wait here.

        Submit with an adapter      in memory        -> the engine has it at once
                                    not in memory    -> waits here; a thread reads the files
                                    read, no room    -> waits until a running adapter ends
        LoadAdapter                 the same; the reply says whether the files can be served

    One thread reads, so a burst of new adapters takes at most one core."""

    def __init__(self, pool: AdapterPool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._readings: dict[str, _AdapterRead] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return bool(self._readings)

    def take(self, request: Request) -> bool:
        """Return whether ``request`` has to wait here; if not, the engine can have it. Raises QueueFullError."""
        if request.adapter is None or self._pool.find(request.adapter):
            return False
        waiting = sum(len(reading.requests) for reading in self._readings.values())
        if waiting >= self._limit:
            raise QueueFullError(
                f"{waiting} requests wait for their adapters to be loaded; the limit is "
                f"{self._limit} (limits.max_queued_requests). Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )
        self._begun(request.adapter).requests.append(request)
        return True

    def ask(self, number: int, adapter: Adapter) -> None:
        """Queue the question ``number``: whether the adapter can be served."""
        self._begun(adapter).numbers.append(number)

    def answers(self) -> Iterator[tuple[list[int], list[Request], WeftError | None]]:
        """Yield questions and requests whose adapter is now in memory, or whose load failed, with the error. Submit the
        requests before asking for the next item: their adapter may be evicted after that."""
        for digest, reading in list(self._readings.items()):
            if not reading.read.done():
                continue
            try:
                if not self._pool.keep(reading.read.result()):
                    continue  # the adapters of running requests leave no room yet
            except WeftError as error:
                del self._readings[digest]
                yield reading.numbers, reading.requests, error
            else:
                del self._readings[digest]
                yield reading.numbers, reading.requests, None

    def cancel(self, request_id: str) -> None:
        """Drop a request that is gone. Unknown ids are ignored."""
        for digest, reading in list(self._readings.items()):
            reading.requests = [request for request in reading.requests if request.request_id != request_id]
            if not reading.requests and not reading.numbers:
                reading.read.cancel()
                del self._readings[digest]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begun(self, adapter: Adapter) -> _AdapterRead:
        reading = self._readings.get(adapter.digest)
        if reading is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
            reading = self._readings[adapter.digest] = _AdapterRead(
                adapter, self._thread.submit(self._pool.read, adapter)
            )
        return reading


class GrammarQueue:
    """Requests that wait for their grammar. Those with the same grammar share one compilation; only ``build``
    runs in threads. ``limit``: most requests that may wait here."""

    def __init__(self, grammars: GrammarCompiler, limit: int) -> None:
        self._grammars = grammars
        self._limit = limit
        self._waiting: dict[str, tuple[Request, Grammar]] = {}
        self._compiling: dict[Grammar, Future[TokenGrammar]] = {}
        self._threads: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def take(self, request: Request) -> bool:
        """Return whether ``request`` has to wait here; if not, the engine can have it. Raises QueueFullError."""
        grammar = request.sampling.grammar
        if grammar is None or self._grammars.find(grammar) is not None:
            return False
        if len(self._waiting) >= self._limit:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait for their grammars to be compiled; the "
                f"limit is {self._limit} (limits.max_queued_requests). Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )
        if grammar not in self._compiling:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(JOBS_MAX, thread_name_prefix="grammars")
            self._compiling[grammar] = self._threads.submit(self._grammars.build, grammar)
        self._waiting[request.request_id] = request, grammar
        return True

    def ready(self) -> Iterator[tuple[Request, WeftError | None]]:
        """Yield requests whose grammar is compiled, in order of arrival, with its error if any. Submit each request
        before asking for the next: the compiler may drop its grammar after that."""
        for request_id, (request, grammar) in list(self._waiting.items()):
            compiled = self._compiling[grammar]
            if not compiled.done():
                continue
            del self._waiting[request_id]
            self._forget(grammar)
            try:
                self._grammars.keep(grammar, compiled.result())
            except WeftError as error:
                yield request, error
            else:
                yield request, None

    def cancel(self, request_id: str) -> None:
        """Drop a request that is gone. Unknown ids are ignored."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._forget(entry[1])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, grammar: Grammar) -> None:
        """Drop a compilation that no request waits for."""
        if all(waited != grammar for _, waited in self._waiting.values()):
            self._compiling.pop(grammar).cancel()
