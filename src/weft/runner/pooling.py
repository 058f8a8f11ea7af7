"""Pooling of the hidden rows of a prompt, for embeddings, scores and decisions.

    first  [ x . . . . . . ]           the row of the first token (CLS)
    last   [ . . . . . . x ]           the row of the last token: as it is, through the score head, or its
                                       log-probabilities of some tokens
    mean   [ skip | 1 1 1 | 2 2 2 ]    sums of rows between multiples of CHUNK_TOKENS, float64

A chunk of a prompt ends at a multiple of CHUNK_TOKENS or at its end. So the sums are the same however the prompt was
cut. ``Stream.add_pooled`` adds them in order. Nothing here depends on other rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from weft.runner.batch import PooledSpan
from weft.units import CHUNK_TOKENS


class Heads(Protocol):
    """Model with heads. ``score_LD``: float32 [labels, D], if the model has a score head, and ``score_bias_L`` if that
    has a bias."""

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor: ...


def pool(model: Heads, spans: Iterable[PooledSpan], hidden_TD: torch.Tensor) -> list[torch.Tensor]:
    """Return float64 [parts, width] for each span. ``hidden_TD``: of the complete step."""
    return [
        _sums(span, hidden_TD) if span.pooling.kind == "mean" else _row(model, span, hidden_TD).double()
        for span in spans
    ]


def _row(model: Heads, span: PooledSpan, hidden_TD: torch.Tensor) -> torch.Tensor:
    index = span.first if span.pooling.kind == "first" else span.stop - 1
    row_1D = hidden_TD[index : index + 1]
    if span.pooling.score:
        score_LD = getattr(model, "score_LD", None)
        assert score_LD is not None, "a model without a score head was asked for a score"
        scores_1L: torch.Tensor = row_1D.float() @ score_LD.T
        bias_L = getattr(model, "score_bias_L", None)
        return scores_1L if bias_L is None else scores_1L + bias_L
    if span.pooling.tokens:
        logits_1V = model.logits(row_1D).double()
        total_11 = torch.logsumexp(logits_1V, dim=1, keepdim=True)
        # A list of indices would be a copy that waits for the device.
        return torch.cat([logits_1V[:, token : token + 1] for token in span.pooling.tokens], dim=1) - total_11
    return row_1D


def _sums(span: PooledSpan, hidden_TD: torch.Tensor) -> torch.Tensor:
    sums, end = [], span.start + span.stop - span.first
    begin = max(span.start, span.pooling.skip)
    while begin < end:
        stop = min(end, (begin // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        offset = span.first - span.start
        sums.append(hidden_TD[begin + offset : stop + offset].double().sum(dim=0))
        begin = stop
    return torch.stack(sums)
