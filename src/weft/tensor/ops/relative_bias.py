"""A bias on scores by the distance between query and key, which each query mixes out of learned profiles.

    bias(query, key) = states(query) . bank[:, distance]        0 <= distance < extent, else 0

Wherever a query has states, they lie behind its D numbers. Source: transformers ``InklingRelativeLogits``.
"""

from __future__ import annotations

import torch


def apart(q_NHD: torch.Tensor, bank_RE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and the states behind them: none without a bank."""
    states = 0 if bank_RE is None else len(bank_RE)
    own, behind = torch.split(q_NHD, [q_NHD.shape[2] - states, states], dim=-1)
    return own, behind


def relative_bias(states_NHR: torch.Tensor, bank_RE: torch.Tensor,
                  distance_NS: torch.Tensor) -> torch.Tensor:
    """float32 [N, H, S]; ``distance_NS``: from each query back to each key, int64."""
    extent = bank_RE.shape[1]
    profiles_NHE = states_NHR.float() @ bank_RE
    index_NHS = distance_NS.clamp(0, extent - 1)[:, None].expand(-1, states_NHR.shape[1], -1)
    far_NS = (distance_NS < 0) | (distance_NS >= extent)
    return profiles_NHE.gather(-1, index_NHS).masked_fill_(far_NS[:, None], 0.0)
