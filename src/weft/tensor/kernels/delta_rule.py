"""The delta rule by Triton: the recurrence for decodes, the chunked form for prefills.

    recurrent   a program: (block of V, head, run)     token by token, the state [K, V block] in registers
    prepare     a program: (chunk, head)               W, U, P, and the factors of q and k
    states      a program: (block of V, head, run)     S of each chunk to a buffer, U becomes v', taps, slot
    outputs     a program: (block of V, head, chunk)   o = q~ S + P v'

``recurrent`` is decode: a slot is read once and written once, in place. A read is 128 bytes of a row (32
float32 of V: whole sectors, 16 bytes a thread), 16 KB a program at K = 128. At 32 heads there are 128
programs at batch 1 and two thousand at batch 16, enough to keep the copies busy. It is also the prefill of
states in few bits, which are rounded after every token (``tensor.rounding``); that rounding has no chunked
form.

In the chunked form only ``states`` is sequential, and in it only the chain that needs S: two products a
chunk. ``outputs`` computes the tokens' outputs afterwards, on all SMs, from the stored states. Rejected:
outputs inside the pass. It needs no buffer for states, but its chain is twice as long and has only heads x V
/ 32 programs. The scratch of a chunk is float32: for each place and head K + V numbers and a row of P, for
each head a state. 32 heads of 128 x 128 have 4.7 MB a chunk. Chunks go in segments of bounded scratch
(``tensor.gpu.segments``), three launches each.

Run r has the chunks [chunk_begin[r], chunk_begin[r + 1]) of ``tensor.gpu.runs``; a chunk's tap is the state
after it. A PAD slot is neither read nor written, a fresh slot is not read. Inside a slot the state is dense.

Triton does not specialise on numbers that change from step to step: the first prefill run, the layer,
addresses of the step's small tables. Else every combination would be compiled while serving.

``ops.delta_rule`` explains the letters (P is M(q)). ``prepare`` has two kernels. With a decay for each head,
a program takes one chunk of one value head, all of it in registers and shared memory. It stores W, U, P and
two factors per token. q and k are not normalised: raw products of 16-bit tensors are exact on tensor cores.
Their norms are factors of rows and columns, as the decays are:

    A_ij = beta_i |k_i|^-1 |k_j|^-1 exp(G_i - G_j) k_i.k_j          W = (T diag(beta exp(G) |k|^-1)) k
    P_ij = scale |q_i|^-1 |k_j|^-1 exp(G_i - G_j) q_i.k_j           U = (T diag(beta)) v

With a decay for each line of the state, it stores the scaled q and k. M below its diagonal comes in six
levels of halves, all of them on tensor cores. Level h has the pairs of neighbouring blocks of h places:

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

Sums over the lines take 32 lines at a time, so that tiles fit in registers. Products keep float32's
precision, because states are snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, dense_rows, launch, padded
from weft.tensor.gpu.products import (
    decay_of,
    decay_sums,
    decay_to_end,
    only_if,
    pairwise_decay,
    product,
    product_left,
    product_right,
    rounded,
    unit_lower_inverse,
    unit_scale,
)
from weft.tensor.gpu.runs import DeviceRuns, device_runs
from weft.tensor.gpu.segments import Segment, chunks_at_once, load_state, part_of_run, segments, store_state
from weft.tensor.inputs import Runs
from weft.tensor.native import KEY_DIM_MAX
from weft.tensor.op import UNFIT, Unfit
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
LEVELS = tl.constexpr(CHUNK_TOKENS.bit_length() - 1)
RECURRENT = Blocks(32)
PREPARE_HEADS = Blocks(32)
PREPARE_LINES = Blocks(32, warps=8)


def states_blocks(k_padded: int) -> Blocks:
    """W (float32) and k of one chunk are K x 384 bytes in shared memory, twice with the next ones in flight:
    84 KB at 128. With 32 columns the products take all but half a kilobyte of each thread's registers."""
    return Blocks(16, stages=2 if k_padded <= 128 else 1)


