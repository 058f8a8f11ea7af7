"""Log probabilities of what was chosen and of what was likely: softmax of the raw logits, nothing else.

    on the device   score(logits, tokens) -> tokens, logprobs, ranks, best ids and their logprobs
                         '--- with the step's tokens (readback) ---'
    on the host     token_logprobs(pieces) -> one TokenLogprobs per row

Temperature, penalties, bias and filters do not change logprobs. A logprob is the model's own, comparable
across requests and with any other implementation of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from weft.request import TokenLogprobs

PIECES = 5
"""Tensors of one call of ``score``."""


def score(logits_NV: torch.Tensor, tokens_N: torch.Tensor, top_count: int) -> list[torch.Tensor]:
    """``tokens_N`` (int64 [N]), their logprobs and ranks, and each row's best ``top_count`` tokens with their
    logprobs, best first: five tensors. The host reads none of them.

    ``logits_NV``: float32, changed: a NaN becomes -inf, as it counts as impossible.
    """
    logits_NV.masked_fill_(logits_NV.isnan(), -torch.inf)
    normaliser_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    chosen_N1 = logits_NV.gather(1, tokens_N[:, None])
    rank_N = (logits_NV > chosen_N1).sum(dim=1)
    values_NW, ids_NW = logits_NV.topk(min(top_count, logits_NV.shape[1]), dim=1)
    return [tokens_N, (chosen_N1 - normaliser_N1)[:, 0], rank_N, ids_NW, values_NW - normaliser_N1]


def token_logprobs(pieces: Sequence[npt.NDArray[Any]], top_counts: Sequence[int]) -> list[TokenLogprobs]:
    """The result of ``score`` on the host: one entry per row, with its best ``top_counts[i]`` tokens. The
    lower id comes first in a tie."""
    tokens, chosen, ranks, ids, values = (piece.tolist() for piece in pieces)
    entries = []
    for i, token in enumerate(tokens):
        best = sorted(zip(ids[i], values[i], strict=True), key=lambda pair: (-pair[1], pair[0]))
        entries.append(TokenLogprobs(token=token, logprob=chosen[i], rank=ranks[i], top=best[:
        top_counts[i]]))
    return entries
