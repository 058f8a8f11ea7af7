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

A batch where nobody asks for more than the best token costs one argmax. A row of logits with NaN in it (a
bug of a model or a kernel) neither raises nor spreads: NaN counts as impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.request import SamplingParams, TokenLogprobs
from weft.runner.edits import RowEdits, apply_edits
from weft.runner.filters import Filters, choose
from weft.runner.guides import GuideRows
from weft.runner.logprobs import token_logprobs
from weft.runner.randomness import seed_word, uniforms
from weft.schedule.plan import CompiledGuide

_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens``: int32 [X]; ``logprobs`` by index in X, for rows that asked; ``failures`` by index in X: why
    a row cannot go on."""

    tokens: npt.NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]


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

    def sample(self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64],
               positions: npt.NDArray[np.int64]) -> Sampled:
        """The next token of each row.

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
        if not bool(best.values.isfinite().all()):
            logits_XV = _finite(logits_XV)
            if masks is not None:
                masks.apply(logits_XV)  # what a grammar refuses is less than what a NaN became
            chosen_X = logits_XV.argmax(dim=1)
        drawn = np.flatnonzero(~self._greedy[rows])
        if drawn.size:
            drawn_X = torch.from_numpy(drawn).to(logits_XV.device)
            rows_drawn = rows[drawn]
            filters = Filters(self._temperature[rows_drawn], self._top_k[rows_drawn],
                              self._top_p[rows_drawn], self._min_p[rows_drawn])
            logits_NV = logits_XV if drawn.size == len(rows) else logits_XV[drawn_X]
            chosen_X[drawn_X] = choose(logits_NV, filters, uniforms(self._seed[rows_drawn], positions[drawn]))
        tokens = chosen_X.to(torch.int32).cpu().numpy()
        for i, _, edit in edits:
            if edit.history is not None:
                edit.history.add(int(tokens[i]))
        failures = self._guides.advance(rows, tokens)
        if raw is None:
            return Sampled(tokens, {}, failures)
        found = token_logprobs(raw, chosen_X[torch.from_numpy(asking).to(chosen_X.device)],
                               self._logprobs[rows[asking]].tolist())
        return Sampled(tokens, dict(zip(asking.tolist(), found, strict=True)), failures)


def _finite(logits_XV: torch.Tensor) -> torch.Tensor:
    """NaN and -inf become the lowest finite value: never chosen unless there is nothing else."""
    limits = torch.finfo(logits_XV.dtype)
    return logits_XV.nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
