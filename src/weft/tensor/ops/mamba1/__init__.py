"""Mamba-1: a linear state per channel, each of whose entries decays at its own rate."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.mamba1 import cpu, native
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import restored


def mamba1(x_TC: torch.Tensor, dt_TC: torch.Tensor, A_CN: torch.Tensor, B_TN: torch.Tensor,
           C_TN: torch.Tensor, D_C: torch.Tensor, dt_bias_C: torch.Tensor, state_SCN: torch.Tensor,
           runs: Runs, *, layer: int = 0) -> torch.Tensor:
    """Per channel, with ``d_t = softplus(dt_t + dt_bias)``:

        S <- exp(d_t A) S + (d_t x_t) B_t;   y_t = S . C_t + D x_t

    ``x_TC`` [T, C]; ``dt_TC`` [T, C], as projected (bias and softplus are inside); ``A_CN`` [C, N], negative
    (-exp(A_log)); ``B_TN``, ``C_TN`` [T, N], the same for all channels; ``D_C``, ``dt_bias_C`` [C]. Any float
    dtypes; computed in float32. Returns [T, C] in the dtype of ``x_TC``; the gate is the caller's.

    ``state_SCN`` [S, C, N]: S of each run's slot before the run (zeros if ``fresh``), updated in place to S
    after it. Runs with slot PAD start from zeros and write nothing. A tap writes the state after ``offset``
    tokens of its run. Decode runs use the recurrence. Prefill runs use the chunked form, with chunks on the
    absolute grid of CHUNK_TOKENS positions.

    Source: Gu and Dao, "Mamba" (2023), section 3; transformers' mamba.
    """
    if runs.log is not None:
        def replay(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                   again: Runs) -> torch.Tensor:
            return mamba1(x, dt, A_CN, b, c, D_C, dt_bias_C, state_SCN, again, layer=layer)

        runs.log.note(replay, x_TC, dt_TC, B_TN, C_TN)
    if gpu.fits(x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, dt_bias_C, state_SCN):
        from weft.tensor.kernels import mamba1 as triton

        with restored(state_SCN, runs):
            return triton.mamba1(x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, dt_bias_C, state_SCN, runs, layer=layer)
    if native.supported(x_TC, dt_TC, B_TN, C_TN, state_SCN):
        return native.mamba1(x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, dt_bias_C, state_SCN, runs, layer=layer)
    if state_SCN.dtype != torch.float32:
        def step(x: tuple[torch.Tensor, ...], state: torch.Tensor, rows: Runs) -> torch.Tensor:
            return cpu.mamba1(x[0], x[1], A_CN, x[2], x[3], D_C, dt_bias_C, state, rows)

        return by_token(step, (x_TC, dt_TC, B_TN, C_TN), state_SCN, runs, layer)
    return cpu.mamba1(x_TC, dt_TC, A_CN, B_TN, C_TN, D_C, dt_bias_C, state_SCN, runs)
