"""Changes that a request makes to its logits before a token is drawn, kept sparse.

    min_tokens      logit[stop id] = -inf            while fewer than min_tokens are made
    logit bias      logit[id] += bias                for the ids the request names
    repetition      logit[id] = logit / r  or  * r   (by its sign), ids of the prompt or the output
    frequency       logit[id] -= f * count           ids of the output
    presence        logit[id] -= p                   ids of the output
    banned          logit[id] = -inf                 ids that would complete a banned sequence (``bad_words``)
    allowed         logit[id] = -inf                 all other ids; a refused id that is allowed stays above these

applied in this order. Repetition is that of Keskar et al., "CTRL" (2019), section 4.1, as in transformers;
frequency and presence are those of the OpenAI API.

A row holds the distinct tokens it has seen and how often each was generated, not a count per token of the vocabulary.
Rows without edits cost nothing. The seen tokens are bounded by the sequence's length, and ``SamplingParams.check``
bounds banned sequences and their tokens (L11).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.request import SamplingParams
from weft.runner.staging import Staged, Staging


class BannedSequences:
    """Banned sequences of one row. ``generated``: the tokens of its answer so far."""

    __slots__ = ("_last_by_head", "_lengths", "_tail", "_tail_max")

    def __init__(self, sequences: Iterable[Sequence[int]], generated: Sequence[int] = ()) -> None:
        self._last_by_head: dict[tuple[int, ...], list[int]] = {}
        for *head, last in sequences:
            self._last_by_head.setdefault(tuple(head), []).append(last)
        self._lengths = sorted({len(head) for head in self._last_by_head})
        self._tail_max = max(self._lengths, default=0)
        # The prompt does not count: an answer may complete a sequence that begins in the prompt.
        self._tail = list(generated)[-self._tail_max :] if self._tail_max else []

    @property
    def needs_previous_token(self) -> bool:
        """Whether the refused tokens depend on the answer's tokens."""
        return self._tail_max > 0

    def add(self, token: int) -> None:
        """Record that ``token`` was generated."""
        if self._tail_max:
            self._tail.append(token)
            del self._tail[: -self._tail_max]

    def refused_ids(self) -> npt.NDArray[np.int64]:
        """Return the tokens that would complete a sequence."""
        refused: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                head = tuple(self._tail[len(self._tail) - length :])
                refused += self._last_by_head.get(head, ())
        return np.array(refused, np.int64)


Int64s = npt.NDArray[np.int64]
_LAST_RESORT = torch.finfo(torch.float32).min / 2
"""Logit of an allowed token that another edit refuses: chosen before any token that is not allowed."""


class TokenHistory:
    """The distinct tokens of one sequence, and how often each one was generated."""

    __slots__ = ("_counts", "_ids", "_index", "_size")

    def __init__(self, tokens: npt.NDArray[np.int32], prompt_tokens: int) -> None:
        ids, inverse = np.unique(tokens, return_inverse=True)
        self._size = len(ids)
        self._ids: Int64s = ids.astype(np.int64)
        self._counts: Int64s = np.bincount(inverse[prompt_tokens:], minlength=self._size).astype(np.int64)
        self._index: dict[int, int] = {int(token): i for i, token in enumerate(ids)}

    def add(self, token: int) -> None:
        """Record that ``token`` was generated."""
        i = self._index.get(token)
        if i is None:
            i = self._size
            if i == len(self._ids):
                grown = max(64, 2 * i)
                # Doubled: an answer appends one token a step.
                self._ids = np.resize(self._ids, grown)
                self._counts = np.resize(self._counts, grown)
            self._index[token] = i
            self._ids[i] = token
            self._counts[i] = 0
            self._size += 1
        self._counts[i] += 1

    @property
    def ids(self) -> Int64s:
        return self._ids[: self._size]

    @property
    def generated_counts(self) -> Int64s:
        return self._counts[: self._size]


