"""Sampling of tokens from logits, for all rows of a step at once.

    logits_XV --copy of rows that ask--> logprobs
        |
        +-- edits (sparse: min_tokens, bias, penalties) --+-- grammars (grammars) --+-- greedy rows:  argmax
                                                                                  +-- other rows:   filters
                                                                                      -> one uniform -> token

Owns, per row of the executor, the settings of a sequence: parameters in numpy columns (one gather per step, no loop
over rows) and, for the rows that need them, their edits. A row is written by ``admit`` and emptied by ``clear``, when
the plan says so (L5).

A token is a function of only its row: logits, parameters, the row's own tokens, and the pair (seed, position). Log
probabilities are softmax of the raw logits: temperature, penalties, bias and filters do not change them.

A step goes through in three parts, so that the host never waits for a device in the middle of one:

    stage      random numbers and the rows that ask for logprobs go over with the step's other inputs
    launch     logits -> tokens, launched and not yet read: a ``TokenChoice``
    result     of a ``TokenChoice``: histories and grammars learn the tokens, logprobs are put together

Penalties and grammars need the tokens of the step before (``needs_previous_token``). That step is read back
before ``launch``, and its effects follow in a second small copy.

A row of logits with NaN in it (a bug of a model or a kernel) neither raises nor spreads: NaN counts as impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from weft.request import SamplingParams, TokenLogprobs
from weft.runner.edits import BannedSequences, RowEdits, TokenHistory, stage_edits
from weft.runner.filters import Filters, choose, fill_numbers, seed_word, uniforms
from weft.runner.grammars import Constrained, GrammarRows, Masks
from weft.runner.readback import PendingReadback, Readback, step_words
from weft.runner.staging import Staged, Staging
from weft.schedule.plan import CompiledGrammar
from weft.tensor import gpu, native
from weft.tensor.device import is_remote
from weft.tensor.ops.elementwise import each, softmax_

PIECES = 5
"""Number of tensors that one call of ``score`` returns."""


def score(logits_NV: torch.Tensor, tokens_N: torch.Tensor, top_count: int) -> list[torch.Tensor]:
    """Return ``tokens_N`` (int64 [N]), their logprobs and ranks, and each row's best ``top_count`` tokens with their
    logprobs, best first: five tensors. The host reads none of them.

    ``logits_NV``: float32, changed: a NaN becomes -inf, as it counts as impossible.
    """
    # NaN counts as impossible; a sum over it would make the whole row NaN.
    logits_NV.masked_fill_(logits_NV.isnan(), -torch.inf)
    normaliser_N1 = _normaliser(logits_NV)
    chosen_N1 = logits_NV.gather(1, tokens_N[:, None])
    rank_N = (logits_NV > chosen_N1).sum(dim=1)
    values_NW, ids_NW = logits_NV.topk(min(top_count, logits_NV.shape[1]), dim=1)
    return [tokens_N, (chosen_N1 - normaliser_N1)[:, 0], rank_N, ids_NW, values_NW - normaliser_N1]


def _normaliser(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of powers of e of each row: [N, 1].

    On a CPU its bits depend on no other row, so a decoded token is scored as the same token of a prompt. Torch adds
    the numbers of a single row in another order than those of several rows.
    """
    if not logits_NV.is_cpu or not logits_NV.numel():
        return logits_NV.logsumexp(dim=1, keepdim=True)
    width = min(logits_NV.shape[1], native.SOFTMAX_COLUMNS_MAX)
    parts_NPW = F.pad(logits_NV, (0, -logits_NV.shape[1] % width), value=-torch.inf).view(len(logits_NV), -1, width)
    most_NP = parts_NPW.amax(-1)
    # The largest entry of a softmax is 1 / sum(exp(x - max)).
    sums_NP = most_NP - each(torch.log, softmax_(parts_NPW, 1.0).amax(-1))
    sums_NP.masked_fill_(most_NP == -torch.inf, -torch.inf)  # tokens that a grammar rules out
    return sums_NP if sums_NP.shape[1] == 1 else _normaliser(sums_NP)


