"""A thread that launches steps, so that the host plans and settles while one is computed.

    engine's thread   begin(k+1)  finish(k) ...                begin(k+2)  finish(k+1)
                          |           ^                            |
    this thread       launch k+1 .    |                        launch k+2 .
    a GPU             [ step k       ][ step k+1                      ][ step k+2

This thread enqueues everything that a step needs, and on a GPU this ends long before the step does.
``finish`` waits on the caller's thread. On a CPU launching is computing; kernels and torch release the
interpreter lock.

Rejected: a thread for each step (their order would need locks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from weft.schedule.plan import StepPlan, StepResult


class Launched(Protocol):
    """A step that is asked for."""

    def home(self) -> StepResult:
        """Wait for it."""
        ...


class StepWorker:
    """``launch(plan)`` is called on the thread, ``prepare()`` once before. The thread starts with the first
    step, or call."""

    def __init__(self, launch: Callable[[StepPlan], Launched], prepare: Callable[[], None]) -> None:
        self._launch = launch
        self._prepare = prepare
        self._thread: ThreadPoolExecutor | None = None
        self._flights: deque[Future[Launched]] = deque()
        self._failed = False

    @property
    def in_flight(self) -> int:
        """Steps that were begun and not finished."""
        return len(self._flights)

    def begin(self, plan: StepPlan) -> None:
        self._flights.append(self._started().submit(self._run, plan))

    def finish(self) -> StepResult:
        """Of the oldest step; raises what it raised."""
        try:
            return self._flights.popleft().result().home()
        except BaseException:
            self._failed = True
            raise

    def call(self, function: Callable[[], None]) -> None:
        """On the thread; waits for it. Nothing is in flight."""
        assert not self._flights, "a step is in flight"
        self._started().submit(function).result()

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=self._prepare)
        return self._thread

    def rest(self) -> None:
        """Let the thread end, with the step buffers that are its own; the next step starts another. Nothing
        is in flight."""
        assert not self._flights, "a step is in flight"
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def close(self) -> None:
        """Wait for what is launched now. Idempotent."""
        self._failed = True
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._flights.clear()

    def _run(self, plan: StepPlan) -> Launched:
        # Rows and memory are half way into the failed step.
        if self._failed:
            raise RuntimeError(f"step {plan.step} was not computed: the one before it failed")
        try:
            return self._launch(plan)
        except BaseException:
            self._failed = True
            raise
