"""mamba1 by ``csrc/mamba1.inl``: the recurrence, token by token, state in the cache."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs

STATE_DIM_MAX = 256


def supported(x_TC: torch.Tensor, dt_TC: torch.Tensor, B_TN: torch.Tensor, C_TN: torch.Tensor,
              state_SCN: torch.Tensor) -> bool:
    return (native.fits(x_TC, dt_TC, B_TN, C_TN) and state_SCN.dtype in native.STATE_DTYPES
            and x_TC.shape[1] % native.LANES == 0 and B_TN.shape[1] <= STATE_DIM_MAX)


def mamba1(x_TC: torch.Tensor, dt_TC: torch.Tensor, A_CN: torch.Tensor, B_TN: torch.Tensor,
           C_TN: torch.Tensor, D_C: torch.Tensor, dt_bias_C: torch.Tensor, state_SCN: torch.Tensor,
           runs: Runs, *, layer: int = 0) -> torch.Tensor:
    tokens, channels = x_TC.shape
    a, d, bias = (values.float().contiguous() for values in (A_CN, D_C, dt_bias_C))
    out_TC = torch.empty((tokens, channels), dtype=x_TC.dtype)
    native.extension().mamba1(
        native.runs_of(runs), native.rows_of(x_TC[:, None]), native.rows_of(dt_TC[:, None]),
        native.rows_of(B_TN[:, None]), native.rows_of(C_TN[:, None]), a.data_ptr(), d.data_ptr(),
        bias.data_ptr(), out_TC.data_ptr(), state_SCN.data_ptr(), native.slot_stride(state_SCN), channels,
        A_CN.shape[1], native.STATE_DTYPES[state_SCN.dtype], layer)
    return out_TC
