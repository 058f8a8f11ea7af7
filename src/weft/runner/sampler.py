"""From logits to tokens, for all rows of a step at once.

    logits_XV --copy of rows that ask--> logprobs
        |
        +-- edits (sparse: min_tokens, bias, penalties) --+-- guides (grammars) --+-- greedy rows:  argmax
                                                                                  +-- other rows:   filters
                                                                                      -> one uniform -> token

Owns, per row of the executor, what a sequence asked for: parameters in numpy columns (one gather per step,
no loop over rows) and, for the rows that need them, their edits. A row is written by ``admit`` and emptied by
``clear``, when the plan says so (L5).

Everything is a function of the row alone: its logits, its parameters, its own tokens, and the pair (seed,
position). No row sees another, so company in the batch changes nothing; there is no generator state, so
preemption changes nothing.

A batch where nobody asks for more than the best token costs one argmax, and one wait for the device: that
which brings the tokens home. A row of logits with NaN in it (a
bug of a model or a kernel) neither raises nor spreads: NaN counts as impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.request import SamplingParams, TokenLogprobs
from weft.runner.edits import RowEdits, apply_edits
from weft.runner.filters import Filters, choose, fill_numbers
from weft.runner.guides import GuideRows
from weft.runner.logprobs import token_logprobs
from weft.runner.randomness import seed_word, uniforms
from weft.runner.staging import Staged, Staging
from weft.schedule.plan import CompiledGuide

_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens``: int32 [X]; ``logprobs`` by index in X, for rows that asked; ``failures`` by index in X: why
    a row cannot go on; ``chosen_X``: the tokens, int64 on the device of the logits."""

    tokens: npt.NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]
    chosen_X: torch.Tensor


