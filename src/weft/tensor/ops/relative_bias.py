"""Bias on scores by the distance between query and key, which each query mixes from learned profiles.

    bank        profile 0   | . . . . . . . |         a number for each distance
                profile 1   | . . . . . . . |
    a query     [ D numbers | states r0 r1 ]          they follow its own numbers
    its scores  scale q . k + r . bank[:, distance]   0 <= distance < extent; nothing is added beyond

ALiBi is the same: its one profile is -distance, and the state of a head is its slope in every query.

A bias depends only on the two positions and the query. So it is the same for any chunk, cache or batch.

Source: transformers ``InklingRelativeLogits``.
"""

from __future__ import annotations

import torch


def apart(q_NHD: torch.Tensor, bank_RE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries, and the states after them: none without a bank."""
    states = 0 if bank_RE is None else len(bank_RE)
    own, behind = torch.split(q_NHD, [q_NHD.shape[2] - states, states], dim=-1)
    return own, behind


def profiles_of(states_THR: torch.Tensor, bank_RE: torch.Tensor | None) -> torch.Tensor | None:
    """Return [T, H, extent], in the dtype of the states: the bias of each query by distance, for kernels that look it
    up.
    """
    return None if bank_RE is None else (states_THR @ bank_RE.to(states_THR.dtype)).contiguous()


def relative_bias(states_NHR: torch.Tensor, bank_RE: torch.Tensor, distance_NS: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, H, S]; ``distance_NS``: from each query back to each key, int64, below S."""
    bank_RE = bank_RE[:, : distance_NS.shape[1]]
    extent = bank_RE.shape[1]
    profiles_NHE = states_NHR.float() @ bank_RE
    index_NHS = distance_NS.clamp(0, extent - 1)[:, None].expand(-1, states_NHR.shape[1], -1)
    far_NS = (distance_NS < 0) | (distance_NS >= extent)
    return profiles_NHE.gather(-1, index_NHS).masked_fill_(far_NS[:, None], 0.0)


def bias_mask(
    states_LHR: torch.Tensor, bank_RE: torch.Tensor, distance_LS: torch.Tensor, kv_heads: int, window: int | None
) -> torch.Tensor:
    """Return float32 [kv_heads, G, L, S], the bias as the mask of an attention call. No query sees keys after it, or
    ``window`` places before.
    """
    seen_LS = distance_LS >= 0
    if window is not None:
        seen_LS &= distance_LS < window
    mask_LHS = relative_bias(states_LHR, bank_RE, distance_LS).masked_fill_(~seen_LS[:, None], float("-inf"))
    return torch.unflatten(mask_LHS.transpose(0, 1), 0, (kv_heads, -1))
