"""gated_delta by Triton: the recurrence for decodes, the chunked form for prefills.

The chunked form is that of ``cpu``, which explains A, T, W, U, v' and o. ``tensor.gpu.delta`` has the kernels
and their reasons. Only ``_prepare`` is specific to this op. A program takes one chunk of one value head, all
of it in registers and shared memory. It stores W, U, P and two factors per token.

q and k are not normalised: raw products of 16-bit tensors are exact on tensor cores. Their norms are factors
of rows and columns, as the decays are:

    A_ij = beta_i |k_i|^-1 |k_j|^-1 exp(G_i - G_j) k_i.k_j          W = (T diag(beta exp(G) |k|^-1)) k
    P_ij = scale |q_i|^-1 |k_j|^-1 exp(G_i - G_j) q_i.k_j           U = (T diag(beta)) v
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
    decay_sums,
    decay_to_end,
    pairwise_decay,
    product,
    product_right,
    unit_lower_inverse,
    unit_scale,
)
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs

PREPARE = Blocks(32)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare(q, k, v, g, beta, w, u, p, q_left, k_left, decay, chunk_first, chunk_tokens, q_row, q_head,
             k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, base, scale, H: tl.constexpr,
             GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr):
    """Grid: heads, chunks from ``base`` on. Outputs as in ``tensor.gpu.delta``."""
    head, c = tl.program_id(0), base + tl.program_id(1)
    chunk = (tl.program_id(1) * H + head).to(tl.int64)
    line, place = tl.arange(0, KP), tl.arange(0, PLACES)
    first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
    here = place < tokens
    t = (first + place).to(tl.int64)
    row = chunk * PLACES + place
    tile = here[:, None] & (line < K)[None, :]
    key = head // GROUP
    whole, rest = decay_sums(tl.load(g + t * g_row + head * g_head, mask=here, other=0.0))
    beta_t = tl.load(beta + t * beta_row + head * beta_head, mask=here, other=0.0).to(tl.float32)
    decays = pairwise_decay(whole, rest, place)
    grown = decay_of(whole + rest)

    keys = tl.load(k + t[:, None] * k_row + key * k_head + line[None, :], mask=tile, other=0.0)
    k_scale = unit_scale(keys.to(tl.float32))
    scaled = decays * k_scale[None, :]
    a = product(keys, tl.trans(keys)) * scaled * (beta_t * k_scale)[:, None]

    queries = tl.load(q + t[:, None] * q_row + key * q_head + line[None, :], mask=tile, other=0.0)
    q_scale = unit_scale(queries.to(tl.float32)) * scale
    attention = product(queries, tl.trans(keys)) * scaled * q_scale[:, None]
    tl.store(p + row[:, None] * PLACES + place[None, :], attention, mask=here[:, None])
    tl.store(q_left + row, q_scale * grown, mask=here)
    left, over_chunk = decay_to_end(whole, rest, place, PLACES)
    tl.store(k_left + row, left * k_scale, mask=here)
    tl.store(decay + chunk, over_chunk)

    solved = unit_lower_inverse(a, PLACES)
    w_tile = product_right(solved * (beta_t * grown * k_scale)[None, :], keys)
    tl.store(w + row[:, None] * K + line[None, :], w_tile, mask=tile)
    solved = solved * beta_t[None, :]
    for part in range(0, V, BV):
        col = part + tl.arange(0, BV)
        v_tile = here[:, None] & (col < V)[None, :]
        values = tl.load(v + t[:, None] * v_row + head * v_head + col[None, :], mask=v_tile, other=0.0)
        tl.store(u + row[:, None] * V + col[None, :], product_right(solved, values), mask=v_tile)


def gated_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
                beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *, scale: float,
                layer: int = 0) -> torch.Tensor:
    dtype, (tokens, heads, v_dim) = q_THK.dtype, v_THV.shape
    k_heads, k_dim = k_THK.shape[1:]
    q_THK, k_THK, v_THV = dense_rows(q_THK), dense_rows(k_THK), dense_rows(v_THV)
    if q_THK.dtype != k_THK.dtype:
        q_THK, k_THK = q_THK.float(), k_THK.float()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=dtype, device=q_THK.device)
    step = device_runs(runs)
    if run_by_token(q_THK, k_THK, v_THV, g_TH, beta_TH, out_THV, state_SHKV, runs, step, scale=scale,
                    layer=layer):
        return out_THV
    for segment, buffers in chunk_segments(step, state_SHKV, by_line=False):
        launch(_prepare, (heads, segment.chunk_count))(
            q_THK, k_THK, v_THV, g_TH, beta_TH, buffers.w, buffers.u, buffers.p, buffers.q_left,
            buffers.k_left, buffers.decay, step.chunk_first_C, step.chunk_tokens_C,
            *q_THK.stride()[:2], *k_THK.stride()[:2], *v_THV.stride()[:2], *g_TH.stride(), *beta_TH.stride(),
            segment.begin, scale, H=heads, GROUP=heads // k_heads, K=k_dim, V=v_dim, KP=padded(k_dim),
            BV=PREPARE.width, num_warps=PREPARE.warps, num_stages=PREPARE.stages)
        run_chunks(q_THK, k_THK, out_THV, state_SHKV, runs, step, segment, buffers, by_line=False)
    return out_THV


def compilations() -> list[Compilation]:
    variants = recurrent_compilations("gated_delta", by_line=False)
    variants += chunk_compilations("gated_delta", by_line=False)
    scratch = dict.fromkeys(("g", "beta", "w", "u", "p", "q_left", "k_left", "decay"), "*fp32")
    for dtype, k_dim in (("*bf16", 128), ("*fp32", 128)):
        constants = {"H": 32, "GROUP": 2, "K": k_dim, "V": k_dim, "KP": k_dim, "BV": PREPARE.width}
        variants.append(compilation_of(f"gated_delta prepare {dtype[1:]} {k_dim}", _prepare,
                                    scratch | dict.fromkeys(("q", "k", "v"), dtype), constants, PREPARE))
    return variants
