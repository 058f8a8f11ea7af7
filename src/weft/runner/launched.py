"""A step that was launched, until its tokens have arrived.

    launch k    ... chosen on the device --copy--> PendingReadback      LaunchedStep: what to make of it
    launch k+1  (fed from the device)    ^
    home k      -------------------------'   StepResult; histories and grammars know the tokens of k

Two threads may wait for it: one needs the step's result, the other launches the next step, which may have
penalties or a grammar. The first reads the result back, the second gets the same.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.request import TokenLogprobs
from weft.runner.readback import PendingReadback, Readback
from weft.runner.sampler import PIECES, TokenChoice, token_logprobs
from weft.schedule.plan import StepResult
from weft.units import PAD


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of ``count`` pieces of a prompt are in the pending, for run ``run``, ``top_count`` beside
    each."""

    run: int
    top_count: int
    count: int


class LaunchedStep:
    """Of ``run_count`` runs, launched at ``began_s`` (``time.perf_counter``). ``choice``: of the runs
    ``sample_runs``, its pieces first in the pending, those of ``prompts`` behind them."""

    def __init__(self, began_s: float, run_count: int, pending: PendingReadback,
                 choice: TokenChoice | None = None,
                 sample_runs: npt.NDArray[np.int64] | None = None,
                 prompts: tuple[ScoredPrompt, ...] = ()) -> None:
        self._began_s = began_s
        self._run_count = run_count
        self._pending = pending
        self._choice = choice
        self._sample_runs = sample_runs
        self._prompts = prompts
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    @classmethod
    def arrived_with(cls, result: StepResult) -> LaunchedStep:
        """A step whose ``result`` is on the host already."""
        step = cls(time.perf_counter(), len(result.tokens), Readback.arrived_now([]))
        step._result = result
        return step

    @property
    def arrived(self) -> bool:
        """Whether ``home`` would not wait."""
        return self._pending.arrived

    def home(self) -> StepResult:
        """Waits for the device. May be called by any thread, and again."""
        with self._lock:
            if self._result is None:
                self._result = self._open()
                self._choice = None   # tensors of the device are held no longer than that
            return self._result

    def _open(self) -> StepResult:
        pieces = self._pending.open()
        tokens: npt.NDArray[np.int32] | None = None
        logprobs: dict[int, TokenLogprobs] = {}
        failures: dict[int, str] = {}
        offset = 0
        if self._choice is not None and self._sample_runs is not None:
            offset = self._choice.piece_count
            sampled = self._choice.result(pieces[:offset])
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
        if tokens is None:
            tokens = np.full(self._run_count, PAD, np.int32)
        return StepResult(tokens, logprobs, prompts, time.perf_counter() - self._began_s, failures)
