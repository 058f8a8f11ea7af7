"""gated_delta by ``csrc/gated_delta.inl``: the recurrence, token by token, state in the cache."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs

KEY_DIM_MAX = 256


def supported(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor,
              state_SHKV: torch.Tensor) -> bool:
    return (native.fits(q_THK, k_THK, v_THV) and state_SHKV.dtype in native.STATE_DTYPES
            and v_THV.shape[2] % native.LANES == 0 and q_THK.shape[2] <= KEY_DIM_MAX
            and q_THK.shape[2] % native.LANES == 0)


def gated_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g: torch.Tensor,
                beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *,
                scale: float, layer: int = 0) -> torch.Tensor:
    """``g`` [T, heads], or [T, heads, K] with one decay per line of the state (Kimi)."""
    tokens, heads, v_dim = v_THV.shape
    k_heads, k_dim = k_THK.shape[1:]
    by_line = g.ndim == 3
    g, beta = g.float(), beta_TH.float()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=q_THK.dtype)
    native.extension().gated_delta(
        native.runs_of(runs), native.rows_of(q_THK), native.rows_of(k_THK), native.rows_of(v_THV),
        native.rows_of(g.contiguous()) if by_line else native.plain_rows_of(g), native.plain_rows_of(beta),
        by_line, out_THV.data_ptr(), state_SHKV.data_ptr(), native.slot_stride(state_SHKV), k_heads, heads,
        k_dim, v_dim, scale, 0, 0, native.STATE_DTYPES[state_SHKV.dtype], layer)
    return out_THV
