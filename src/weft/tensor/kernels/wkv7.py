"""WKV7 by Triton: the recurrence, token by token, for decodes and prefills.

    recurrent   a program: (block of V, head, run)     the state [K, V block] in registers

A slot is read once and written once, in place; taps are written between chunks, which end at each tap. A
prompt goes through one program for each block of a head, one token after the other: the chunked form would
have four decayed products of chunks, and is not written yet. States in few bits are rounded after every token
(``tensor.rounding``). A PAD slot is neither read nor written, a fresh slot is not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, dense_rows, padded
from weft.tensor.gpu.products import decay_of, rounded
from weft.tensor.gpu.recurrence import launch_by_token, load_slot, store_slot, warps_of_lines
from weft.tensor.inputs import Runs
from weft.tensor.native import KEY_DIM_MAX
from weft.tensor.op import UNFIT, Unfit

RECURRENT = Blocks(32, warps=1)
"""Blocks for K up to 128, as for the delta rule."""


@triton.jit
def _of_token(x, t, head, column, row, per_head, size: tl.constexpr):
    return tl.load(x + t * row + head * per_head + column, mask=column < size, other=0.0).to(tl.float32)


@triton.jit
def _token(
    s,
    r,
    g,
    k,
    v,
    kk,
    b,
    out,
    t,
    head,
    line,
    col,
    r_row,
    r_head,
    g_row,
    g_head,
    k_row,
    k_head,
    v_row,
    v_head,
    kk_row,
    kk_head,
    b_row,
    b_head,
    out_row,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Advance ``s`` [K, V block] by a token, and store its output."""
    seen = tl.sum(s * _of_token(kk, t, head, line, kk_row, kk_head, K)[:, None], axis=0)
    s = s * decay_of(_of_token(g, t, head, line, g_row, g_head, K))[:, None]
    s += _of_token(k, t, head, line, k_row, k_head, K)[:, None] * _of_token(v, t, head, col, v_row, v_head, V)[None, :]
    s -= _of_token(b, t, head, line, b_row, b_head, K)[:, None] * seen[None, :]
    o_t = tl.sum(s * _of_token(r, t, head, line, r_row, r_head, K)[:, None], axis=0)
    tl.store(out + t * out_row + head * V + col, o_t.to(out.dtype.element_ty), mask=col < V)
    return s


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def recurrent(
    r,
    g,
    k,
    v,
    kk,
    b,
    out,
    state,
    slots,
    starts,
    fresh,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    r_row,
    r_head,
    g_row,
    g_head,
    k_row,
    k_head,
    v_row,
    v_head,
    kk_row,
    kk_head,
    b_row,
    b_head,
    out_row,
    slot_stride,
    first_run,
    layer,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Run the recurrence. Grid: blocks of V, heads, runs from ``first_run`` on. Token t of a decode run is t = run.

    ``r``, ``g``, ``k``, ``kk``, ``b`` [T, H, K] and ``v`` [T, H, V] by strides in elements; ``out`` [T, H, V];
    ``state`` [slots, H, K, V] with ``slot_stride``; ``slots``, ``starts`` int64 [R]; ``fresh`` and the ``chunk_*``
    tables int32, of ``gpu.runs``.
    """
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    element = (head * K + line)[:, None] * V + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    s = load_slot(state, element, slot, slot_stride, tl.load(fresh + run), line, K, col < V)
    position = tl.load(starts + run)
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for c in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + c)
            for t in range(first, first + tl.load(chunk_tokens + c)):
                index = t - run_first
                s = _token(
                    s,
                    r,
                    g,
                    k,
                    v,
                    kk,
                    b,
                    out,
                    run_first + index,
                    head,
                    line,
                    col,
                    r_row,
                    r_head,
                    g_row,
                    g_head,
                    k_row,
                    k_head,
                    v_row,
                    v_head,
                    kk_row,
                    kk_head,
                    b_row,
                    b_head,
                    out_row,
                    K,
                    V,
                )
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + c).to(tl.int64)
            store_slot(s, state, element, tap, slot_stride, line, K, col < V)
    else:
        s = _token(
            s,
            r,
            g,
            k,
            v,
            kk,
            b,
            out,
            run,
            head,
            line,
            col,
            r_row,
            r_head,
            g_row,
            g_head,
            k_row,
            k_head,
            v_row,
            v_head,
            kk_row,
            kk_head,
            b_row,
            b_head,
            out_row,
            K,
            V,
        )
        s = rounded(s, dtype, element, position, layer)
    store_slot(s, state, element, slot, slot_stride, line, K, col < V)


def wkv7(
    r_THK: torch.Tensor,
    g_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    kk_THK: torch.Tensor,
    b_THK: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    layer: int = 0,
) -> torch.Tensor | Unfit:
    tokens, heads, v_dim = v_THV.shape
    k_dim = k_THK.shape[2]
    if k_dim > KEY_DIM_MAX:
        return UNFIT
    inputs = [dense_rows(x) for x in (r_THK, g_THK, k_THK, v_THV, kk_THK, b_THK)]
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    out_THV = torch.empty((tokens, heads, v_dim), dtype=r_THK.dtype, device=r_THK.device)
    launch_by_token(
        recurrent,
        (triton.cdiv(v_dim, RECURRENT.width), heads),
        [*inputs, out_THV],
        state_SHKV,
        runs,
        [*strides, heads * v_dim],
        layer,
        K=k_dim,
        V=v_dim,
        KP=padded(k_dim),
        BV=RECURRENT.width,
        num_warps=RECURRENT.warps * warps_of_lines(k_dim),
        num_stages=RECURRENT.stages,
    )
    return out_THV
