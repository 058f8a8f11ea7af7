"""kimi_delta by Triton: as ``gated_delta``, with one decay per line of the state.

Decodes, and prefills of states in few bits, use the recurrence of ``tensor.gpu.delta``. The pass over the
states and the outputs are shared too. Only ``_prepare`` is specific to this op: M(k), M(q), W, U and the
scaled q and k of a chunk of one head (``cpu`` explains the letters). Blocks of 16 x 16 places of M:

    below the diagonal   for each block of rows, with s the place before it:
                         (x_i exp(G_i - G_s)) . (k_j exp(G_s - G_j))       both factors at most 1: one product
    on the diagonal      by distance d = i - j < 16: row i meets k_(i-d), decayed by the d numbers between;
                         their running sum grows by one term per distance, so nothing cancels

Both are sums over the lines of the state, 32 lines at a time: each tile is then 64 x 32 and fits in
registers. Norms are factors of rows and columns of M, as in ``gated_delta``. Rows d places up are loaded
again, from the cache, because a tile cannot shift its rows. Sums of log decays from the chunk's begin are
exact to 1e-7 (``tensor.gpu.products``). Products keep float32's precision, because states are checkpoints.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.delta import (
    PLACES,
    chunk_buffers,
    chunk_compilations,
    recurrent_compilations,
    run_by_token,
    run_chunks,
)
from weft.tensor.gpu.launch import STEP_TABLES, Blocks, compilation_of, dense_rows, padded
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.products import (
    BASE,
    LOG_DECAY_FLOOR,
    decay_of,
    decay_sums,
    product,
    product_right,
    unit_lower_inverse,
)
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs

PREPARE = Blocks(32, warps=8)


@triton.jit
def _rows(x, t, x_row, x_head, head, line, mask, K: tl.constexpr):
    """[places, lines] of one head, float32; zeros where ``mask`` [places] is not set."""
    return tl.load(x + t[:, None] * x_row + head * x_head + line[None, :],
                   mask=mask[:, None] & (line < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _add_diagonal(m_keys, m_queries, keys, queries, k, g, t, tokens, head, line, place, k_row, k_head, g_row,
                  g_head, K: tl.constexpr):
    """Add the contribution of some lines of the state to the diagonal blocks of M(k) and M(q)."""
    rows, cols = place[:, None], place[None, :]
    between = tl.zeros(keys.shape, tl.float32)
    for distance in range(BASE):
        reached = (place % BASE >= distance) & (place < tokens)
        if distance > 0:
            between += tl.maximum(_rows(g, t - distance + 1, g_row, g_head, head, line, reached, K),
                                  LOG_DECAY_FLOOR)
        met = _rows(k, t - distance, k_row, k_head, head, line, reached, K) * decay_of(between)
        here = (rows - cols == distance) & reached[:, None]
        m_keys += tl.where(here, tl.sum(keys * met, axis=1)[:, None], 0.0)
        m_queries += tl.where(here, tl.sum(queries * met, axis=1)[:, None], 0.0)
    return m_keys, m_queries


@triton.jit
def _below(whole, rest, place, at):
    """[places, lines]: the sums less those at place ``at``."""
    selected = place[:, None] == at
    at_whole = tl.sum(tl.where(selected, whole, 0.0), axis=0)
    at_rest = tl.sum(tl.where(selected, rest, 0.0), axis=0)
    return (whole - at_whole[None, :]) + (rest - at_rest[None, :])


@triton.jit
def _add_below(m_keys, m_queries, keys, queries, whole, rest, place):
    """Add the contribution of some lines of the state to the blocks of M(k) and M(q) below the diagonal.
    ``whole``, ``rest``: sums as by ``decay_sums``."""
    block = place[:, None] // BASE
    for s in range(1, PLACES // BASE):
        from_block = _below(whole, rest, place, s * BASE - 1)
        mine, before = block == s, block < s
        down = decay_of(tl.where(mine, from_block, 0.0))
        right = tl.trans(tl.where(before, keys * decay_of(tl.where(before, -from_block, 0.0)), 0.0))
        m_keys += product(tl.where(mine, keys * down, 0.0), right)
        m_queries += product(tl.where(mine, queries * down, 0.0), right)
    return m_keys, m_queries


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare(q, k, v, g, beta, w, u, p, q_left, k_left, decay, chunk_first, chunk_tokens, q_row, q_head,
             k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, base, scale, H: tl.constexpr,
             K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Grid: heads, chunks. Outputs as in ``tensor.gpu.delta``, for the tokens from ``base`` on."""
    head, c = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, PLACES)
    tokens = tl.load(chunk_tokens + c)
    here = place < tokens
    t = (tl.load(chunk_first + c) + place).to(tl.int64)
    row = ((t - base) * H + head)[:, None]
    k_scale, q_scale = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.float32)
    for part in range(0, K, BK):
        line = part + tl.arange(0, BK)
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        queries = _rows(q, t, q_row, q_head, head, line, here, K)
        k_scale += tl.sum(keys * keys, axis=1)
        q_scale += tl.sum(queries * queries, axis=1)
    k_scale, q_scale = tl.rsqrt(k_scale + 1e-6), tl.rsqrt(q_scale + 1e-6) * scale

    m_keys, m_queries = tl.zeros((PLACES, PLACES), tl.float32), tl.zeros((PLACES, PLACES), tl.float32)
    for part in range(0, K, BK):
        line = part + tl.arange(0, BK)
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        queries = _rows(q, t, q_row, q_head, head, line, here, K)
        whole, rest = decay_sums(_rows(g, t, g_row, g_head, head, line, here, K))
        m_keys, m_queries = _add_diagonal(m_keys, m_queries, keys, queries, k, g, t, tokens, head, line,
                                          place, k_row, k_head, g_row, g_head, K)
        m_keys, m_queries = _add_below(m_keys, m_queries, keys, queries, whole, rest, place)
        sums = whole + rest
        last = tl.sum(tl.where(place[:, None] == PLACES - 1, sums, 0.0), axis=0)
        left = decay_of(-_below(whole, rest, place, PLACES - 1))
        tile = here[:, None] & (line < K)[None, :]
        tl.store(decay + (c * H + head).to(tl.int64) * K + line, decay_of(last), mask=line < K)
        tl.store(q_left + row * K + line[None, :], queries * q_scale[:, None] * decay_of(sums), mask=tile)
        tl.store(k_left + row * K + line[None, :], keys * k_scale[:, None] * left, mask=tile)
    tl.store(p + row * PLACES + place[None, :], m_queries * q_scale[:, None] * k_scale[None, :],
             mask=here[:, None])

    beta_t = tl.load(beta + t * beta_row + head * beta_head, mask=here, other=0.0).to(tl.float32)
    solved = unit_lower_inverse(m_keys * (beta_t * k_scale)[:, None] * k_scale[None, :],
                                PLACES) * beta_t[None, :]
    for part in range(0, V, BV):
        col = part + tl.arange(0, BV)
        v_tile = here[:, None] & (col < V)[None, :]
        values = tl.load(v + t[:, None] * v_row + head * v_head + col[None, :], mask=v_tile, other=0.0)
        tl.store(u + row * V + col[None, :], product_right(solved, values), mask=v_tile)
    solved = solved * k_scale[None, :]
    for part in range(0, K, BK):
        line = part + tl.arange(0, BK)
        whole, rest = decay_sums(_rows(g, t, g_row, g_head, head, line, here, K))
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        w_tile = product(solved, keys * decay_of(whole + rest))
        tl.store(w + row * K + line[None, :], w_tile, mask=here[:, None] & (line < K)[None, :])


