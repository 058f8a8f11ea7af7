"""Kimi delta attention: the gated delta rule, with one decay per key channel."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.gated_delta import K_DIM_MAX, native
from weft.tensor.ops.kimi_delta import cpu
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import restored


def kimi_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_THK: torch.Tensor,
               beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *, scale: float,
               layer: int = 0) -> torch.Tensor:
    """Per head, with q and k L2-normalised (eps 1e-6) and q scaled:

        S <- diag(exp(g_t)) S;   S <- S + k_t (beta_t (v_t - k_t^T S))^T;   o_t = q_t^T S

    ``q_THK``, ``k_THK`` [T, heads, K]; ``v_THV`` [T, heads, V]; ``g_THK`` (log decay, <= 0) [T, heads, K];
    ``beta_TH`` [T, heads]. ``scale``: usually K ** -0.5. Any float dtypes; computed in float32. Returns
    [T, heads, V] in the dtype of ``q_THK``.

    ``state_SHKV`` [S, heads, K, V] and ``runs`` as in ``gated_delta``: read before each run (zeros if
    ``fresh`` or without a slot), written after it and at taps; chunks on the absolute grid. A state that is
    not float32 is rounded after every token, see ``tensor.rounding``.

    Source: Kimi Team, "Kimi Linear" (2025), equations 1 and 7-9; transformers' kimi_linear for the details.
    """
    if runs.log is not None:
        def replay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                   again: Runs) -> torch.Tensor:
            return kimi_delta(q, k, v, g, beta, state_SHKV, again, scale=scale, layer=layer)

        runs.log.note(replay, q_THK, k_THK, v_THV, g_THK, beta_TH)
    if gpu.fits(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHKV) and q_THK.shape[2] <= K_DIM_MAX:
        from weft.tensor.kernels import kimi_delta as triton

        with restored(state_SHKV, runs):
            return triton.kimi_delta(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHKV, runs, scale=scale,
                                 layer=layer)
    if native.supported(q_THK, k_THK, v_THV, state_SHKV):
        return native.gated_delta(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHKV, runs, scale=scale,
                                  layer=layer)
    if state_SHKV.dtype != torch.float32:
        def step(x: tuple[torch.Tensor, ...], state: torch.Tensor, rows: Runs) -> torch.Tensor:
            return cpu.kimi_delta(x[0], x[1], x[2], x[3], x[4], state, rows, scale=scale)

        return by_token(step, (q_THK, k_THK, v_THV, g_THK, beta_TH), state_SHKV, runs, layer)
    return cpu.kimi_delta(q_THK, k_THK, v_THV, g_THK, beta_TH, state_SHKV, runs, scale=scale)
