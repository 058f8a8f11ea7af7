"""kimi_delta by Triton: as ``gated_delta``, with one decay per line of the state.

Decodes, and prefills of states in few bits, use the recurrence of ``tensor.gpu.delta``. The pass over the
states and the outputs are shared too. Only ``_prepare`` is specific to this op: M(k), M(q), W, U and the
scaled q and k of a chunk of one head (``cpu`` explains the letters). M below its diagonal comes in six levels
of halves, all of them on tensor cores. Level h has the pairs of neighbouring blocks of h places:

    place  0 1 2 3 4 5 6 7      h = 1   (1, 0) (3, 2) (5, 4) (7, 6)
                                h = 2   (2..3, 0..1) (6..7, 4..5)
                                h = 4   (4..7, 0..3)                    up to h = 32: each pair i > j once

    M(x)_ij = (x_i exp(sum of g over the rows' block up to i)) . (k_j exp(sum of g after j in its block))

Both factors are at most 1, whatever the decays. At each level a row lies in the later block of its pair or in
the earlier one. So it has one factor, and one tile of scaled k is the left and the right side of M(k). Sums
of the next level add the sum of the other block of the pair. So a sum only adds decays of the places between,
all of one sign: its relative error is at most 6 x 2^-24, and nothing cancels. Products cover the whole tile
and a select takes the pairs: 12 products of 64 x 64 x 32 for 32 lines. Rejected: blocks of 16 whose diagonal
is summed by distance. That is 16 rounds for 32 lines on CUDA cores, each with loads of shifted rows.

Sums over the lines of the state take 32 lines at a time, so that tiles fit in registers. Norms are factors of
rows and columns of M, as in ``gated_delta``. Products keep float32's precision, because states are
checkpoints.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.delta import (
    PLACES,
    chunk_compilations,
    chunk_segments,
    recurrent_compilations,
    run_by_token,
    run_chunks,
)
from weft.tensor.gpu.launch import STEP_TABLES, Blocks, compilation_of, dense_rows, padded
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.products import (
    decay_of,
    product,
    product_right,
    unit_lower_inverse,
)
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs
from weft.units import CHUNK_TOKENS

PREPARE = Blocks(32, warps=8)
LEVELS = tl.constexpr(CHUNK_TOKENS.bit_length() - 1)


@triton.jit
def _rows(x, t, x_row, x_head, head, line, mask, K: tl.constexpr):
    """[places, lines] of one head, float32; zeros where ``mask`` [places] is not set."""
    return tl.load(x + t[:, None] * x_row + head * x_head + line[None, :],
                   mask=mask[:, None] & (line < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _add_pairs(m_keys, m_queries, keys, queries, g, place):
    """Add the contribution of some lines of the state to M(k) and M(q) below their diagonals. Returns both,
    and the sums of ``g`` up to and with each place, and after it."""
    rows, cols = place[:, None], place[None, :]
    upto, after = g, tl.zeros(g.shape, tl.float32)
    for level in range(LEVELS):
        block = place >> level
        later = (block & 1) == 1
        factor = decay_of(tl.where(later[:, None], upto, after))
        right = keys * factor
        pairs = later[:, None] & ((rows >> level) - 1 == (cols >> level))
        m_keys += tl.where(pairs, product(right, tl.trans(right)), 0.0)
        m_queries += tl.where(pairs, product(queries * factor, tl.trans(right)), 0.0)
        other_end = ((block ^ 1) << level) + (1 << level) - 1
        other = tl.gather(upto, tl.broadcast_to(other_end[:, None], g.shape), 0)
        upto += tl.where(later[:, None], other, 0.0)
        after += tl.where(later[:, None], 0.0, other)
    return m_keys, m_queries, upto, after


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare(q, k, v, g, beta, w, u, p, q_left, k_left, decay, chunk_first, chunk_tokens, q_row, q_head,
             k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, base, scale, H: tl.constexpr,
             K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Grid: heads, chunks from ``base`` on. Outputs as in ``tensor.gpu.delta``."""
    head, c = tl.program_id(0), base + tl.program_id(1)
    chunk = (tl.program_id(1) * H + head).to(tl.int64)
    place = tl.arange(0, PLACES)
    tokens = tl.load(chunk_tokens + c)
    here = place < tokens
    t = (tl.load(chunk_first + c) + place).to(tl.int64)
    row = (chunk * PLACES + place)[:, None]
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
        m_keys, m_queries, upto, after = _add_pairs(m_keys, m_queries, keys, queries,
                                                    _rows(g, t, g_row, g_head, head, line, here, K), place)
        m_queries += tl.where(place[:, None] == place[None, :], tl.sum(queries * keys, axis=1)[:, None], 0.0)
        over_chunk = decay_of(tl.sum(tl.where(place[:, None] == PLACES - 1, upto, 0.0), axis=0))
        tile = here[:, None] & (line < K)[None, :]
        tl.store(decay + chunk * K + line, over_chunk, mask=line < K)
        tl.store(q_left + row * K + line[None, :], queries * q_scale[:, None] * decay_of(upto), mask=tile)
        tl.store(k_left + row * K + line[None, :], keys * k_scale[:, None] * decay_of(after), mask=tile)
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
        upto = tl.cumsum(_rows(g, t, g_row, g_head, head, line, here, K), axis=0)
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        w_tile = product(solved, keys * decay_of(upto))
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
    for segment, buffers in chunk_segments(step, state_SHKV, by_line=True):
        launch(_prepare, (heads, segment.chunk_count))(
            q_THK, k_THK, v_THV, g_THK, beta_TH, buffers.w, buffers.u, buffers.p, buffers.q_left,
            buffers.k_left, buffers.decay, step.chunk_first_C, step.chunk_tokens_C, *q_THK.stride()[:2],
            *k_THK.stride()[:2], *v_THV.stride()[:2], *g_THK.stride()[:2], *beta_TH.stride(), segment.begin,
            scale, H=heads, K=k_dim, V=v_dim, BK=min(PREPARE.width, padded(k_dim)), BV=PREPARE.width,
            num_warps=PREPARE.warps, num_stages=PREPARE.stages)
        run_chunks(q_THK, k_THK, out_THV, state_SHKV, runs, step, segment, buffers, by_line=True)
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