def token_logprobs(pieces: Sequence[npt.NDArray[Any]], top_counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the result of ``score`` on the host: one entry per row, with its best ``top_counts[i]`` tokens. The lower
    id comes first in a tie.
    """
    tokens, chosen, ranks, ids, values = (piece.tolist() for piece in pieces)
    entries = []
    for i, token in enumerate(tokens):
        # topk leaves ties in no order: the lower id comes first.
        best = sorted(zip(ids[i], values[i], strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprobs(token=token, logprob=chosen[i], rank=ranks[i], top=best[: top_counts[i]]))
    return entries


_NO_LOGPROBS = -1
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens: int32 [X]; ``logprobs`` by index in X, for rows that asked; ``failures`` by index in X: the
    reason that a row cannot go on.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]

    def of(self, indices: npt.NDArray[np.int64]) -> Sampled:
        """Return only the rows of ``indices``, int64 [N]."""
        rows = indices.tolist()
        return Sampled(
            self.tokens[indices],
            {i: self.logprobs[row] for i, row in enumerate(rows) if row in self.logprobs},
            {i: self.failures[row] for i, row in enumerate(rows) if row in self.failures},
        )


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Tokens that are being chosen: ``chosen_X``, int64, on the device of the logits, or an array if they are on the
    host already. ``logprobs`` has the other results to copy to the host: of the rows ``asking``, with the requested
    number of best tokens each.
    """

    chosen_X: torch.Tensor | npt.NDArray[np.int64]
    logprobs: list[torch.Tensor]
    asking: npt.NDArray[np.int64]
    top_counts: list[int]
    learners: list[tuple[int, TokenHistory | BannedSequences]]
    constrained: Constrained | None

    @property
    def piece_count(self) -> int:
        """Number of tensors to copy to the host."""
        return 1 + len(self.logprobs)

    def sent(self, readback: Readback, more: list[torch.Tensor]) -> PendingReadback:
        """Send everything to the host, ``more`` last."""
        if isinstance(self.chosen_X, np.ndarray) and not self.logprobs and not more:
            return readback.arrived_now([self.chosen_X])
        return readback.send([as_tensor(self.chosen_X), *self.logprobs, *more])

    def result(self, pieces: list[npt.NDArray[Any]]) -> Sampled:
        """Return the result once ``pieces`` are on the host. Call it once: histories and grammars record the tokens."""
        tokens = pieces[0].astype(np.int32)
        for i, learner in self.learners:
            learner.add(int(tokens[i]))
        failures = self.constrained.advance(tokens) if self.constrained is not None else {}
        if not self.asking.size:
            return Sampled(tokens, {}, failures)
        logprobs = token_logprobs(pieces[1:], self.top_counts)
        return Sampled(tokens, dict(zip(self.asking.tolist(), logprobs, strict=True)), failures)


@dataclass(frozen=True, slots=True)
class _StagedRows:
    """Staged inputs of ``launch``. ``drawn``: indices in X of rows that are drawn; ``numbers`` [5, drawn or X]; the
    two ``*_places``: ``drawn`` and ``asking`` on the device; ``top_k``, ``top_p``: a row has that filter.
    """

    drawn: npt.NDArray[np.int64]
    asking: npt.NDArray[np.int64]
    numbers: Staged | None
    drawn_places: Staged | None
    asking_places: Staged | None
    top_k: bool = False
    top_p: bool = False


_NONE = np.empty(0, np.int64)
_GREEDY_ALONE = _StagedRows(_NONE, _NONE, None, None, None)


class Sampler:
    """Sampling state of ``rows_max`` rows over a vocabulary of ``vocab_size``."""

    def __init__(self, rows_max: int, vocab_size: int, device: torch.device = _CPU) -> None:
        self.vocab_size = vocab_size
        self._greedy = np.ones(rows_max, np.bool_)
        self._temperature = np.ones(rows_max, np.float64)
        self._top_k = np.zeros(rows_max, np.int64)
        self._top_p = np.ones(rows_max, np.float64)
        self._min_p = np.zeros(rows_max, np.float64)
        self._seed = np.zeros(rows_max, np.uint64)
        self._logprobs = np.full(rows_max, _NO_LOGPROBS, np.int64)
        self._edits: dict[int, RowEdits] = {}
        self._grammars = GrammarRows()
        self._greedy_alone = True
        """Whether no row draws, and none asks for logprobs."""
        self._device = device
        self._remote = is_remote(device)
        self._early, self._late = Staging(device), Staging(device)
        self._readback = Readback(device, step_words(rows_max))
        self._staged: _StagedRows | None = None

    def admit(
        self,
        row: int,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        sampling: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Give ``row`` to a sequence. ``tokens``: its prompt, then the tokens that it generated before a preemption;
        ``stop_ids`` are masked while fewer than ``sampling.min_tokens`` are generated.
        """
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
        if grammar is not None:
            self._grammars.admit(row, grammar, tokens[prompt_tokens:])
        self._look_over()

    def clear(self, row: int) -> None:
        """Drop everything of the row's sequence, which has left."""
        self._greedy[row] = True
        self._logprobs[row] = _NO_LOGPROBS
        self._edits.pop(row, None)
        self._grammars.clear(row)
        self._look_over()

    def _look_over(self) -> None:
        self._greedy_alone = bool(self._greedy.all()) and bool((self._logprobs == _NO_LOGPROBS).all())

    def warm(self) -> None:
        """Compile the kernels, on a GPU, before the first request comes."""
        if self._by_kernels and self._device.type == "cuda":
            from weft.runner import sampling_kernels

            sampling_kernels.warm(self.vocab_size, self._device)

    def needs_previous_token(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether the choice of one of ``rows`` depends on tokens chosen before: all of these must be recorded
        before ``begin`` and ``launch``.
        """
        return bool(self._grammars.among(rows)) or (
            bool(self._edits)
            and any(self._edits[row].needs_previous_token for row in rows.tolist() if row in self._edits)
        )

    def chooses_apart(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether the tokens of these rows can be chosen independently, before earlier tokens are known."""
        return not self._grammars.among(rows) and not any(
            self._edits[row].learners for row in rows.tolist() if row in self._edits
        )

    def begin(self, rows: npt.NDArray[np.int64]) -> None:
        """Start work for these rows that does not need their logits; ``launch`` will follow."""
        self._grammars.begin(rows)

    def close(self) -> None:
        """Stop the thread of grammars. Idempotent."""
        self._grammars.close()

    def stage(self, staging: Staging, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Stage the inputs of ``launch`` for these rows: ``positions`` are the index in its sequence of the token
        about to be chosen.
        """
        if self._greedy_alone:
            self._staged = _GREEDY_ALONE
            return
        drawn = np.flatnonzero(~self._greedy[rows])
        asking = np.flatnonzero(self._logprobs[rows] >= 0)
        numbers = None
        if drawn.size:
            # Kernels take all rows at once, and recognise greedy ones by their temperature of 0.
            of, drawn_positions = (rows, positions) if self._by_kernels else (rows[drawn], positions[drawn])
            numbers = staging.take((5, len(of)), np.float64)
            fill_numbers(
                numbers.host,
                np.where(self._greedy[of], 0.0, self._temperature[of]),
                self._top_k[of],
                self._top_p[of],
                self._min_p[of],
                uniforms(self._seed[of], drawn_positions),
            )
        self._staged = _StagedRows(
            drawn,
            asking,
            numbers,
            staging.add(drawn) if drawn.size else None,
            staging.add(asking) if asking.size else None,
            top_k=bool(self._top_k[rows].any()),
            top_p=bool((self._top_p[rows] < 1.0).any()),
        )

    @property
    def _by_kernels(self) -> bool:
        return self._remote and gpu.reaches(self._device)

    def _staged_rows(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> _StagedRows:
        if self._staged is None and self._greedy_alone:
            return _GREEDY_ALONE
        if self._staged is None:
            self._early.begin()
            self.stage(self._early, rows, positions)
            self._early.send()
        assert self._staged is not None
        staged, self._staged = self._staged, None
        return staged

    def sample(self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Sampled:
        """Launch, and wait for the result."""
        choice = self.launch(logits_XV, rows, positions)
        return choice.result(choice.sent(self._readback, []).open())

    def launch(
        self,
        logits_XV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        host_XV: npt.NDArray[np.float32] | None = None,
    ) -> TokenChoice:
        """Return the next token of each row. The staged inputs are used once; without them they are sent now.

        ``logits_XV``: float32, contiguous, changed in place by the edits; ``rows``: the row of each; ``host_XV``: the
        same logits on the host, if the caller has them.
        """
        staged = self._staged_rows(rows, positions)
        raw = None
        if staged.asking_places is not None:
            raw = logits_XV.index_select(0, staged.asking_places.device)
        edits = (
            [(i, int(positions[i]), self._edits[row]) for i, row in enumerate(rows.tolist()) if row in self._edits]
            if self._edits
            else []
        )
        masks = self._edit(logits_XV, edits, rows)
        chosen_X: torch.Tensor | npt.NDArray[np.int64]
        if not self._remote and staged.numbers is None:
            chosen_X = _best_of(logits_XV, logits_XV.numpy() if host_XV is None else host_XV, masks)
        elif self._by_kernels:
            from weft.runner import sampling_kernels

            chosen_X = sampling_kernels.choose(
                logits_XV,
                None if staged.numbers is None else staged.numbers.device,
                masked=masks is not None,
                top_k=staged.top_k,
                top_p=staged.top_p,
            )
        else:
            chosen_X = self._choose(logits_XV, rows, staged, masks)
        logprobs, top_counts = [], []
        if raw is not None and staged.asking_places is not None:
            top_counts = self._logprobs[rows[staged.asking]].tolist()
            of_those = as_tensor(chosen_X).index_select(0, staged.asking_places.device)
            logprobs = score(raw, of_those, max(top_counts))
        return TokenChoice(
            chosen_X,
            logprobs,
            staged.asking,
            top_counts,
            [(i, learner) for i, _, edit in edits for learner in edit.learners],
            self._grammars.among(rows),
        )

    def _edit(
        self, logits_XV: torch.Tensor, edits: list[tuple[int, int, RowEdits]], rows: npt.NDArray[np.int64]
    ) -> Masks | None:
        """Change the logits, with one copy of all edits. Return the masks of constrained rows, if any."""
        if not edits and not self._grammars.any:
            return None
        self._late.begin()
        staged = stage_edits(self._late, edits, self.vocab_size) if edits else None
        masks = self._grammars.stage(self._late, rows)
        if staged is None and masks is None:
            return None
        self._late.send()
        if staged is not None:
            staged.apply(logits_XV)
        if masks is not None:
            if self._remote:  # a logit that a grammar refuses is less than one that a NaN becomes
                _make_finite(logits_XV)
            masks.apply(logits_XV)
        return masks

    def _choose(
        self, logits_XV: torch.Tensor, rows: npt.NDArray[np.int64], staged: _StagedRows, masks: Masks | None
    ) -> torch.Tensor:
        """Choose with torch's operators, and with numpy's for memory that it can read."""
        if not self._remote:
            chosen_X = torch.from_numpy(_best_of(logits_XV, logits_XV.numpy(), masks))
        else:
            if masks is None:
                _make_finite(logits_XV)
            chosen_X = logits_XV.argmax(dim=1)
        if staged.numbers is None or staged.drawn_places is None:
            return chosen_X
        of, places_N = rows[staged.drawn], staged.drawn_places.device
        filters = Filters(self._top_k[of], self._top_p[of], staged.numbers.device)
        if len(of) == len(rows):
            return choose(logits_XV, filters, remote=self._remote)
        return chosen_X.index_copy(
            0, places_N, choose(logits_XV.index_select(0, places_N), filters, remote=self._remote)
        )


def as_tensor(chosen_X: torch.Tensor | npt.NDArray[np.int64]) -> torch.Tensor:
    """Return an array as a tensor of the same memory."""
    return chosen_X if isinstance(chosen_X, torch.Tensor) else torch.from_numpy(chosen_X)


def _best_of(logits_XV: torch.Tensor, host_XV: npt.NDArray[np.float32], masks: Masks | None) -> npt.NDArray[np.int64]:
    """Return the index of each row's highest logit [X], the first one in a tie. ``host_XV``: the memory of
    ``logits_XV``. If a highest logit is not finite, the logits are made finite in place and ``masks`` applied again.
    """
    best_X: npt.NDArray[np.int64] = host_XV.argmax(axis=1)  # the index of a NaN, if the row has any
    # A sum of a few of Python's floats is finite where they are. More operators of numpy would say no more.
    if not math.isfinite(sum(map(host_XV.item, range(len(best_X)), best_X.tolist()))):
        _make_finite(logits_XV)
        if masks is not None:
            masks.apply(logits_XV)
        best_X = host_XV.argmax(axis=1)
    return best_X


def _make_finite(logits_XV: torch.Tensor) -> None:
    """Replace NaN and -inf in place by the lowest finite value, never chosen unless there is nothing else."""
    limits = torch.finfo(logits_XV.dtype)
    logits_XV.nan_to_num_(nan=limits.min, posinf=limits.max, neginf=limits.min)