def kimi_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_THK: torch.Tensor,
               beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *, scale: float,
               layer: int = 0) -> torch.Tensor:
    tokens, heads, v_dim = v_THV.shape
    k_dim = k_THK.shape[2]
    q_THK, k_THK, v_THV, g_THK = (dense_rows(x) for x in (q_THK, k_THK, v_THV, g_THK))
    out_THV = torch.empty((tokens, heads, v_dim), dtype=q_THK.dtype, device=q_THK.device)
    step = device_runs(runs)
    if run_by_token(q_THK, k_THK, v_THV, g_THK, beta_TH, out_THV, state_SHKV, runs, step, scale=scale,
                    layer=layer):
        return out_THV
    buffers = chunk_buffers(step, runs, state_SHKV, tokens, by_line=True)
    launch(_prepare, (heads, step.chunk_count))(
        q_THK, k_THK, v_THV, g_THK, beta_TH, buffers.w, buffers.u, buffers.p, buffers.q_left, buffers.k_left,
        buffers.decay, step.chunk_first_C, step.chunk_tokens_C, *q_THK.stride()[:2], *k_THK.stride()[:2],
        *v_THV.stride()[:2], *g_THK.stride()[:2], *beta_TH.stride(), buffers.base, scale, H=heads, K=k_dim,
        V=v_dim, BK=min(PREPARE.width, padded(k_dim)), BV=PREPARE.width, num_warps=PREPARE.warps,
        num_stages=PREPARE.stages)
    run_chunks(q_THK, k_THK, out_THV, state_SHKV, runs, step, buffers, by_line=True)
    return out_THV


def compilations() -> list[Compilation]:
    variants = recurrent_compilations("kimi_delta", by_line=True)
    variants += chunk_compilations("kimi_delta", by_line=True)
    scratch = dict.fromkeys(("g", "beta", "w", "u", "p", "q_left", "k_left", "decay"), "*fp32")
    constants = {"H": 32, "K": 128, "V": 128, "BK": PREPARE.width, "BV": PREPARE.width}
    for dtype in ("*bf16", "*fp32"):
        variants.append(compilation_of(f"kimi_delta prepare {dtype[1:]}", _prepare,
                                    scratch | dict.fromkeys(("q", "k", "v"), dtype), constants, PREPARE))
    return variants
