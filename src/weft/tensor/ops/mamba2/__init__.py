"""Mamba-2: a linear state per head whose decay and input depend on the token."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.mamba2 import cpu, native
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import restored

STATE_DIM_MAX = 256
"""Largest state dim of one tile in the Triton kernels."""


def mamba2(x_THP: torch.Tensor, dt_TH: torch.Tensor, A_H: torch.Tensor, B_TGN: torch.Tensor,
           C_TGN: torch.Tensor, D_H: torch.Tensor, dt_bias_H: torch.Tensor, state_SHPN: torch.Tensor,
           runs: Runs, *, dt_limit: tuple[float, float] = (0.0, float("inf")),
           layer: int = 0) -> torch.Tensor:
    """Per head, with ``d_t = clamp(softplus(dt_t + dt_bias), *dt_limit)``:

        S <- exp(d_t A) S + (d_t x_t) B_t^T;   y_t = S C_t + D x_t

    ``x_THP`` [T, heads, P]; ``dt_TH`` [T, heads], as projected (bias and softplus are inside); ``A_H``
    [heads], negative (-exp(A_log)); ``B_TGN``, ``C_TGN`` [T, groups, N], head h reading group
    h // (heads / groups); ``D_H``, ``dt_bias_H`` [heads]. Any float dtypes; computed in float32. Returns
    [T, heads, P] in the dtype of ``x_THP``.

    ``state_SHPN`` [S, heads, P, N]: S of each run's slot before the run (zeros if ``fresh``), updated in
    place to S after it. Runs with slot PAD start from zeros and write nothing. A tap writes the state after
    ``offset`` tokens of its run. Decode runs use the recurrence. Prefill runs use the chunked form, with
    chunks on the absolute grid of CHUNK_TOKENS positions. A state that is not float32 is rounded after every
    token as ``tensor.rounding`` says; ``layer`` is the layer's number.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6; transformers' granitemoehybrid.
    """
    if runs.log is not None:
        def replay(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                   again: Runs) -> torch.Tensor:
            return mamba2(x, dt, A_H, b, c, D_H, dt_bias_H, state_SHPN, again, dt_limit=dt_limit, layer=layer)

        runs.log.note(replay, x_THP, dt_TH, B_TGN, C_TGN)
    if gpu.fits(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H,
                state_SHPN) and B_TGN.shape[2] <= STATE_DIM_MAX:
        from weft.tensor.kernels import mamba2 as triton

        with restored(state_SHPN, runs):
            return triton.mamba2(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, state_SHPN, runs,
                                 dt_limit=dt_limit, layer=layer)
    if native.supported(x_THP, B_TGN, C_TGN, state_SHPN):
        return native.mamba2(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, state_SHPN, runs,
                             dt_limit=dt_limit, layer=layer)
    if state_SHPN.dtype != torch.float32:
        def step(x: tuple[torch.Tensor, ...], state: torch.Tensor, rows: Runs) -> torch.Tensor:
            return cpu.mamba2(x[0], x[1], A_H, x[2], x[3], D_H, dt_bias_H, state, rows, dt_limit=dt_limit)

        return by_token(step, (x_THP, dt_TH, B_TGN, C_TGN), state_SHPN, runs, layer)
    return cpu.mamba2(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, state_SHPN, runs, dt_limit=dt_limit)
