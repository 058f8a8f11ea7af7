"""Steps in flight: the thread that launches them, and each step until its tokens have arrived.

    engine's thread   begin(k+1)  finish(k) ...                begin(k+2)  finish(k+1)
                          |           ^                            |
    StepWorker         launch k+1 .   |                        launch k+2 .
    a GPU             [ step k       ][ step k+1                      ][ step k+2

    LaunchedStep      chosen on the device --copy--> PendingReadback --to host--> StepResult
                                                                      '-- then: launches that need the tokens

The worker's thread enqueues all work of a step, and on a GPU this ends long before the step does. ``finish`` waits on
the caller's thread. On a CPU launching is computing; kernels and torch release the interpreter lock. Two threads may
wait for a step: one needs its result, the other launches the next step, which may have penalties or a grammar.

A step that decides the next one (``StepPlan.decides_next``) is launched on the caller's thread: no step hides the
hand-over to another thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.request import TokenLogprobs
from weft.runner.readback import PendingReadback
from weft.runner.sampler import PIECES, Sampled, TokenChoice, token_logprobs
from weft.schedule.plan import StepPlan, StepResult
from weft.units import PAD


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of a prompt: ``count`` pieces in the pending readback, for run ``run``, with ``top_count`` further
    tokens for each.
    """

    run: int
    top_count: int
    count: int


class LaunchedStep:
    """Step of ``run_count`` runs, launched at ``began_s`` (``time.perf_counter``). ``choice``: tokens of the runs
    ``sample_runs``. The pending readback has the pieces of ``choice``, then those of ``prompts``, then a piece for
    each of ``pooled_runs``. ``then``: the rest of a step, which needs the tokens: it is called once with the result so
    far, and with the tokens of ``choice`` if there are no ``sample_runs``. The next step is launched after it.
    """

    def __init__(
        self,
        began_s: float,
        run_count: int,
        pending: PendingReadback,
        choice: TokenChoice | None = None,
        sample_runs: npt.NDArray[np.int64] | None = None,
        prompts: tuple[ScoredPrompt, ...] = (),
        pooled_runs: tuple[int, ...] = (),
        then: Callable[[StepResult, Sampled | None], StepResult] | None = None,
    ) -> None:
        self.continues = then is not None
        """Whether ``result`` launches the rest of the step."""
        self._then = then
        self._began_s = began_s
        self._run_count = run_count
        self._pending = pending
        self._choice = choice
        self._sample_runs = sample_runs
        self._prompts = prompts
        self._pooled_runs = pooled_runs
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    @property
    def arrived(self) -> bool:
        """Whether ``result`` would not wait."""
        return self._pending.arrived

    def result(self) -> StepResult:
        """Wait for the device, launch the rest, and return the result. May be called by any thread, and repeatedly."""
        with self._lock:
            if self._result is None:
                result, sampled = self._open()
                self._result = result if self._then is None else self._then(result, sampled)
                self._choice = self._then = None  # tensors of the device are released as early as possible
            return self._result

    def _open(self) -> tuple[StepResult, Sampled | None]:
        pieces = self._pending.open()
        tokens: npt.NDArray[np.int32] | None = None
        logprobs: dict[int, TokenLogprobs] = {}
        failures: dict[int, str] = {}
        offset, sampled = 0, None
        if self._choice is not None:
            offset = self._choice.piece_count
            sampled = self._choice.result(pieces[:offset])
        if sampled is not None and self._sample_runs is not None:
            if len(sampled.tokens) == self._run_count:
                tokens = sampled.tokens
            else:
                tokens = np.full(self._run_count, PAD, np.int32)
                tokens[self._sample_runs] = sampled.tokens
            logprobs = {int(self._sample_runs[i]): entry for i, entry in sampled.logprobs.items()}
            failures = {int(self._sample_runs[i]): why for i, why in sampled.failures.items()}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for prompt in self._prompts:
            entries = prompts.setdefault(prompt.run, [])
            for _ in range(prompt.count):
                part = pieces[offset : offset + PIECES]
                entries += token_logprobs(part, [prompt.top_count] * len(part[0]))
                offset += PIECES
        pooled = dict(zip(self._pooled_runs, pieces[offset:], strict=True))
        if tokens is None:
            tokens = np.full(self._run_count, PAD, np.int32)
        seconds = time.perf_counter() - self._began_s
        return StepResult(tokens, logprobs, prompts, seconds, failures, pooled=pooled), sampled


class Launched(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the result and return it."""


class StepWorker:
    """Thread that launches steps. ``launch(plan)`` is called on the thread, ``prepare()`` once before. The thread
    starts with the first step, or call.
    """

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
        """Launch ``plan`` on the thread, or on the caller's if it decides the next step."""
        if not plan.decides_next:
            self._flights.append(self._started().submit(self._run, plan))
            return
        assert not self._flights, "a step is in flight"
        launched: Future[Launched] = Future()
        launched.set_result(self._run(plan))
        self._flights.append(launched)

    def finish(self) -> StepResult:
        """Return the result of the oldest step; raises its error."""
        try:
            return self._flights.popleft().result().result()
        except BaseException:
            self._failed = True
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` on the thread and wait for it. Nothing may be in flight."""
        assert not self._flights, "a step is in flight"
        self._started().submit(function).result()

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps", initializer=self._prepare)
        return self._thread

    def rest(self) -> None:
        """Let the thread end, with its step buffers; the next step starts another. Nothing may be in flight."""
        assert not self._flights, "a step is in flight"
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def close(self) -> None:
        """Wait for the step that is being launched, and stop. Idempotent."""
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
