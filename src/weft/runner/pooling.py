"""Pooling of the hidden rows of a prompt, for embeddings, scores and decisions.

    first  [ x . . . . . . ]           the row of the first token (CLS)
    last   [ . . . . . . x ]           the row of the last token: as it is, through the score head, or its
                                       log-probabilities of some tokens
    token  [ x x x x x x x ]           all rows, as they are or through the score head
    mean   [ skip | 1 1 1 | 2 2 2 ]    sums of rows between multiples of CHUNK_TOKENS, float64

A chunk of a prompt ends at a multiple of CHUNK_TOKENS or at its end. So the sums are the same however the prompt was
cut. ``Stream.add_pooled`` adds them in order. Nothing here depends on other rows of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from weft.models.score_head import ScoreHead
from weft.request import Pooling
from weft.runner.batch import PooledSpan
from weft.units import CHUNK_TOKENS


class Heads(Protocol):
    """Model with heads. ``score_head``: rows [X, D] to float32 [X, labels], if the model has one."""

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor: ...


def pool(model: Heads, spans: Iterable[PooledSpan], hidden_TD: torch.Tensor) -> list[torch.Tensor]:
    """Return float64 [parts, width] for each span. ``hidden_TD``: of the complete step."""
    return [
        _sums(span, hidden_TD)
        if span.pooling.kind == "mean"
        else _read(model, span.pooling, hidden_TD[_rows(span)]).double()
        for span in spans
    ]


def _rows(span: PooledSpan) -> slice:
    first = span.stop - 1 if span.pooling.kind == "last" else span.first
    return slice(first, span.stop if span.pooling.kind == "token" else first + 1)


def _read(model: Heads, pooling: Pooling, rows_XD: torch.Tensor) -> torch.Tensor:
    if pooling.score:
        score_head: ScoreHead | None = getattr(model, "score_head", None)
        assert score_head is not None, "a model without a score head was asked for a score"
        return score_head(rows_XD)
    if pooling.tokens:
        logits_XV = model.logits(rows_XD).double()
        total_X1 = torch.logsumexp(logits_XV, dim=1, keepdim=True)
        # A list of indices would be a copy that waits for the device.
        return torch.cat([logits_XV[:, token : token + 1] for token in pooling.tokens], dim=1) - total_X1
    return rows_XD


def _sums(span: PooledSpan, hidden_TD: torch.Tensor) -> torch.Tensor:
    sums, end = [], span.start + span.stop - span.first
    begin = max(span.start, span.pooling.skip)
    while begin < end:
        stop = min(end, (begin // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        offset = span.first - span.start
        sums.append(hidden_TD[begin + offset : stop + offset].double().sum(dim=0))
        begin = stop
    return torch.stack(sums)