class RowEdits:
    """The edits of one row for as long as a sequence holds it."""

    __slots__ = ("allowed_ids", "banned", "bias_ids", "bias_values", "history", "min_position", "sampling", "stop_ids")

    def __init__(
        self,
        sampling: SamplingParams,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        stop_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self.sampling = sampling
        self.history = TokenHistory(tokens, prompt_tokens) if sampling.penalised else None
        self.bias_ids: Int64s = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self.bias_values = np.fromiter(sampling.logit_bias.values(), np.float32)
        # A checkpoint may name an end token beyond its own logits; there is nothing to mask then.
        self.stop_ids: Int64s = np.array([i for i in stop_ids if 0 <= i < vocab_size], np.int64)
        self.min_position = prompt_tokens + sampling.min_tokens
        self.allowed_ids: Int64s = np.array(sorted(set(sampling.allowed_token_ids)), np.int64)
        self.banned: BannedSequences | None = None
        if sampling.banned_sequences:
            self.banned = BannedSequences(sampling.banned_sequences, tokens[prompt_tokens:].tolist())

    @property
    def any(self) -> bool:
        asks_min = self.sampling.min_tokens > 0 and self.stop_ids.size > 0
        return (
            self.history is not None
            or self.bias_ids.size > 0
            or asks_min
            or self.banned is not None
            or self.allowed_ids.size > 0
        )

    @property
    def learners(self) -> list[TokenHistory | BannedSequences]:
        """Objects that record each generated token."""
        return [learner for learner in (self.history, self.banned) if learner is not None]

    @property
    def needs_previous_token(self) -> bool:
        """Whether the next choice depends on the last token of the answer."""
        return self.history is not None or (self.banned is not None and self.banned.needs_previous_token)


@dataclass(frozen=True, slots=True)
class StagedEdits:
    """Staged edits of a step, None for kinds that no row needs. ``*_index``: int64 into the flat logits; ``bias`` and
    the rows of ``penalties`` (repetition, amount to subtract): float32. ``limited_rows``: the rows of
    ``allowed_index``.
    """

    masked_index: Staged | None = None
    bias_index: Staged | None = None
    bias: Staged | None = None
    penalty_index: Staged | None = None
    penalties: Staged | None = None
    banned_index: Staged | None = None
    allowed_index: Staged | None = None
    limited_rows: Staged | None = None

    def apply(self, logits_NV: torch.Tensor) -> None:
        """Change the logits (float32, contiguous) in place."""
        flat = logits_NV.view(-1)
        if self.masked_index is not None:
            flat.index_fill_(0, self.masked_index.device, -math.inf)
        if self.bias_index is not None and self.bias is not None:
            flat.index_add_(0, self.bias_index.device, self.bias.device)
        if self.penalty_index is not None and self.penalties is not None:
            index_E, (repetition_E, subtracted_E) = self.penalty_index.device, self.penalties.device
            values_E = flat[index_E]
            # By the sign, so that a penalty always lowers the logit.
            values_E = torch.where(values_E > 0, values_E / repetition_E, values_E * repetition_E)
            flat.index_copy_(0, index_E, values_E.sub_(subtracted_E))
        if self.banned_index is not None:
            flat.index_fill_(0, self.banned_index.device, -math.inf)
        if self.allowed_index is not None and self.limited_rows is not None:
            # A refused token among the allowed ones stays above all that are not allowed.
            allowed_A = flat[self.allowed_index.device].clamp_(min=_LAST_RESORT)
            logits_NV.index_fill_(0, self.limited_rows.device, -math.inf)
            flat.index_copy_(0, self.allowed_index.device, allowed_A)


def stage_edits(staging: Staging, edits: list[tuple[int, int, RowEdits]], vocab_size: int) -> StagedEdits:
    """Stage edits. ``edits``: (row of the logits, position of the token about to be chosen, the row's edits), of rows
    of ``vocab_size`` logits. Their histories have every token before that position.
    """
    masked = [row * vocab_size + e.stop_ids for row, position, e in edits if position < e.min_position]
    biased = [(row, e) for row, _, e in edits if e.bias_ids.size]
    histories = [(row, e.history, e.sampling) for row, _, e in edits if e.history is not None]
    banned = [row * vocab_size + e.banned.refused_ids() for row, _, e in edits if e.banned is not None]
    limited = [(row, e) for row, _, e in edits if e.allowed_ids.size]
    bias_index = bias = penalty_index = penalties = allowed_index = limited_rows = None
    if biased:
        bias_index = staging.add(np.concatenate([row * vocab_size + e.bias_ids for row, e in biased]))
        bias = staging.add(np.concatenate([e.bias_values for _, e in biased]))
    if histories:
        penalty_index = staging.add(np.concatenate([row * vocab_size + h.ids for row, h, _ in histories]))
        penalties = staging.add(_penalties(histories), np.float32)
    if limited:
        allowed_index = staging.add(np.concatenate([row * vocab_size + e.allowed_ids for row, e in limited]))
        limited_rows = staging.add(np.array([row for row, _ in limited], np.int64))
    return StagedEdits(
        staging.add(np.concatenate(masked)) if masked else None,
        bias_index,
        bias,
        penalty_index,
        penalties,
        _indices(staging, banned),
        allowed_index,
        limited_rows,
    )


def _indices(staging: Staging, parts: list[Int64s]) -> Staged | None:
    """Return all ``parts`` as one array; None if they are empty."""
    # An empty piece would cost a launch for nothing.
    return staging.add(np.concatenate(parts)) if any(part.size for part in parts) else None


def _penalties(histories: list[tuple[int, TokenHistory, SamplingParams]]) -> npt.NDArray[np.float64]:
    """Return [2, E]: repetition penalties; amounts to subtract."""
    counts = np.concatenate([h.generated_counts for _, h, _ in histories])
    sizes = [len(h.ids) for _, h, _ in histories]
    subtracted = np.repeat([s.frequency_penalty for _, _, s in histories], sizes) * counts
    subtracted += np.repeat([s.presence_penalty for _, _, s in histories], sizes) * (counts > 0)
    return np.stack((np.repeat([s.repetition_penalty for _, _, s in histories], sizes), subtracted))