def outputs_blocks(k_padded: int, by_line: bool, q_dtype: torch.dtype) -> Blocks:
    """One program covers all of V = 128, so q and P are read once; eight warps hold the state. If q is
    float32 (given so, or scaled by the decay of each line), Ampere's registers hold its products for 32
    columns only."""
    if by_line:
        return Blocks(32, warps=8)
    if q_dtype == torch.float32:
        return Blocks(32)
    return Blocks(width=128 if k_padded <= 128 else 64, warps=8)


@triton.jit
def _token(s, q, k, v, g, beta, out, t, head, key, line, col, q_row, q_head, k_row, k_head, v_row, v_head,
           g_row, g_head, beta_row, beta_head, out_row, scale, K: tl.constexpr, V: tl.constexpr,
           BY_LINE: tl.constexpr):
    """One token of one head: advances ``s`` [K, V block] and stores the token's output."""
    q_t = tl.load(q + t * q_row + key * q_head + line, mask=line < K, other=0.0).to(tl.float32)
    k_t = tl.load(k + t * k_row + key * k_head + line, mask=line < K, other=0.0).to(tl.float32)
    v_t = tl.load(v + t * v_row + head * v_head + col, mask=col < V, other=0.0).to(tl.float32)
    beta_t = tl.load(beta + t * beta_row + head * beta_head).to(tl.float32)
    q_t = q_t * (tl.rsqrt(tl.sum(q_t * q_t) + 1e-6) * scale)
    k_t = k_t * tl.rsqrt(tl.sum(k_t * k_t) + 1e-6)
    if BY_LINE:
        decay = decay_of(tl.load(g + t * g_row + head * g_head + line, mask=line < K, other=0.0))[:, None]
    else:
        decay = decay_of(tl.load(g + t * g_row + head * g_head))
    s = s * decay
    delta = beta_t * (v_t - tl.sum(s * k_t[:, None], axis=0))
    # Both sums read the state before the token, so neither waits for the other.
    o_t = tl.sum(s * q_t[:, None], axis=0) + tl.sum(q_t * k_t) * delta
    tl.store(out + t * out_row + head * V + col, o_t.to(out.dtype.element_ty), mask=col < V)
    return s + k_t[:, None] * delta[None, :]


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def recurrent(q, k, v, g, beta, out, state, slots, starts, fresh, chunk_begin, chunk_first, chunk_tokens,
              chunk_tap, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
              out_row, slot_stride, first_run, layer, scale, GROUP: tl.constexpr, K: tl.constexpr,
              V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BY_LINE: tl.constexpr,
              PREFILL: tl.constexpr):
    """Grid: blocks of V, heads, runs from ``first_run`` on. Token t of a decode run is t = run."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    element = (head * K + line)[:, None] * V + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    live = (slot >= 0) & (tl.load(fresh + run) == 0)
    s = tl.load(state + slot * slot_stride + element,
                mask=(line < only_if(live, K))[:, None] & (col < V)[None, :], other=0.0).to(tl.float32)
    position = tl.load(starts + run)
    key = head // GROUP
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for c in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + c)
            for t in range(first, first + tl.load(chunk_tokens + c)):
                index = t - run_first
                s = _token(s, q, k, v, g, beta, out, run_first + index, head, key, line, col, q_row, q_head,
                           k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, out_row, scale,
                           K, V, BY_LINE)
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + c).to(tl.int64)
            tl.store(state + tap * slot_stride + element, s.to(dtype),
                     mask=(line < only_if(tap >= 0, K))[:, None] & (col < V)[None, :])
    else:
        s = _token(s, q, k, v, g, beta, out, run, head, key, line, col, q_row, q_head, k_row, k_head, v_row,
                   v_head, g_row, g_head, beta_row, beta_head, out_row, scale, K, V, BY_LINE)
        s = rounded(s, dtype, element, position, layer)
    tl.store(state + slot * slot_stride + element, s.to(dtype),
             mask=(line < only_if(slot >= 0, K))[:, None] & (col < V)[None, :])


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare_heads(q, k, v, g, beta, w, u, p, q_left, k_left, decay, chunk_first, chunk_tokens, q_row,
                   q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, base, scale,
                   H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
                   BV: tl.constexpr):
    """Grid: heads, chunks from ``base`` on. One decay for each head."""
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
def _prepare_lines(q, k, v, g, beta, w, u, p, q_left, k_left, decay, chunk_first, chunk_tokens, q_row,
                   q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, base, scale,
                   H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr):
    """Grid: heads, chunks from ``base`` on. One decay for each line of a head."""
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


@triton.jit(do_not_specialize=["first_run", "base", "limit"], do_not_specialize_on_alignment=STEP_TABLES)
def states(k, k_left, decay, w, u, chunk_states, state, carry_in, carry_out, slots, fresh, chunk_begin,
           chunk_first, chunk_tokens, chunk_tap, k_row, k_head, slot_stride, first_run, base, limit,
           H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
           BV: tl.constexpr, BY_LINE: tl.constexpr):
    """Grid: blocks of V, heads, prefill runs. Buffers begin at chunk ``base``. ``k_left``: the factors of k
    [C, H, 64], or with BY_LINE the scaled k itself [C, H, 64, K]. ``decay``: [C, H] or [C, H, K]. ``u``
    becomes v'; ``chunk_states`` [C, H, K, V]: the state before each chunk."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col, place = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, PLACES)
    inside = (line < K)[:, None] & (col < V)[None, :]
    element = line[:, None] * V + col[None, :]
    in_slot = head * (K * V) + element
    slot = tl.load(slots + run)
    begin, end, opens, closes = part_of_run(chunk_begin, run, base, limit)
    s = load_state(state, in_slot, slot, slot_stride, tl.load(fresh + run), carry_in, begin, end, opens,
                   line, K, col < V)
    for c in range(begin, end):
        first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
        here = place < tokens
        chunk = ((c - base) * H + head).to(tl.int64)
        row = (chunk * PLACES + place)[:, None]
        tile, v_tile = here[:, None] & (line < K)[None, :], here[:, None] & (col < V)[None, :]
        tl.store(chunk_states + chunk * (K * V) + element, s, mask=inside)
        w_tile = tl.load(w + row * K + line[None, :], mask=tile, other=0.0)
        added = tl.load(u + row * V + col[None, :], mask=v_tile, other=0.0) - product(w_tile, s)
        tl.store(u + row * V + col[None, :], added, mask=v_tile)
        if BY_LINE:
            keys = tl.load(k_left + row * K + line[None, :], mask=tile, other=0.0)
            over_chunk = tl.load(decay + chunk * K + line, mask=line < K, other=0.0)[:, None]
            s = s * over_chunk + product(tl.trans(keys), added)
        else:
            keys = tl.load(k + (first + place).to(tl.int64)[:, None] * k_row + (head // GROUP) * k_head
                           + line[None, :], mask=tile, other=0.0)
            left = tl.load(k_left + chunk * PLACES + place, mask=here, other=0.0)
            s = s * tl.load(decay + chunk) + product_left(tl.trans(keys), added * left[:, None])
        tap = tl.load(chunk_tap + c).to(tl.int64)
        tl.store(state + tap * slot_stride + in_slot, s,
                 mask=(line < only_if(tap >= 0, K))[:, None] & (col < V)[None, :])
    store_state(s, state, in_slot, slot, slot_stride, carry_out, begin, end, closes, line, K, col < V)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def outputs(q, q_left, p, u, chunk_states, out, chunk_first, chunk_tokens, q_row, q_head, base,
            H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
            BV: tl.constexpr, BY_LINE: tl.constexpr):
    """Grid: blocks of V, heads, chunks from ``base`` on. ``q_left``: the factors of q S [C, H, 64], or
    with BY_LINE the scaled q itself [C, H, 64, K]; ``p`` [C, H, 64, 64]; ``out`` [T, H, V]."""
    head, c = tl.program_id(1), base + tl.program_id(2)
    line, col, place = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, PLACES)
    first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
    here = place < tokens
    chunk = (tl.program_id(2) * H + head).to(tl.int64)
    row = (chunk * PLACES + place)[:, None]
    tile, v_tile = here[:, None] & (line < K)[None, :], here[:, None] & (col < V)[None, :]
    s = tl.load(chunk_states + chunk * (K * V) + line[:, None] * V + col[None, :],
                mask=(line < K)[:, None] & (col < V)[None, :], other=0.0)
    if BY_LINE:
        o_tile = product(tl.load(q_left + row * K + line[None, :], mask=tile, other=0.0), s)
    else:
        queries = tl.load(q + (first + place).to(tl.int64)[:, None] * q_row + (head // GROUP) * q_head
                          + line[None, :], mask=tile, other=0.0)
        left = tl.load(q_left + chunk * PLACES + place, mask=here, other=0.0)
        o_tile = product_left(queries, s) * left[:, None]
    p_tile = tl.load(p + row * PLACES + place[None, :], mask=here[:, None], other=0.0)
    o_tile += product(p_tile, tl.load(u + row * V + col[None, :], mask=v_tile, other=0.0))
    at = ((first + place).to(tl.int64) * H + head)[:, None] * V + col[None, :]
    tl.store(out + at, o_tile.to(out.dtype.element_ty), mask=v_tile)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """The scratch memory of a segment, float32. The kernels above state the shapes."""

    w: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    q_left: torch.Tensor
    k_left: torch.Tensor
    decay: torch.Tensor
    chunk_states: torch.Tensor


def _chunk_segments(step: DeviceRuns, state_SHKV: torch.Tensor,
                   by_line: bool) -> Iterator[tuple[Segment, ChunkBuffers]]:
    """The segments of a step, with one set of buffers for all of them."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    lines = (k_dim,) if by_line else ()
    factors = (heads, CHUNK_TOKENS, *lines)
    shapes = [(heads, CHUNK_TOKENS, k_dim), (heads, CHUNK_TOKENS, v_dim), (heads, CHUNK_TOKENS, CHUNK_TOKENS),
              factors, factors, (heads, *lines), (heads, k_dim, v_dim)]
    each = chunks_at_once(step, 4 * sum(map(math.prod, shapes)))
    buffers = ChunkBuffers(*(torch.empty((each, *shape), dtype=torch.float32, device=state_SHKV.device)
                             for shape in shapes))
    for segment in segments(step, state_SHKV, each):
        yield segment, buffers


def delta_rule(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
               beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *, scale: float,
               layer: int = 0) -> torch.Tensor | Unfit:
    dtype, (tokens, heads, v_dim) = q_THK.dtype, v_THV.shape
    k_dim, by_line = k_THK.shape[2], g_TH.ndim == 3
    if k_dim > KEY_DIM_MAX:
        return UNFIT
    q_THK, k_THK, v_THV = dense_rows(q_THK), dense_rows(k_THK), dense_rows(v_THV)
    g_TH = dense_rows(g_TH) if by_line else g_TH
    if q_THK.dtype != k_THK.dtype:
        q_THK, k_THK = q_THK.float(), k_THK.float()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=dtype, device=q_THK.device)
    step = device_runs(runs)
    if _run_by_token(q_THK, k_THK, v_THV, g_TH, beta_TH, out_THV, state_SHKV, runs, step, scale=scale,
                     layer=layer):
        return out_THV
    kernel, blocks, sizes = _prepare_form(by_line, heads // k_THK.shape[1], k_dim)
    for segment, buffers in _chunk_segments(step, state_SHKV, by_line):
        launch(kernel, (heads, segment.chunk_count))(
            q_THK, k_THK, v_THV, g_TH, beta_TH, buffers.w, buffers.u, buffers.p, buffers.q_left,
            buffers.k_left, buffers.decay, step.chunk_first_C, step.chunk_tokens_C, *q_THK.stride()[:2],
            *k_THK.stride()[:2], *v_THV.stride()[:2], *g_TH.stride()[:2], *beta_TH.stride(), segment.begin,
            scale, H=heads, K=k_dim, V=v_dim, BV=blocks.width, **sizes, num_warps=blocks.warps,
            num_stages=blocks.stages)
        _run_chunks(q_THK, k_THK, out_THV, state_SHKV, runs, step, segment, buffers, by_line=by_line)
    return out_THV


def _prepare_form(by_line: bool, group: int, k_dim: int) -> tuple[Any, Blocks, dict[str, int]]:
    """The kernel that prepares chunks, its blocks, and the constants that it alone has."""
    if by_line:
        return _prepare_lines, PREPARE_LINES, {"BK": min(PREPARE_LINES.width, padded(k_dim))}
    return _prepare_heads, PREPARE_HEADS, {"GROUP": group, "KP": padded(k_dim)}


def _run_by_token(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g: torch.Tensor,
                  beta_TH: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs,
                  step: DeviceRuns, *, scale: float, layer: int) -> bool:
    """The token-by-token part of a step: decodes, and prefills of states that are rounded after each token.
    Returns whether this was the whole step."""
    inputs = (q_THK, k_THK, v_THV, g, beta_TH, out_THV, state_SHKV, runs, step)
    if step.decode_count:
        _run_recurrent(*inputs, prefill=False, scale=scale, layer=layer)
    if step.decode_count == step.run_count:
        return True
    if state_SHKV.dtype == torch.float32:
        return False
    _run_recurrent(*inputs, prefill=True, scale=scale, layer=layer)
    return True


def _run_recurrent(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g: torch.Tensor,
                   beta_TH: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs,
                   step: DeviceRuns, *, prefill: bool, scale: float, layer: int) -> None:
    """All decode runs, or all prefill runs; ``g`` [T, H], or [T, H, K] for a decay of each line."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    first = step.decode_count if prefill else 0
    count = step.run_count - first if prefill else step.decode_count
    grid = (triton.cdiv(v_dim, RECURRENT.width), heads, count)
    launch(recurrent, grid)(
        q_THK, k_THK, v_THV, g, beta_TH, out_THV, state_SHKV, runs.slots_R, runs.starts_R, step.fresh_R,
        step.chunk_begin_R, step.chunk_first_C, step.chunk_tokens_C, step.chunk_tap_C, *q_THK.stride()[:2],
        *k_THK.stride()[:2], *v_THV.stride()[:2], *g.stride()[:2], *beta_TH.stride(), heads * v_dim,
        state_SHKV.stride(0), first, layer, scale, GROUP=heads // k_THK.shape[1], K=k_dim, V=v_dim,
        KP=padded(k_dim), BV=RECURRENT.width, BY_LINE=g.ndim == 3, PREFILL=prefill, num_warps=RECURRENT.warps,
        num_stages=RECURRENT.stages)


def _run_chunks(q_THK: torch.Tensor, k_THK: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor,
                runs: Runs, step: DeviceRuns, segment: Segment, buffers: ChunkBuffers, *,
                by_line: bool) -> None:
    """The kernels after ``prepare``: states, then outputs of a segment."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    sizes = {"H": heads, "GROUP": heads // k_THK.shape[1], "K": k_dim, "V": v_dim, "KP": padded(k_dim),
             "BY_LINE": by_line}
    blocks = states_blocks(padded(k_dim))
    launch(states, (triton.cdiv(v_dim, blocks.width), heads, step.run_count - step.decode_count))(
        k_THK, buffers.k_left, buffers.decay, buffers.w, buffers.u, buffers.chunk_states, state_SHKV,
        segment.carry_in, segment.carry_out, runs.slots_R, step.fresh_R, step.chunk_begin_R,
        step.chunk_first_C, step.chunk_tokens_C, step.chunk_tap_C, *k_THK.stride()[:2], state_SHKV.stride(0),
        step.decode_count, segment.begin, segment.end, **sizes, BV=blocks.width, num_warps=blocks.warps,
        num_stages=blocks.stages)
    blocks = outputs_blocks(padded(k_dim), by_line, q_THK.dtype)
    width = min(blocks.width, padded(v_dim))
    launch(outputs, (triton.cdiv(v_dim, width), heads, segment.chunk_count))(
        q_THK, buffers.q_left, buffers.p, buffers.u, buffers.chunk_states, out_THV, step.chunk_first_C,
        step.chunk_tokens_C, *q_THK.stride()[:2], segment.begin, **sizes, BV=width, num_warps=blocks.warps,
        num_stages=blocks.stages)
