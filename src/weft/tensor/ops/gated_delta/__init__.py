"""The gated delta rule: linear attention whose state decays, then corrects its prediction."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.gated_delta import cpu, native
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import restored

K_DIM_MAX = 256
"""Largest key dim of one tile in the Triton kernels."""


def gated_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
                beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *,
                scale: float, layer: int = 0) -> torch.Tensor:
    """Per value head, with q and k L2-normalised (eps 1e-6) and q scaled:

        S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - k_t^T S))^T;   o_t = q_t^T S

    ``q_THK``, ``k_THK`` [T, k_heads, K]; ``v_THV`` [T, v_heads, V]; ``g_TH`` (log decay, <= 0) and
    ``beta_TH`` [T, v_heads]; value head h reads key head h // (v_heads / k_heads). ``scale``: usually
    K ** -0.5. Any float dtypes; computed in float32. Returns [T, v_heads, V] in the dtype of ``q_THK``.

    ``state_SHKV`` [S, v_heads, K, V]: S of each run's slot before the run (zeros if ``fresh``), updated in
    place to S after it. Runs with slot PAD start from zeros and write nothing. A tap writes the state after
    ``offset`` tokens of its run. Decode runs use the recurrence. Prefill runs use the chunked form, with
    chunks on the absolute grid of CHUNK_TOKENS positions. A state that is not float32 is rounded after every
    token as ``tensor.rounding`` says; ``layer`` is the layer's number.

    Source: Yang et al., "Gated Delta Networks" (2024), eqs. 8-10; transformers' qwen3_5 for the details.
    """
    if runs.log is not None:
        def replay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                   again: Runs) -> torch.Tensor:
            return gated_delta(q, k, v, g, beta, state_SHKV, again, scale=scale, layer=layer)

        runs.log.note(replay, q_THK, k_THK, v_THV, g_TH, beta_TH)
    if gpu.fits(q_THK, k_THK, v_THV, g_TH, beta_TH, state_SHKV) and q_THK.shape[2] <= K_DIM_MAX:
        from weft.tensor.kernels import gated_delta as triton

        with restored(state_SHKV, runs):
            return triton.gated_delta(q_THK, k_THK, v_THV, g_TH, beta_TH, state_SHKV, runs, scale=scale,
                                 layer=layer)
    if native.supported(q_THK, k_THK, v_THV, state_SHKV):
        return native.gated_delta(q_THK, k_THK, v_THV, g_TH, beta_TH, state_SHKV, runs, scale=scale,
                                  layer=layer)
    if state_SHKV.dtype != torch.float32:
        def step(x: tuple[torch.Tensor, ...], state: torch.Tensor, rows: Runs) -> torch.Tensor:
            return cpu.gated_delta(x[0], x[1], x[2], x[3], x[4], state, rows, scale=scale)

        return by_token(step, (q_THK, k_THK, v_THV, g_TH, beta_TH), state_SHKV, runs, layer)
    return cpu.gated_delta(q_THK, k_THK, v_THV, g_TH, beta_TH, state_SHKV, runs, scale=scale)
