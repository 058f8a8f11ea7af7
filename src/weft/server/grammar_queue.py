"""Requests whose grammar is being compiled, beside the steps that go on meanwhile.

    Submit --take--> no grammar, or a known one      -> the engine, at once
                     a new one  --thread--> compiled -> ready() -> the engine
                                        '-> refused  -> ready() -> the client, with the compiler's words

A request waits here before it is accepted, so a bad grammar is an error and never a sequence that fails, and
the scheduler knows nothing of it. One thread compiles, one grammar at a time, in the order they came. What
waits is bounded as the queue is (law L11).

Only ``build`` runs in the thread; the compiler's cache is touched by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from weft.engine.grammars import CompiledGrammar, GrammarCompiler
from weft.errors import QueueFullError, WeftError
from weft.request import Request


class GrammarQueue:
    """``limit``: most requests that may wait here."""

    def __init__(self, grammars: GrammarCompiler, limit: int) -> None:
        self._grammars = grammars
        self._limit = limit
        self._waiting: dict[str, tuple[Request, Future[CompiledGrammar]]] = {}
        self._thread: ThreadPoolExecutor | None = None

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
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-grammars")
        self._waiting[request.request_id] = request, self._thread.submit(self._grammars.build, grammar)
        return True

    def ready(self) -> Iterator[tuple[Request, WeftError | None]]:
        """Requests whose grammar is compiled, in the order they came, with what was wrong with it. Each is to
        be submitted before the next is taken: by then the compiler may have forgotten its grammar."""
        for request_id, (request, compiled) in list(self._waiting.items()):
            if not compiled.done():
                continue
            del self._waiting[request_id]
            try:
                assert request.sampling.grammar is not None
                self._grammars.keep(request.sampling.grammar, compiled.result())
            except WeftError as error:
                yield request, error
            else:
                yield request, None

    def cancel(self, request_id: str) -> None:
        """Nobody waits for it any more. Unknown ids are ignored."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            found[1].cancel()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