class Sampler:
    """Sampling state of ``rows_max`` rows over a vocabulary of ``vocab_size``."""

    def __init__(self, rows_max: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._greedy = np.ones(rows_max, np.bool_)
        self._temperature = np.ones(rows_max, np.float64)
        self._top_k = np.zeros(rows_max, np.int64)
        self._top_p = np.ones(rows_max, np.float64)
        self._min_p = np.zeros(rows_max, np.float64)
        self._seed = np.zeros(rows_max, np.uint64)
        self._logprobs = np.full(rows_max, _NO_LOGPROBS, np.int64)
        self._edits: dict[int, RowEdits] = {}
        self._guides = GuideRows(vocab_size)
        self._staged: tuple[npt.NDArray[np.int64], Staged, Staged] | None = None

    def admit(self, row: int, tokens: npt.NDArray[np.int32], prompt_tokens: int, sampling: SamplingParams,
              seed: int, stop_ids: tuple[int, ...], guide: CompiledGuide | None = None) -> None:
        """A sequence takes ``row``. ``tokens``: its prompt, then what it had generated before a preemption;
        ``stop_ids`` are masked while fewer than ``sampling.min_tokens`` are generated."""
        self._greedy[row] = sampling.greedy
        self._temperature[row] = 1.0 if sampling.greedy else sampling.temperature
        self._top_k[row] = max(sampling.top_k, 0)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = seed_word(seed)
        self._logprobs[row] = _NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        edits = RowEdits(sampling, tokens, prompt_tokens, stop_ids, self.vocab_size)
        if edits.any:
            self._edits[row] = edits
        else:
            self._edits.pop(row, None)
        if guide is not None:
            self._guides.admit(row, guide, tokens[prompt_tokens:])

    def clear(self, row: int) -> None:
        """The row's sequence left: nothing of it stays."""
        self._greedy[row] = True
        self._logprobs[row] = _NO_LOGPROBS
        self._edits.pop(row, None)
        self._guides.clear(row)

    def begin(self, rows: npt.NDArray[np.int64]) -> None:
        """``sample`` will be called for these rows: what does not need their logits may start now."""
        self._guides.begin(rows)

    def close(self) -> None:
        """Idempotent."""
        self._guides.close()

    def stage(self, staging: Staging, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """``sample`` will be called for these: what it draws with goes to the device with the step's other
        inputs."""
        drawn = np.flatnonzero(~self._greedy[rows])
        self._staged = None
        if drawn.size:
            of = rows[drawn]
            numbers, places = staging.take((5, len(drawn)), np.float64), staging.add(drawn)
            fill_numbers(numbers.host, self._temperature[of], self._top_k[of], self._top_p[of],
                         self._min_p[of], uniforms(self._seed[of], positions[drawn]))
            self._staged = of, numbers, places

    def _drawn_with(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64],
                    device: torch.device) -> tuple[npt.NDArray[np.int64], Staged, Staged]:
        if self._staged is None:
            staging = Staging(device)
            staging.begin()
            self.stage(staging, rows, positions)
            staging.send()
        assert self._staged is not None
        staged, self._staged = self._staged, None
        return staged

    def sample(self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64],
               positions: npt.NDArray[np.int64]) -> Sampled:
        """The next token of each row. What drawn rows are drawn with is taken as ``stage`` sent it, once;
        without that it is brought now.

        ``logits_XV``: float32, changed in place by the edits; ``rows``: the row of each; ``positions``: the
        index in its sequence of the token about to be chosen.
        """
        asking = np.flatnonzero(self._logprobs[rows] >= 0)
        raw = logits_XV[torch.from_numpy(asking).to(logits_XV.device)] if asking.size else None
        edits = [(i, int(positions[i]), self._edits[row]) for i, row in enumerate(rows.tolist())
                 if row in self._edits] if self._edits else []
        if edits:
            apply_edits(logits_XV, edits)
        masks = self._guides.apply(logits_XV, rows)
        best = logits_XV.max(dim=1)
        chosen_X = best.indices
        home, finite = _home(best.values, chosen_X)
        if not finite.all():
            logits_XV = _finite(logits_XV)
            if masks is not None:
                masks.apply(logits_XV)  # what a grammar refuses is less than what a NaN became
            chosen_X = logits_XV.argmax(dim=1)
            home = chosen_X.cpu().numpy()
        drawn = np.flatnonzero(~self._greedy[rows])
        if drawn.size:
            of, numbers, places = self._drawn_with(rows, positions, logits_XV.device)
            filters = Filters(self._top_k[of], self._top_p[of], numbers.device)
            if drawn.size == len(rows):
                chosen_X = choose(logits_XV, filters)
            else:
                chosen_X[places.device] = choose(logits_XV[places.device], filters)
            home = chosen_X.cpu().numpy()
        tokens = home.astype(np.int32)
        for i, _, edit in edits:
            if edit.history is not None:
                edit.history.add(int(tokens[i]))
        failures = self._guides.advance(rows, tokens)
        if raw is None:
            return Sampled(tokens, {}, failures, chosen_X)
        found = token_logprobs(raw, chosen_X[torch.from_numpy(asking).to(chosen_X.device)],
                               self._logprobs[rows[asking]].tolist())
        return Sampled(tokens, dict(zip(asking.tolist(), found, strict=True)), failures, chosen_X)


def _home(values_X: torch.Tensor, chosen_X: torch.Tensor) -> tuple[npt.NDArray[np.int64],
                                                                   npt.NDArray[np.bool_]]:
    """The best token of each row, and whether its logit is finite, on the host: one copy and one wait."""
    if values_X.device.type == "cpu":
        return chosen_X.numpy(), np.isfinite(values_X.numpy())
    both_2X = torch.stack((chosen_X, values_X.isfinite().long())).cpu().numpy()
    return both_2X[0], both_2X[1].astype(np.bool_)


def _finite(logits_XV: torch.Tensor) -> torch.Tensor:
    """NaN and -inf become the lowest finite value: never chosen unless there is nothing else."""
    limits = torch.finfo(logits_XV.dtype)
    return logits_XV.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
