"""Requests that wait for their grammar, beside the steps that go on meanwhile.

    Submit --take--> no grammar, or a known one       -> the engine, at once
                     a new one  --threads--> compiled -> ready() -> the engine
                                         '-> refused  -> ready() -> the client, with the compiler's words

A request waits here before it is accepted. So a bad grammar is an error and never a sequence that fails, and
the scheduler does not know grammars. Several threads compile, so a slow grammar holds up no other; requests
with the same grammar share one compilation. What waits is bounded as the queue is (law L11).

Only ``build`` runs in the threads; the compiler's cache belongs to the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from weft.engine.grammars import GrammarCompiler, TokenGrammar
from weft.errors import QueueFullError, WeftError
from weft.request import Grammar, Request
from weft.text.grammar_worker import JOBS_MAX


class GrammarQueue:
    """``limit``: most requests that may wait here."""

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
        """Whether ``request`` has to wait here; if not, the engine can have it. Raises QueueFullError."""
        grammar = request.sampling.grammar
        if grammar is None or self._grammars.find(grammar) is not None:
            return False
        if len(self._waiting) >= self._limit:
            raise QueueFullError(f"{len(self._waiting)} requests wait for their grammars to be compiled; the "
                                 f"limit is {self._limit} (--max-queued-requests). Try again later",
                                 param="--max-queued-requests", code="queue_full")
        if grammar not in self._compiling:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(JOBS_MAX, thread_name_prefix="grammars")
            self._compiling[grammar] = self._threads.submit(self._grammars.build, grammar)
        self._waiting[request.request_id] = request, grammar
        return True

    def ready(self) -> Iterator[tuple[Request, WeftError | None]]:
        """Requests whose grammar is compiled, in order of arrival, with what was wrong with it. Submit each
        before the next is asked for: the compiler may forget its grammar after that."""
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
        """The request is gone. Unknown ids are ignored."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._forget(entry[1])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, grammar: Grammar) -> None:
        """Drops a compilation that no request waits for."""
        if all(waited != grammar for _, waited in self._waiting.values()):
            self._compiling.pop(grammar).cancel()
