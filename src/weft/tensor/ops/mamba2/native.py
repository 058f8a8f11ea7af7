"""mamba2 by ``csrc/mamba2.inl``: the recurrence, token by token, state in the cache."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs

STATE_DIM_MAX = 256


def supported(x_THP: torch.Tensor, B_TGN: torch.Tensor, C_TGN: torch.Tensor,
              state_SHPN: torch.Tensor) -> bool:
    return (native.fits(x_THP, B_TGN, C_TGN) and state_SHPN.dtype in native.STATE_DTYPES
            and B_TGN.shape[2] % native.LANES == 0 and B_TGN.shape[2] <= STATE_DIM_MAX)


def mamba2(x_THP: torch.Tensor, dt_TH: torch.Tensor, A_H: torch.Tensor, B_TGN: torch.Tensor,
           C_TGN: torch.Tensor, D_H: torch.Tensor, dt_bias_H: torch.Tensor, state_SHPN: torch.Tensor,
           runs: Runs, *, dt_limit: tuple[float, float], layer: int = 0) -> torch.Tensor:
    tokens, heads, head_dim = x_THP.shape
    dt = dt_TH if dt_TH.dtype == x_THP.dtype else dt_TH.to(x_THP.dtype)
    a, d, bias = (row.float().contiguous() for row in (A_H, D_H, dt_bias_H))
    out_THP = torch.empty((tokens, heads, head_dim), dtype=x_THP.dtype)
    native.extension().mamba2(
        native.runs_of(runs), native.rows_of(x_THP), native.rows_of(B_TGN), native.rows_of(C_TGN),
        native.rows_of(dt[:, None]), a.data_ptr(), d.data_ptr(), bias.data_ptr(), out_THP.data_ptr(),
        state_SHPN.data_ptr(), native.slot_stride(state_SHPN), heads, B_TGN.shape[1], head_dim,
        B_TGN.shape[2], *dt_limit, native.STATE_DTYPES[state_SHPN.dtype], layer)
    return out_THP
