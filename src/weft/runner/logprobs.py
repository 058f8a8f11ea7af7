"""Log probabilities of what was chosen and of what was likely: softmax of the raw logits, nothing else.

Temperature, penalties, bias and filters do not show here: a logprob says what the model thought, so that it
can be compared across requests and with any other implementation of the model.
"""

from __future__ import annotations

import torch

from weft.request import TokenLogprobs


def token_logprobs(logits_NV: torch.Tensor, tokens_N: torch.Tensor,
                   top_counts: list[int]) -> list[TokenLogprobs]:
    """One entry per row: the logprob and rank of ``tokens_N`` (int64 [N]) and the row's best
    ``top_counts[i]`` tokens, best first, the lower id first where two tie.

    ``logits_NV``: float32, not changed. A NaN logit counts as impossible.
    """
    normaliser_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    if bool(normaliser_N1.isnan().any()):
        logits_NV = torch.where(logits_NV.isnan(), -torch.inf, logits_NV)
        normaliser_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    chosen_N1 = logits_NV.gather(1, tokens_N[:, None])
    rank_N = (logits_NV > chosen_N1).sum(dim=1)
    chosen = (chosen_N1 - normaliser_N1)[:, 0].tolist()
    ranks, tokens = rank_N.tolist(), tokens_N.tolist()
    width = min(max(top_counts, default=0), logits_NV.shape[1])
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if width:
        values_NW, ids_NW = logits_NV.topk(width, dim=1)
        logprobs = (values_NW - normaliser_N1).tolist()
        for i, (ids, values) in enumerate(zip(ids_NW.tolist(), logprobs, strict=True)):
            best = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            tops[i] = best[: top_counts[i]]
    return [TokenLogprobs(token=token, logprob=logprob, rank=rank, top=top)
            for token, logprob, rank, top in zip(tokens, chosen, ranks, tops, strict=True)]
