"""Steps on a thread of their own, so that the host plans and settles while one is computed.

    engine's thread   begin(k+1)  finish(k) ...                begin(k+2)  finish(k+1)
                          |           ^                            |
    this thread       [ step k       ][ step k+1                      ][ step k+2

The kernels and torch let go of the interpreter while they compute, so the engine's thread runs beside them.
One thread and one queue: steps are computed in the order in which they were begun, and what one writes is
there for the next one, on any device (all of them use one stream). After a step that failed nothing is
computed: rows and memory are half way into it.

Rejected: a thread for each step (their order would have to be made again with locks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weft.schedule.plan import StepPlan, StepResult


class StepWorker:
    """``compute(plan)`` is called on the thread, ``prepare()`` once before. The thread starts with the first
    step."""

    def __init__(self, compute: Callable[[StepPlan], StepResult], prepare: Callable[[], None]) -> None:
        self._compute = compute
        self._prepare = prepare
        self._thread: ThreadPoolExecutor | None = None
        self._flights: deque[Future[StepResult]] = deque()
        self._failed = False

    @property
    def in_flight(self) -> int:
        """Steps that were begun and not finished."""
        return len(self._flights)

    def begin(self, plan: StepPlan) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=self._prepare)
        self._flights.append(self._thread.submit(self._run, plan))

    def finish(self) -> StepResult:
        """Of the oldest step; raises what it raised."""
        return self._flights.popleft().result()

    def rest(self) -> None:
        """Let the thread end, with the step buffers that are its own; the next step starts another. Nothing
        is in flight."""
        assert not self._flights, "a step is in flight"
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def close(self) -> None:
        """Wait for what is computed now. Idempotent."""
        self._failed = True
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._flights.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failed:
            raise RuntimeError(f"step {plan.step} was not computed: the one before it failed")
        try:
            return self._compute(plan)
        except BaseException:
            self._failed = True
            raise
