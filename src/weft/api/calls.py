"""The calls of a program that an engine is answering, and the steps of the engine.

    Call --submit--> EngineCore --TokenEvent--> Choice --Piece--> call.pieces
                        ^
                        '-- step(), by the caller that waits for an answer

Each step serves every call, so a half-read stream gains pieces while another prompt is generated. A call that is
dropped is cancelled. Python may close a stream from inside a step, so a drop only notes the call, and the step cancels
it at its end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from weft.api.completion import Completion
from weft.engine.engine import EngineCore
from weft.errors import BusyError, WeftError
from weft.request import Request, SamplingParams, TokenEvent
from weft.text.choices import Choice, Piece, Stops, TextDecoder

if TYPE_CHECKING:
    from rich.progress import Progress


class Call:
    """One request that is being answered. ``decoder`` makes text of the tokens. ``stops_of``: returns the stop
    strings of an answer, as ``Choice`` takes them. ``choices``: empty until the engine has accepted the request."""

    def __init__(
        self, request: Request, decoder: TextDecoder, stops_of: Callable[[SamplingParams], Stops | None] | None = None
    ) -> None:
        self.request = request
        self.decoder = decoder
        self.stops_of = stops_of
        self.choices: list[Choice] = []
        self.pieces: deque[Piece] = deque()
        self.error: WeftError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.finished for choice in self.choices)


class CallTable:
    """The calls in progress on ``core``. The thread that uses the engine holds ``turn``."""

    def __init__(self, core: EngineCore) -> None:
        self.turn = Turn()
        self._core = core
        self._calls: dict[str, Call] = {}
        self._dropped: deque[Call] = deque()

    def complete(self, calls: Sequence[Call], *, progress: bool) -> list[Completion]:
        """Return all answers, in the order of ``calls``. Raise the error of the first call that fails."""
        groups = [
            [
                Completion(prompt_index=number, index=index, prompt_tokens=call.request.prompt_tokens)
                for index in range(call.request.sampling.n)
            ]
            for number, call in enumerate(calls)
        ]
        waiting = deque(enumerate(calls))
        running: dict[int, Call] = {}
        bar = AnswerBar(len(calls) if progress else 0)
        try:
            while waiting or running:
                while waiting and self._has_room(waiting[0][1].request.sampling.n):
                    number, call = waiting.popleft()
                    self._submit(call)
                    running[number] = call
                self.step()
                for number, call in list(running.items()):
                    while call.pieces:
                        piece = call.pieces.popleft()
                        groups[number][piece.index].add(piece, call.choices[piece.index])
                    if call.error is not None:
                        raise call.error
                    if call.done:
                        del running[number]
                if bar.due:
                    generated = self._core.stats().generation_tokens
                    bar.show(len(calls) - len(waiting) - len(running), generated)
        finally:
            bar.close()
            self._drop(running.values())
        return [completion for group in groups for completion in group]

    def stream(self, call: Call) -> Iterator[Piece]:
        """Yield pieces as they come. Leaving the loop early cancels the call."""
        self._submit(call)
        try:
            while call.pieces or not call.done:
                if not call.pieces:
                    self.step()
                while call.pieces:
                    yield call.pieces.popleft()
            if call.error is not None:
                raise call.error
        finally:
            self._drop([call])

    def step(self) -> None:
        with self.turn.take():
            for event in self._core.step():
                self._take(event)
            self._cancel_dropped()

    def forget(self) -> None:
        """Drop all calls, as the engine is being closed. The caller must hold the turn."""
        self._calls.clear()

    def _has_room(self, sequences: int) -> bool:
        """Return whether the queue takes ``sequences`` more sequences. An idle engine is always tried, so that a
        request that can never fit raises."""
        return not self._calls or self._core.stats().waiting + sequences <= self._core.sizes.queue_max

    def _submit(self, call: Call) -> None:
        with self.turn.take():
            request = call.request
            self._core.submit(request)
            stops_of = call.stops_of or (lambda sampling: None)
            call.choices = [
                Choice(index, call.decoder, request.sampling, request.prompt_tokens, stops_of(request.sampling))
                for index in range(request.sampling.n)
            ]
            self._calls[request.request_id] = call

    def _take(self, event: TokenEvent) -> None:
        call = self._calls.get(event.request_id)
        if call is None:  # dropped: only events of the cancellation still come
            return
        choice = call.choices[event.index]
        ended_before = choice.finished
        try:
            piece = choice.take(event)
        except WeftError as error:
            error.__cause__ = self._core.failure
            call.error = error
            piece = None
        if piece is not None:
            call.pieces.append(piece)
        if choice.finished and not ended_before and event.finish_reason is None:
            self._core.cancel(event.request_id, event.index)
        if call.done:
            del self._calls[event.request_id]

    def _drop(self, calls: Iterable[Call]) -> None:
        """Cancel ``calls``. After the last one, the engine frees its memory."""
        self._dropped.extend(calls)
        if self.turn.mine or (self.turn.busy and not self._dropped):
            return  # the running step cancels them at its end
        with self.turn.take(wait=True):
            self._cancel_dropped()
            while not self._calls and self._core.has_work:
                self._core.step()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft().request.request_id
            if self._calls.pop(request_id, None) is not None:
                self._core.cancel(request_id)


_BAR_AFTER_S = 1.0


class AnswerBar:
    """A bar on stderr that appears when the work takes long, and only on a terminal. ``total``: answers; 0: no bar."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._due_s = time.monotonic() + _BAR_AFTER_S
        self._rich: Progress | None = None
        self._tokens_before = 0

    @property
    def due(self) -> bool:
        return bool(self._total) and (self._rich is not None or time.monotonic() >= self._due_s)

    def show(self, done: int, generated_tokens: int) -> None:
        """Show ``done`` answers, and the tokens that the engine has generated since its start."""
        if self._rich is None:
            self._rich = _rich_progress()
            self._task = self._rich.add_task("", total=self._total)
            self._shown_at_s, self._tokens_before = time.monotonic(), generated_tokens
            self._rich.start()
        seconds = max(time.monotonic() - self._shown_at_s, 1e-3)
        rate = (generated_tokens - self._tokens_before) / seconds
        self._rich.update(self._task, completed=done, description=f"{rate:,.0f} tokens/s")

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()


def _rich_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Turn:
    """A lock on the engine, for one thread at a time, not re-entrant. ``take`` surrounds everything that changes the
    engine. The garbage collector may close a half-read stream inside a step: ``mine`` is then true, and the
    cancellation waits for the end of the step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread already holds the turn."""
        return self._owner == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether any thread holds the turn now."""
        return self._lock.locked()

    @contextlib.contextmanager
    def take(self, *, wait: bool = False) -> Iterator[None]:
        """Take the turn for the block. Raise BusyError if another thread has it, unless ``wait``."""
        assert not self.mine, "a step inside a step"
        if not self._lock.acquire(blocking=wait):
            raise BusyError(
                "another thread is using this engine, which serves one at a time: put a lock "
                "around the calls, or let the threads talk to a server (`weft serve`)"
            )
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
